"""Plan before spending: from a short run's measured rates, how many steps a budget gets and where its time goes.

    python recipes/grpo_math.py --max_steps 240 --output_dir runs/pilot
    python scripts/plan_budget.py runs/pilot --time_budget 300
    python scripts/plan_budget.py runs/pilot --time_budget 300 --set validate_every=40 final_problems=5000
    python scripts/plan_budget.py runs/pilot --time_budget 300 --compare runs/long
    python scripts/plan_budget.py runs/long --first 240 --time_budget 300 --compare runs/long

The run must have the model, the machine and the engine of the one that is planned. Zero-advantage rows are skipped,
ever more of them as the policy learns; their fraction is extrapolated, for which a pilot needs at least ten steps and
five rollouts, and better a fifth of the budget.

--set changes what the planned run does (validate_every, problems, final_problems, rollout_batch_size, updates, epochs,
tokens, save_every, restore_best, pilot_rows, rows_growth) or a rate (start, completion_token, trained_token, sync,
step, problem, slowest_problem, save), such as one that another machine has.
--first takes a long run's first steps for the pilot.
--compare says how far the prediction is from a finished run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path

from trl_ext.io import write_json
from trl_ext.registry import unknown
from trl_ext.runs.layout import RunFolder
from trl_ext.tools.estimate.pilot import read_run
from trl_ext.tools.estimate.plan import Rates, Workload, plan, seconds_of


def changed(rates: Rates, work: Workload, changes: list[str]) -> tuple[Rates, Workload]:
    """Rates and workload with `name=value` in place.

    Raises:
        ValueError: a name that is neither's, or a value that is no number.
    """
    for change in changes:
        name, _, value = change.partition("=")
        known = [*asdict(work), *asdict(rates)]
        if name not in known:
            raise unknown("quantity", name, known)
        try:
            number = float(value)
        except ValueError as error:
            raise ValueError(f"--set {change}: {value!r} is not a number") from error
        if name in asdict(rates):
            rates = replace(rates, **{name: number})
        else:
            whole = not isinstance(getattr(work, name), float)
            work = replace(work, **{name: int(number) if whole else number})
    return rates, work


def levers(rates: Rates, work: Workload, budget: float) -> list[tuple[str, int]]:
    """Changes, and the optimizer steps that each would add; what buys most comes first."""
    before = plan(rates, work, budget).steps
    faster = {
        "rollouts twice as fast": (replace(rates, completion_token=rates.completion_token / 2), work),
        "training twice as fast": (replace(rates, trained_token=rates.trained_token / 2), work),
        "weight sync twice as fast": (replace(rates, sync=rates.sync / 2), work),
        "completions a quarter shorter": (rates, replace(work, tokens=0.75 * work.tokens)),
        "validation half as often": (rates, replace(work, validate_every=2 * work.validate_every)),
        "half the problems on the way": (rates, replace(work, problems=work.problems // 2)),
        "half the problems at the end": (rates, replace(work, final_problems=work.final_problems // 2)),
        "half the start-up": (replace(rates, start=rates.start / 2), work),
        "checkpoints half as often": (rates, replace(work, save_every=work.save_every and 2 * work.save_every)),
        "twice the updates per rollout": (rates, replace(work, updates=2 * work.updates)),
    }
    gains = [(name, plan(*changed, budget).steps - before) for name, changed in faster.items()]
    return sorted(gains, key=lambda lever: -lever[1])


def show(rates: Rates, work: Workload, budget: float) -> None:
    """Print the plan: rates, where the time goes, and what would buy most."""
    planned = plan(rates, work, budget)
    step = sum(seconds_of(rates, work, planned.steps).values()) / max(planned.steps, 1)
    rollouts = planned.steps / work.updates
    print(f"{planned.steps} optimizer steps, {rollouts:.0f} rollouts, in {budget:.0f} s; {step:.3f} s a step")
    print(f"\n{'where the time goes':<32}{'seconds':>9}{'fraction':>10}")
    for name, seconds in sorted(planned.seconds.items(), key=lambda part: -part[1]):
        print(f"{name:<32}{seconds:>9.1f}{seconds / budget:>10.1%}")
    print(f"\n{'what would buy more':<32}{'steps':>9}")
    for name, steps in levers(rates, work, budget):
        if steps:
            print(f"{name:<32}{steps:>+9d}")
    print(f"\nmeasured: {per_second(rates.completion_token):.0f} tokens a second in rollouts,")
    print(f"{per_second(rates.trained_token):.0f} in training, {per_second(rates.problem):.0f} problems in validation;")
    print(f"{rates.sync:.2f} s a sync, {rates.save:.2f} s a checkpoint, {rates.start:.0f} s to start")


def per_second(seconds: float) -> float:
    """How many a second; 0 of what took no time."""
    return 1 / seconds if seconds else 0.0


def compare(predicted: int, folder: Path) -> None:
    """Print how far the prediction is from a run that ended with its budget."""
    steps = RunFolder(folder).summary()["validations"][-1]["step"]
    print(f"\n{folder}: {steps} steps; the prediction of {predicted} is {predicted / steps - 1:+.1%} off")


def main() -> None:
    """Read the run, print the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--time_budget", type=float, required=True, metavar="S", help="seconds, start-up included")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="what the planned run does otherwise"
    )
    parser.add_argument("--first", type=int, metavar="N", help="look at the run's first N steps only (default: all)")
    parser.add_argument("--compare", type=Path, metavar="RUN", help="a run that was planned for")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rates, workload and plan there")
    args = parser.parse_args()
    try:
        rates, work = changed(*read_run(args.run, args.first), args.set)
    except ValueError as error:
        sys.exit(f"error: {error}")
    show(rates, work, args.time_budget)
    planned = plan(rates, work, args.time_budget)
    if args.compare:
        compare(planned.steps, args.compare)
    if args.json:
        content = {"rates": asdict(rates), "workload": asdict(work), "plan": asdict(planned)}
        write_json(args.json, content)


if __name__ == "__main__":
    main()
