"""SFT, expert iteration, GRPO, and GRPO after expert iteration: the same policy and problems, equal wall-clock.

    python -m scripts.benchmarks.compare_methods
    python -m scripts.benchmarks.compare_methods --parts methods --seeds 0 --budget 60

Three parts, each with a plot: `sizes` (fine-tuning on 128 to all traces, with and without the incorrect ones),
`steps` (expert iteration with two rollout counts and two epoch counts over five steps), `methods` (the four at equal
wall-clock; runs one at a time, so that each has all of the machine). Model and problems are the embedded default's.
All of it takes under an hour on two cores; interrupted, it resumes when it is started again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from trl_ext.io import write_text
from trl_ext.mini.policy import make_base_policy
from trl_ext.plots import figure, plot_accuracy
from trl_ext.runs.layout import finished
from trl_ext.runs.provenance import provenance
from trl_ext.runs.summary import ValidationEntry
from trl_ext.tools.experiments.sweep import run_all

RECIPES = Path(__file__).parents[2] / "recipes"
PARTS = ("sizes", "steps", "methods")
GROUP_SIZES, EPOCHS = (4, 8), (1, 2)
QUIET = ["--save_strategy", "no", "--disable_tqdm", "true"]


def sizes(args: argparse.Namespace) -> None:
    """Run recipes/sft_sizes.py with 40 optimizer steps each, and keep its plot."""
    folder = args.runs / "sizes"
    seeds = [str(seed) for seed in args.seeds]
    command = [sys.executable, str(RECIPES / "sft_sizes.py"), "--filter_correct", "both", "--jobs", "2", "--seeds"]
    more = ["--output_dir", str(folder), "--max_steps", "40", "--validate_every", "1000", *QUIET]
    subprocess.run([*command, *seeds, *more], check=True)
    (args.results / "sft_sizes.png").write_bytes((folder / "sizes.png").read_bytes())
    rows = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
    table: dict[str, Any] = {}
    for row in rows:
        key = f"{row['num_unique_examples']}, {'correct ones only' if row['filter_correct'] else 'all'}"
        table.setdefault(key, []).append(row["validation_accuracy_after"])
    full = [row["trace_counts"] for row in rows if row["filter_correct"] and row["num_unique_examples"] == "full"]
    keep(args, "sizes", {"accuracy": table, "trace_counts": full})


def steps(args: argparse.Namespace) -> None:
    """Five steps with every rollout count and epoch count."""
    commands = {
        f"group_{group}_epochs_{epochs}_seed_{seed}": [
            str(RECIPES / "expert_iteration.py"), "--group_size", str(group), "--epochs_per_step", str(epochs),
            "--seed", str(seed), *QUIET,
        ]
        for seed in args.seeds for group in GROUP_SIZES for epochs in EPOCHS
    }  # fmt: skip
    summaries = run_all(commands, args.runs / "steps", jobs=2)
    curves = {}
    for group in GROUP_SIZES:
        for epochs in EPOCHS:
            runs = [summaries[f"group_{group}_epochs_{epochs}_seed_{seed}"] for seed in args.seeds]
            label = f"{group} rollouts, {epochs} epoch{'s' if epochs > 1 else ''}"
            curves[label] = [run["validations"] for run in runs]
    one = finished(args.runs / "steps" / f"group_{GROUP_SIZES[-1]}_epochs_{EPOCHS[-1]}_seed_{args.seeds[0]}")
    assert one is not None
    (args.results / "expert_iteration_run.png").write_bytes((one.path / "expert_iteration.png").read_bytes())
    write_methods_plot(args.results / "expert_iteration_steps.png", curves, "expert iteration, five steps")
    table = {label: [v[-1]["accuracy"] for v in runs] for label, runs in curves.items()}
    figures = {
        "accuracy": table,
        "optimizer_steps": {label: [v[-1]["step"] for v in runs] for label, runs in curves.items()},
        "rollouts_right": {
            name: [round(s["correct"] / s["rollouts"], 3) for s in run["steps"]] for name, run in summaries.items()
        },
        "tokens": {name: [round(s["tokens"], 1) for s in run["steps"]] for name, run in summaries.items()},
        "seconds": {name: run["wall_clock_s"] for name, run in summaries.items()},
    }
    keep(args, "steps", figures)


def methods(args: argparse.Namespace) -> None:
    """Each for the same wall-clock, start-up and validation included."""
    for seed in args.seeds:
        make_base_policy(seed=seed)  # made before any clock starts
    budget = str(args.budget)
    pipeline = args.runs / "ei_then_grpo.yaml"
    args.runs.mkdir(parents=True, exist_ok=True)
    quiet = {"save_strategy": "no", "disable_tqdm": True}
    stages = [
        {"recipe": "expert_iteration", "share": 0.4, "settings": {"n_ei_steps": 1000, **quiet}},
        {"recipe": "grpo", "settings": {"max_steps": 5000, **quiet}},
    ]
    pipeline.write_text(yaml.safe_dump({"stages": stages}), encoding="utf-8")
    endless = {
        "SFT on correct traces": ["sft_math.py", "--filter_correct", "--num_train_epochs", "1000"],
        "expert iteration": ["expert_iteration.py", "--n_ei_steps", "1000"],
        "GRPO": ["grpo_math.py", "--max_steps", "5000"],
    }
    names = {label: label.replace(" ", "_").lower() for label in (*endless, "expert iteration, then GRPO")}
    commands = {}
    for seed in args.seeds:
        for label, (script, *flags) in endless.items():
            commands[f"{names[label]}_seed_{seed}"] = [
                str(RECIPES / script), *flags, "--time_budget", budget, "--seed", str(seed), *QUIET,
            ]  # fmt: skip
        commands[f"{names['expert iteration, then GRPO']}_seed_{seed}"] = [
            str(RECIPES / "pipeline.py"), "--config", str(pipeline), "--time_budget", budget, "--seed", str(seed),
        ]  # fmt: skip
    summaries = run_all(commands, args.runs / "methods")
    runs = {label: [summaries[f"{name}_seed_{seed}"] for seed in args.seeds] for label, name in names.items()}
    curves = {label: [run["validations"] for run in of] for label, of in runs.items()}
    write_methods_plot(args.results / "methods.png", curves, f"{args.budget:.0f} s each", by_seconds=True)
    keep(
        args,
        "methods",
        {
            "budget_s": args.budget,
            "accuracy_before": [run["validation_accuracy_before"] for run in runs["GRPO"]],
            "accuracy": {label: [run["validation_accuracy_after"] for run in of] for label, of in runs.items()},
            "seconds": {label: [run["wall_clock_s"] for run in of] for label, of in runs.items()},
            "optimizer_steps": {label: [run["validations"][-1]["step"] for run in of] for label, of in runs.items()},
        },
    )


def keep(args: argparse.Namespace, part: str, figures: dict[str, Any]) -> None:
    """Put a part's figures into the JSON next to the page, and print its table."""
    path = args.results / "sft_and_expert_iteration.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[part] = {"seeds": args.seeds, **figures, **provenance()}
    write_text(path, json.dumps(known, indent=1) + "\n")
    print(f"\n| {part} | {' | '.join(f'seed {seed}' for seed in args.seeds)} | mean |")
    print("|---" * (len(args.seeds) + 2) + "|")
    for label, values in figures["accuracy"].items():
        print(f"| {label} | {' | '.join(f'{value:.3f}' for value in values)} | {mean(values):.3f} |")


def write_methods_plot(
    path: Path, curves: Mapping[str, Sequence[Sequence[ValidationEntry]]], title: str, by_seconds: bool = False
) -> None:
    """Validation accuracy of several runs of each label in one color, against optimizer steps or seconds, as a PNG."""
    key, name = ("wall_clock_s", "wall-clock, s") if by_seconds else ("step", "optimizer steps")
    with figure(path, (7, 4.5), title=title) as (panel,):
        for number, (label, runs) in enumerate(curves.items()):
            for first, run in enumerate(runs):
                style = {"color": f"C{number}", "alpha": 0.7, "linewidth": 1.2}
                plot_accuracy(panel, run, key, **style, label=None if first else label)
        panel.set(ylim=(0, 1), xlabel=name, ylabel="validation accuracy")
        panel.legend(loc="lower right")


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--budget", type=float, default=100.0, metavar="S", help="of a method (default: 100)")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare_methods"), help="where the runs go")
    parser.add_argument(
        "--results", type=Path, default=RECIPES.parent / "docs" / "results", help="where plots and figures go"
    )
    args = parser.parse_args()
    for part in args.parts:
        {"sizes": sizes, "steps": steps, "methods": methods}[part](args)


if __name__ == "__main__":
    main()
