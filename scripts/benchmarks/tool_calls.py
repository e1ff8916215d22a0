"""How many calls of the tool `python` a second serves, against Pythons that are started without a sandbox.

    python -m scripts.benchmarks.tool_calls --calls 200

Prints Markdown. Each call prints a sum. `sandbox` starts a Python for every call, as the discovery loop does, and the
pool, which is what the tool uses, forks one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trl_ext.io import markdown_table
from trl_ext.sandbox import run_blocks
from trl_ext.sandbox.limits import Limits
from trl_ext.sandbox.pool import SandboxPool
from trl_ext.turns.calculator import calculator
from trl_ext.turns.calls import cores

LIMITS = Limits(seconds=60.0, memory_mb=512)
Way = Callable[[int], str]


def bare(number: int) -> str:
    """Without a sandbox."""
    code = f"print({number} + 1)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def sandbox(number: int) -> str:
    """In one that a Python is started for."""
    return run_blocks([f"print({number} + 1)"], LIMITS).output


def per_second(way: Way, calls: int, at_once: int) -> float:
    """Calls whose answers are what they should be, per second."""
    way(0)
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        answers = list(threads.map(way, range(calls)))
    seconds = time.perf_counter() - began
    assert [int(answer) for answer in answers] == [number + 1 for number in range(calls)]
    return calls / seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--at_once", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    with SandboxPool(LIMITS) as pool:
        ways: dict[str, Way] = {
            "bare subprocess": bare,
            "sandbox": sandbox,
            "pool": lambda number: pool.run_blocks([f"print({number} + 1)"]).output,
            "calculator": lambda number: calculator(f"{number} + 1"),
        }
        rows = [
            [name, *(f"{per_second(way, arguments.calls, at_once):.1f}" for at_once in arguments.at_once)]
            for name, way in ways.items()
        ]
    print(f"calls per second by calls at once, on {cores()} cores\n")
    print("\n".join(markdown_table(["", *map(str, arguments.at_once)], rows)))


if __name__ == "__main__":
    main()
