"""Run recipes and modules one after the other in this process, each up to the line with which it ends.

Usage: accelerate launch ... --module tests.support.every_recipe RECIPE ARGUMENT ... -- MODULE ARGUMENT ... -- ...
"""

from __future__ import annotations

import runpy
import sys
import time
from itertools import groupby

import psutil

from tests.recipes.test_grpo import ROOT


def main() -> None:
    words = (list(group) for is_end, group in groupby(sys.argv[1:], key="--".__eq__) if not is_end)
    began = psutil.Process().create_time()
    for program, *arguments in list(words):
        sys.argv = [program, *arguments]
        try:
            if program.endswith(".py"):
                runpy.run_path(str(ROOT / "recipes" / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            took = round(time.time() - began)
            print(f"{program} {' '.join(arguments)} after {took} s: {ended.code}", flush=True)
        began = time.time()


if __name__ == "__main__":
    main()
