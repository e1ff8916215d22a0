"""Run recipes one after the other in this process, each up to the line with which it ends.

Usage: accelerate launch ... --module tests.support.every_recipe RECIPE ARGUMENT ... -- RECIPE ...
"""

from __future__ import annotations

import runpy
import sys
from itertools import groupby

from tests.recipes.test_grpo import ROOT


def main() -> None:
    words = (list(group) for is_end, group in groupby(sys.argv[1:], key="--".__eq__) if not is_end)
    for recipe, *arguments in list(words):
        sys.argv = [recipe, *arguments]
        try:
            runpy.run_path(str(ROOT / "recipes" / recipe), run_name="__main__")
        except SystemExit as ended:
            print(f"{recipe} {' '.join(arguments)}: {ended.code}", flush=True)


if __name__ == "__main__":
    main()
