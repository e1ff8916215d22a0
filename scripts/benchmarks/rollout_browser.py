"""The rollout browser on many rollouts: writing, size, opening, filtering and searching, each ROUNDS times.

    python -m scripts.benchmarks.rollout_browser [--rollouts 100000] [--per_token]

Rollouts are made on the spot: a group of 8 per problem, responses of 40 to 160 random words. The page is opened in
Chromium without a window; times are the page's own clock, from the start of loading. `opened_cpu_s` is what all of the
browser's processes have computed by then, which other programs on the machine do not stretch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from trl_ext.browse.command import browse
from trl_ext.io import write_json, write_jsonl

from .chromium import chromium

WORDS = tuple(f"{a}{b}{c}" for a in "bdfglmnprst" for b in "aeiou" for c in ("", "n", "r", "st"))
ROUNDS = 3


def rollouts(count: int, per_token: bool, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows as generations.jsonl has them, 1,000 per step."""
    rng = random.Random(seed)
    for n in range(count):
        words = rng.choices(WORDS, k=rng.randrange(40, 160))
        answer, is_correct = rng.randrange(100), rng.random() < 0.5
        row = {
            "step": 1 + n // 1000,
            "prompt": f"User: Problem {n // 8 % 2500}, {' '.join(random.Random(n // 8 % 2500).choices(WORDS, k=30))}",
            "response": f"{' '.join(words)} </think> <answer> {answer if is_correct else answer + 1} </answer>",
            "ground_truth": str(answer),
            "tokens": len(words) + 9,
            "finish_reason": "stop",
            "rewards": {"format_reward": 1.0, "answer_reward": float(is_correct)},
            "reward": float(is_correct),
        }
        if per_token:
            values = {name: [round(rng.gauss(0, 1), 4) for _ in words] for name in ("logp", "sampled_logp", "entropy")}
            row["per_token"] = {"text": [f"{word} " for word in words], "advantage": 1.0, **values}
        yield row


def cpu_seconds() -> float:
    """What this program's children and theirs have computed."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(of_one.user + of_one.system for of_one in times)


def measured(page: Path) -> dict[str, float]:
    """Seconds of one opening, one filter, and one search that reads every row."""
    changed = "document.getElementById('{}').value = '{}'; refilter(null).then(() => performance.now() - began)"
    with chromium() as tab:
        before = cpu_seconds()
        tab.open(page)
        computed = cpu_seconds() - before
        opened = tab.value("Number(document.documentElement.dataset.openedMs)")
        filtered = tab.value("began = performance.now(); " + changed.format("show", "format_only"))
        tab.value("document.getElementById('show').value = 'all'")
        searched = tab.value("began = performance.now(); " + changed.format("search", "not in any of them"))
        assert tab.value("shown.length") == 0
        assert not [text for text in tab.complaints if "exception" in text]
    return {
        "opened_s": opened / 1000,
        "opened_cpu_s": computed,
        "filtered_s": filtered / 1000,
        "searched_s": searched / 1000,
    }


def main() -> None:
    """Measure and print as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--per_token", action="store_true", help="with values of each token in every row")
    parser.add_argument("--keep", type=Path, help="leave the run's folder and its page here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = args.keep or Path(scratch)
        run.mkdir(parents=True, exist_ok=True)
        write_jsonl(run / "generations.jsonl", rollouts(args.rollouts, args.per_token))
        write_json(run / "resolved.json", {"answer_format": "r1_zero"})
        began = time.perf_counter()
        browse([run], grade=False)
        written = time.perf_counter()
        browse([run])
        graded = time.perf_counter()
        rounds = [measured(run / "rollouts.html") for _ in range(ROUNDS)]
        sizes = {name: (run / name).stat().st_size / 1e6 for name in ("generations.jsonl", "rollouts.html")}
    rounded = {name: [round(one[name], 2) for one in rounds] for name in rounds[0]}
    medians = {f"median_{name}": statistics.median(values) for name, values in rounded.items()}
    seconds = {"written_s": round(written - began, 1), "written_with_grading_s": round(graded - written, 1)}
    megabytes = {f"{name}_mb": round(size, 1) for name, size in sizes.items()}
    print(json.dumps({"rollouts": args.rollouts, **megabytes, **seconds, **rounded, **medians}, indent=1))


if __name__ == "__main__":
    main()
