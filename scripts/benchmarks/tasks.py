"""What each embedded task is like for its base policy: lengths, accuracy by level, pass@N, and a trained policy's.

    python -m scripts.benchmarks.tasks --json docs/results/tasks.json --page docs/results/tasks.md
    python -m scripts.benchmarks.tasks --trained arithmetic=runs/grpo_arithmetic cups=runs/grpo_cups ...
    python -m scripts.benchmarks.tasks --tasks arithmetic cups --incorrect shorter

Each task has the settings of its recipe. `--trained` names runs of five minutes: what the best known recipe makes of
the same problems is the ceiling that a new one has to beat.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from trl_ext.compat.startup import use_all_cores
from trl_ext.evaluation.evaluator import Report, grade_rows, is_correct, mean
from trl_ext.evaluation.pass_at_n import pass_at_n
from trl_ext.generation.completion import Sampling
from trl_ext.generation.samplers import HFSampler
from trl_ext.io import markdown_table
from trl_ext.mini.stepwise import INCORRECT
from trl_ext.mini.tasks import TASKS
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.rewards.graders import GRADERS
from trl_ext.runs.provenance import devices_of, provenance

RECIPES = Path(__file__).parents[2] / "recipes"
FLAGS = {
    "mini_math": ("grpo_math.yaml",),
    "arithmetic": ("grpo_arithmetic.yaml",),
    "cups": ("grpo_arithmetic.yaml", "--dataset", "cups", "--sampling_max_tokens", "160"),
}
QUANTILES = (10, 50, 90)
INTRODUCTION = """\
# The embedded tasks

What each task is like for its base policy, and for a policy that its recipe has trained. Tokens: the 10, 50 and 90 %
quantiles of correct and of well-formed incorrect responses. Valid steps: the share of written steps that follow from
what is written before them.
"""


def sampled(
    name: str, incorrect: str, policy: str | None, problems: int, samples: int, seed: int
) -> tuple[Report, dict[str, Any]]:
    """Graded samples of a policy, by default the base policy, and the task's options."""
    config, *flags = FLAGS[name]
    if "incorrect" in TASKS.options(name):
        flags += ["--dataset_options", f"longest=12,incorrect={incorrect}"]
    task, _, args = parse(GRPO_SETTINGS, None, RECIPES / config, [*flags, "--bf16", "false"])
    rows = list(task.read("validation", problems, seed).rows)
    limit = Sampling(max_tokens=args.max_completion_length, stop=tuple(args.stop), seed=seed)
    sampler = HFSampler(policy or task.base_policy(seed), limit, 256)
    rows = [row for row in rows for _ in range(samples)]
    completions = sampler([row["prompt"] for row in rows], range(len(rows)))
    grader = GRADERS.build("compatible", answer_format="r1_zero")
    return Report(grade_rows(rows, completions, grader)), task.dataset_options or {}


def described(report: Report, name: str, options: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Figures of all samples (`all`) and of each level."""
    levels: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in report.rows:
        levels["all"].append(row)
        levels[str(row["level"])].append(row)
    return {level: _figures(levels[level], name, options, samples) for level in sorted(levels)}


def _figures(rows: list[dict[str, Any]], name: str, options: Mapping[str, Any], samples: int) -> dict[str, Any]:
    task = TASKS.build(name, **options)()
    correct = np.array([is_correct(row) for row in rows]).reshape(-1, samples)
    steps = [step for row in rows for step in task.steps(row["problem"], row["response"])]
    lengths: dict[str, list[int]] = {"correct": [], "format_only": [], "neither": []}
    for row in rows:
        lengths[row["outcome"]].append(row["tokens"])
    return {
        "problems": len(correct),
        "accuracy": float(correct.mean()),
        f"pass@{samples}": float(pass_at_n(correct, samples).mean()),
        "well_formed": mean(row["outcome"] != "neither" for row in rows),
        "truncated": mean(row["finish_reason"] == "length" for row in rows),
        "valid_steps": mean(step.valid for step in steps),
        "tokens_correct": _quantiles(lengths["correct"]),
        "tokens_incorrect": _quantiles(lengths["format_only"]),  # well formed, so that formats do not decide
    }


def _quantiles(lengths: Iterable[int]) -> list[float] | None:
    listed = list(lengths)
    return [float(q) for q in np.percentile(listed, QUANTILES)] if listed else None


def table(by_level: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A row for each level."""
    first = next(iter(by_level.values()))
    samples = next(key for key in first if key.startswith("pass@"))
    heads = ("level", "accuracy", samples, "well formed", "truncated", "valid steps", "tokens, correct", "incorrect")
    rows = []
    for level, one in by_level.items():
        shares = [one[key] for key in ("accuracy", samples, "well_formed", "truncated", "valid_steps")]
        lengths = [one[f"tokens_{kind}"] for kind in ("correct", "incorrect")]
        texts = ["none" if of is None else " / ".join(f"{q:.0f}" for q in of) for of in lengths]
        rows.append([level, *(f"{share:.2f}" for share in shares), *texts])
    return markdown_table(heads, rows)


def page(figures: Mapping[str, Any]) -> str:
    """The page."""
    lines = [INTRODUCTION, f"`{figures['command']}`, commit {figures['commit']}, {devices_of(figures)}."]
    for name, policies in figures["tasks"].items():
        options = ", ".join(f"{key}={value}" for key, value in policies["options"].items())
        lines += ["", f"## {name}" + (f" ({options})" if options else "")]
        for policy in ("base", "trained"):
            if policy in policies:
                lines += ["", f"The {policy} policy:", "", *table(policies[policy])]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write the files asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(FLAGS), choices=FLAGS, help="(default: all)")
    parser.add_argument("--incorrect", default=INCORRECT[0], choices=INCORRECT, help=f"than correct ({INCORRECT[0]})")
    parser.add_argument("--problems", type=int, default=100, help="of each task (default: 100)")
    parser.add_argument("--samples", type=int, default=64, help="of each problem (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of policy, problems and samples (default: 0)")
    parser.add_argument("--trained", nargs="*", default=[], metavar="TASK=RUN", help="folders of finished runs")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--page", type=Path, help="also write the page to this file")
    args = parser.parse_args()
    use_all_cores()
    trained = dict(given.split("=", 1) for given in args.trained)
    tasks: dict[str, Any] = {}
    for name in tqdm(args.tasks, desc="tasks"):
        for kind, policy in {"base": None, **({"trained": trained[name]} if name in trained else {})}.items():
            report, options = sampled(name, args.incorrect, policy, args.problems, args.samples, args.seed)
            tasks.setdefault(name, {"options": options})[kind] = described(report, name, options, args.samples)
    figures = {"tasks": tasks, "problems": args.problems, "samples": args.samples, "seed": args.seed, **provenance()}
    print(page(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.page:
        args.page.write_text(page(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
