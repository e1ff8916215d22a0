"""A verdict for a new idea: an effect with its interval, at equal samples and at equal wall-clock, on several tasks.

    python recipes/lab.py try recipes/my_loss.py:soft_clip --against grpo_clip
    python recipes/lab.py try dr_grpo --against grpo_clip --tasks mini_math my_task.yaml --max_seeds 12 --jobs 2
    python recipes/lab.py try advantage=leave_one_out --against grpo_clip --learning_rate 1e-3

An idea is a preset, a policy loss, a function of your own as FILE:FUNCTION, or NAME=VALUE[,NAME=VALUE] of the recipe.
Both arms get the same seeds and problems; seeds are added until every interval decides, at looks that are fixed before
the first run, so that stopping early keeps false alarms at 5 %. All settings are checked before that run. Interrupted,
it resumes when it is started again; what failed is named and tried again. What this program does not know goes to the
recipe, in all runs. A task is a YAML file: `config`, `settings`, `about`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trl_ext.tools.experiments.ending import ending_in_a_line
from trl_ext.tools.experiments.sweep import run_all
from trl_ext.tools.experiments.verdict.findings import Finding, Runs, decide, failures
from trl_ext.tools.experiments.verdict.page import PAGE, headline, power_lines, write_report
from trl_ext.tools.experiments.verdict.plan import VERDICTS, ComparisonPlan, arms_of, check, fix, read_tasks
from trl_ext.tools.experiments.verdict.sequential import Design


def main(given: Sequence[str], recipes: Path) -> None:
    """Plan, check, run up to each look, report.

    Args:
        given: the command line after `try`.
        recipes: the folder of the recipes, with `try` in it.
    """
    args, rest = arguments(given)
    with ending_in_a_line():
        sys.exit(0 if answer(args, rest, recipes, given) else 1)


def arguments(given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is ours, and what is the recipe's."""
    parser = argparse.ArgumentParser(
        prog="lab.py try", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("idea", help="a preset, a policy loss, FILE:FUNCTION, or NAME=VALUE[,NAME=VALUE]")
    parser.add_argument("--against", default="grpo_clip", metavar="IDEA", help="(default: grpo_clip)")
    parser.add_argument(
        "--tasks", nargs="+", default=[], metavar="TASK", help="YAML files, folders of them, or names in recipes/try"
    )
    parser.add_argument("--max_seeds", type=int, default=8, help="the budget for each arm and task (default: 8)")
    parser.add_argument("--margin", type=float, default=0.02, help="differences below it are called equal (0.02)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--output_dir", type=Path, help="(default: runs/try_IDEA_against_IDEA)")
    args, rest = parser.parse_known_args(given)
    if args.jobs < 1 or args.margin <= 0 or args.max_seeds < 2:
        parser.error("--jobs must be at least 1, --max_seeds at least 2, and --margin above 0")
    return args, rest


def plan_of(args: argparse.Namespace, rest: Sequence[str], recipes: Path) -> ComparisonPlan:
    """What the command line asks for."""
    idea, against = arms_of(args.idea, args.against)
    tasks = read_tasks(args.tasks, recipes / "try")
    design = Design(args.max_seeds, len(tasks) * VERDICTS, min(Design.first, args.max_seeds))
    return ComparisonPlan(idea, against, tasks, design, args.margin, tuple(rest))


def answer(args: argparse.Namespace, rest: Sequence[str], recipes: Path, given: Sequence[str]) -> bool:
    """Whether all runs ended."""
    plan = plan_of(args, rest, recipes)
    output = args.output_dir or Path("runs") / f"try_{plan.idea.label}_against_{plan.against.label}"
    check(plan)
    fix(plan, output)
    print(*power_lines(plan), "", sep="\n", flush=True)
    command = [str(recipes / "lab.py"), "try", *given]

    def run(commands: Mapping[str, Sequence[str]]) -> Mapping[str, Mapping[str, Any]]:
        return run_all(commands, output / "runs", args.jobs, keep_going=True)

    return decide(plan, recipes, run, partial(_report, output, plan, command))


def _report(output: Path, plan: ComparisonPlan, command: Sequence[str], runs: Runs) -> list[Finding]:
    """Write the page, and say what is on it."""
    findings = write_report(output, plan, runs, command)
    print(plan.title, *headline(plan, findings), sep="\n")
    print(*(f"failed, tried again next time: {name}: {said}" for name, said in failures(runs).items()), sep="\n")
    print(output / PAGE, flush=True)
    return findings
