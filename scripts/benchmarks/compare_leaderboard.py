"""The leaderboard's recipe, the plain default recipe and TRL's own trainer: the same seconds, seeds and problems.

    python -m scripts.benchmarks.compare_leaderboard
    python -m scripts.benchmarks.compare_leaderboard --seeds 0 --budget 120 --arms leaderboard default

Every run has the machine to itself and ends with a validation on all 5,000 problems, within its budget. An hour on two
cores; interrupted, it resumes when it is started again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from trl_ext.evaluation.statistics import paired_interval
from trl_ext.io import markdown_table, write_text
from trl_ext.mini.policy import make_base_policy
from trl_ext.runs.provenance import provenance
from trl_ext.tools.experiments.sweep import run_all

from .compare_methods import write_methods_plot

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
PROBLEMS = "5000"
ARMS = {
    "leaderboard": "leaderboard recipe",
    "default": "default recipe, as many steps as fit",
    "trl_recipe": "stock TRL, the default recipe's settings",
    "trl_defaults": "stock TRL, its defaults",
}


def command(arm: str, seed: int, budget: float) -> list[str]:
    """Script and arguments of a run."""
    common = ["--time_budget", str(budget), "--seed", str(seed)]
    if arm == "leaderboard":
        return [str(RECIPES / "leaderboard.py"), *common]
    if arm == "default":
        flags = ["--max_steps", "100000", "--final_validation_problems", PROBLEMS, "--disable_tqdm", "true"]
        return [str(RECIPES / "grpo_math.py"), *flags, *common]
    settings = arm.removeprefix("trl_")
    return [str(HERE / "stock_trl.py"), "--settings", settings, "--problems", PROBLEMS, *common]


def table(runs_by_arm: dict[str, list[dict[str, Any]]], seeds: list[int]) -> str:
    """A row for each arm, in Markdown, with the leaderboard's lead at the same seeds."""
    heads = ["arm", *(f"seed {seed}" for seed in seeds), "mean ± sd", "leaderboard is ahead by", "seconds"]
    rows = []
    for arm, runs in runs_by_arm.items():
        values = [run["validation_accuracy_after"] for run in runs]
        ahead = ""
        if arm != "leaderboard" and "leaderboard" in runs_by_arm and len(values) > 1:
            lead = [a["validation_accuracy_after"] - b for a, b in zip(runs_by_arm["leaderboard"], values, strict=True)]
            low, high = paired_interval(lead)
            ahead = f"{mean(lead):+.3f} ({low:+.3f} to {high:+.3f})"
        spread = f"{mean(values):.4f} ± {stdev(values):.4f}" if len(values) > 1 else f"{values[0]:.4f}"
        seconds = f"{min(r['wall_clock_s'] for r in runs):.0f} to {max(r['wall_clock_s'] for r in runs):.0f}"
        rows.append([ARMS[arm], *(f"{value:.4f}" for value in values), spread, ahead, seconds])
    return "\n".join(markdown_table(heads, rows))


def refusal(runs_by_arm: dict[str, list[dict[str, Any]]], budget: float) -> str | None:
    """Why the runs cannot be compared; None where they can."""
    late = [arm for arm, runs in runs_by_arm.items() if any(run["wall_clock_s"] > budget for run in runs)]
    if late:
        return f"longer than {budget:.0f} s: {', '.join(late)}"
    problems = {arm: sorted({run["final_validation_problems"] for run in runs}) for arm, runs in runs_by_arm.items()}
    return None if len({n for each in problems.values() for n in each}) == 1 else f"numbers of problems: {problems}"


def main() -> None:
    """Run what is missing, print the table, write figures and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--budget", type=float, default=300.0, metavar="S", help="of a run (default: 300)")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare_leaderboard"), help="where the runs go")
    parser.add_argument(
        "--results", type=Path, default=RECIPES.parent / "docs" / "results", help="where plot and figures go"
    )
    args = parser.parse_args()
    for seed in args.seeds:
        make_base_policy(seed=seed)  # made before the clock starts, for all alike
    commands = {f"{arm}_seed_{seed}": command(arm, seed, args.budget) for seed in args.seeds for arm in args.arms}
    summaries = run_all(commands, args.runs)
    runs_by_arm = {arm: [summaries[f"{arm}_seed_{seed}"] for seed in args.seeds] for arm in args.arms}
    why_not = refusal(runs_by_arm, args.budget)
    if why_not is not None:
        sys.exit(f"error: the runs cannot be compared: {why_not}")
    problems = next(iter(runs_by_arm.values()))[0]["final_validation_problems"]
    curves = {ARMS[arm]: [run["validations"] for run in runs] for arm, runs in runs_by_arm.items()}
    write_methods_plot(args.results / "leaderboard.png", curves, f"{args.budget:.0f} s each", by_seconds=True)
    figures = {
        arm: {
            "accuracy": [run["validation_accuracy_after"] for run in runs],
            "seconds": [run["wall_clock_s"] for run in runs],
            "steps": [run["validations"][-1]["step"] for run in runs],
        }
        for arm, runs in runs_by_arm.items()
    }
    kept = {"budget_s": args.budget, "seeds": args.seeds, "problems": problems, **figures, **provenance()}
    write_text(args.results / "leaderboard.json", json.dumps(kept, indent=1) + "\n")
    print(f"\nvalidated on {problems} problems\n\n{table(runs_by_arm, args.seeds)}")


if __name__ == "__main__":
    main()
