"""Answers compared per second by our workers and by pebble's process pool, on the pairs of the grader's parity rows.

    pip install pebble && python -m scripts.benchmarks.pebble_workers

Both have two processes, a time limit for every answer and the same function; they are timed in alternation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

from trl_ext.io import read_jsonl
from trl_ext.rewards.extract import ANSWER_FORMATS
from trl_ext.rewards.graders import COMPATIBLE, STRICT
from trl_ext.rewards.workers.comparison import compare
from trl_ext.rewards.workers.pool import Pool, WorkerLimits

ROWS = Path(__file__).parents[2] / "tests" / "data" / "grader_parity.jsonl"
LIMITS = WorkerLimits()
Job: TypeAlias = tuple[str, dict[str, Any], str, str]  # the comparison, its options, answer and reference answer


def main() -> None:
    """Print a line of JSON per comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timings of each pool (default: 5)")
    rounds = parser.parse_args().rounds
    import pebble

    for comparison in (STRICT, COMPATIBLE):
        jobs: list[Job] = [(comparison.function, {}, *pair) for pair in pairs_of(ROWS)]
        ours = Pool("trl_ext.rewards.workers.comparison:compare", LIMITS)
        theirs = pebble.ProcessPool(max_workers=LIMITS.workers, context=get_context("spawn"))

        def by_pebble(
            jobs: Sequence[tuple[str, dict[str, object], str, str]], pool: pebble.ProcessPool = theirs
        ) -> list[Any]:
            return [f.result() for f in [pool.schedule(compare, args=job, timeout=LIMITS.seconds) for job in jobs]]

        verdicts = [list(map(tuple, ours.map(jobs))), by_pebble(jobs)]  # which starts them
        speeds: dict[str, list[float]] = {name: [] for name in ("ours", "pebble")}
        for _ in range(rounds):
            speeds["ours"].append(len(jobs) / seconds(ours.map, jobs))
            speeds["pebble"].append(len(jobs) / seconds(by_pebble, jobs))
        medians = {f"{name}_per_s": round(statistics.median(each)) for name, each in speeds.items()}
        same = verdicts[0] == verdicts[1]
        print(json.dumps({"comparison": comparison.function, "pairs": len(jobs), "same_verdicts": same, **medians}))
        theirs.stop()
        theirs.join()


def pairs_of(rows: Path) -> list[tuple[str, str]]:
    """Answers with their reference answers, of rows that have one."""
    extract = ANSWER_FORMATS["r1_zero"]
    extracted = [(extract(row["response"]), str(row["ground_truth"])) for row in read_jsonl(rows)]
    return [(answer, reference) for answer, reference in extracted if answer is not None]


def seconds(run: Callable[[Sequence[Job]], object], jobs: Sequence[Job]) -> float:
    """Of one call."""
    began = time.perf_counter()
    run(jobs)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
