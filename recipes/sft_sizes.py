"""How many traces does fine-tuning need? One run of recipes/sft_math.py per size and seed, and one plot of all.

    python recipes/sft_sizes.py
    python recipes/sft_sizes.py --sizes 128 512 full --seeds 0 1 2 --filter_correct both --jobs 2
    python recipes/sft_sizes.py --config recipes/sft_math_qwen2.5_math_1.5b.yaml --traces sft.jsonl

What this program does not know goes to recipes/sft_math.py. Interrupted, it resumes when it is started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.io import write_json
from trl_ext.plots import figure
from trl_ext.tools.experiments.ending import ending_in_a_line
from trl_ext.tools.experiments.sweep import run_all

FILTERS = {"no": [False], "yes": [True], "both": [False, True]}
LABELS = {False: "all traces", True: "only traces with the correct answer"}


def main() -> None:
    """Run what is missing, write `sizes.json` and `sizes.png`, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["128", "256", "512", "1024", "full"], help="unique traces")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="one run of each size for each (default: 0)")
    parser.add_argument("--filter_correct", choices=FILTERS, default="no", help="(default: no)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, which share the cores (default: 1)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/sft_sizes"), help="(default: runs/sft_sizes)")
    args, rest = parser.parse_known_args()
    commands = {}
    for seed in args.seeds:
        for correct in FILTERS[args.filter_correct]:
            for size in args.sizes:
                name = f"{size}{'_correct' if correct else ''}_seed_{seed}"
                flags = ["--num_unique_examples", size, "--seed", str(seed), *(["--filter_correct"] if correct else [])]
                commands[name] = [str(Path(__file__).with_name("sft_math.py")), *rest, *flags]
    with ending_in_a_line():
        summaries = run_all(commands, args.output_dir, args.jobs)
    rows = list(summaries.values())
    keys = ("num_unique_examples", "filter_correct", "seed", "trace_counts", "validation_accuracy_before",
            "validation_accuracy_after", "wall_clock_s", "command", "commit", "hardware")  # fmt: skip
    kept = [{key: row[key] for key in keys} for row in rows]
    write_json(args.output_dir / "sizes.json", kept)
    curves = {LABELS[c]: accuracy_by_size(kept, c) for c in FILTERS[args.filter_correct]}
    write_sizes_plot(args.output_dir / "sizes.png", curves, rows[0]["validation_accuracy_before"])
    for label, points in curves.items():
        print(f"{label}: " + ", ".join(f"{size} {sum(v) / len(v):.3f}" for size, v in points.items()))
    print(f"everything is in {args.output_dir}: sizes.png, sizes.json, and a folder for each run")


def accuracy_by_size(rows: list[dict[str, Any]], correct: bool) -> dict[int, list[float]]:
    """Training traces -> validation accuracy of each seed; seeds of `full` have their mean number of traces."""
    points_by_size: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["filter_correct"] is correct:
            counts = row["trace_counts"]
            point = (counts["chosen"] - counts["too_long"], row["validation_accuracy_after"])
            points_by_size.setdefault(row["num_unique_examples"], []).append(point)
    return {
        round(sum(n for n, _ in points) / len(points)): [a for _, a in points] for points in points_by_size.values()
    }


def write_sizes_plot(path: Path, curves: Mapping[str, Mapping[int, Sequence[float]]], before: float) -> None:
    """Validation accuracy against the number of training traces, as a PNG: the mean of the seeds, and each one.

    `curves` go from label to number of traces to the seeds' accuracies; `before` is that without fine-tuning.
    """
    with figure(path, (6.5, 4)) as (panel,):
        for label, points in curves.items():
            sizes = sorted(points)
            (line,) = panel.plot(sizes, [sum(points[n]) / len(points[n]) for n in sizes], marker="o", label=label)
            for size in sizes:
                panel.scatter([size] * len(points[size]), points[size], s=10, alpha=0.4, color=line.get_color())
        panel.axhline(before, color="gray", linestyle=":", label="before")
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({n for points in curves.values() for n in points}))
        panel.get_xaxis().set_major_formatter(lambda value, _: f"{value:.0f}")
        panel.set(ylim=(0, 1), xlabel="unique traces", ylabel="validation accuracy")
        panel.legend(loc="lower right")


if __name__ == "__main__":
    main()
