"""The leaderboard: the best accuracy in a wall-clock budget, by rules that are checked before anything runs.

    python recipes/leaderboard.py
    python recipes/leaderboard.py --seed 1 --output_dir runs/leaderboard_1
    python recipes/leaderboard.py --config recipes/leaderboard_qwen2.5_math_1.5b.yaml

The budget counts from the start of the process, over restarts, and is never overrun: each stage ends in time for its
last validation, the last one with all problems of the rules and with the weights of its best step. `result.json` in the
output folder is whole at any moment. Interrupted or killed, it resumes with the time that is left when it is started
again. The YAML file names the rules and lists the stages, see recipes/leaderboard.yaml; scripts/plan_budget.py predicts
what a budget is spent on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trl_ext.tools.experiments.ending import ending_in_a_line
from trl_ext.tools.experiments.leaderboard import RESULT, run_leaderboard
from trl_ext.tools.experiments.pipeline.settings import read_pipeline
from trl_ext.tools.experiments.rules import RULES


def main() -> None:
    """Read, check, run."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).with_suffix(".yaml")
    parser.add_argument("--config", type=Path, default=default, help=f"rules and stages (default: {default.name})")
    parser.add_argument("--output_dir", help="default: runs/ and the name of the YAML file")
    parser.add_argument("--rules", help=f"in place of the file's: {', '.join(RULES)}")
    parser.add_argument("--time_budget", type=float, metavar="S", help="seconds, at most those of the rules")
    parser.add_argument("--seed", type=int, help="of every stage (default: 0)")
    given = vars(parser.parse_args())
    with ending_in_a_line("the same command resumes with the time that is left"):
        pipeline = read_pipeline(given.pop("config"), **given)
        result = run_leaderboard(pipeline, here)
    print(
        f"{result['status']}: accuracy {result['accuracy']} on {result['problems']} problems after "
        f"{result['seconds']:.0f} of {pipeline.time_budget:.0f} s; {Path(pipeline.output_dir) / RESULT}"
    )
    if not result["is_by_the_rules"]:
        sys.exit(f"error: no result by the rules: {result['why_not']}")


if __name__ == "__main__":
    main()
