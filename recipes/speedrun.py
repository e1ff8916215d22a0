"""The speedrun: seconds on two cores from the start of the process to a validated accuracy, as a record to improve.

    python recipes/speedrun.py
    python recipes/speedrun.py --config my_entry.yaml --against runs/speedrun/record.json
    python recipes/speedrun.py --verify runs/speedrun/record.json

An entry is a YAML file: `recipe`, `config` (a file of recipes/) and `settings`, see recipes/speedrun.yaml. It chooses
when it ends; what is validated, and how, is fixed by rules that are checked before anything runs. Every seed, from 0
on, is run by the entry and by the reference, recipes/grpo_arithmetic.yaml, one after the other on the same machine:
the score is the ratio of their seconds, so that machines compare. `record.json` in the output folder has the
settings, the commit, the hardware, and every seed. Interrupted, it resumes when it is started again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trl_ext.tools.experiments.ending import ending_in_a_line
from trl_ext.tools.experiments.speedrun import (
    GOAL,
    LEAST_SEEDS,
    RECORD,
    compared,
    race,
    read_entry,
    read_record,
    verify,
)


def main() -> None:
    """Read, check, run, compare."""
    here, default = Path(__file__).parent, Path(__file__).with_suffix(".yaml")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=default, help=f"the entry (default: {default.name})")
    parser.add_argument("--seeds", type=int, default=5, help=f"how many, at least {LEAST_SEEDS} (default: 5)")
    parser.add_argument("--against", type=Path, metavar="RECORD", help="say whether it is beaten")
    parser.add_argument("--verify", type=Path, metavar="RECORD", help="repeat this one; the exit status says whether")
    parser.add_argument("--output_dir", type=Path, help="(default: runs/speedrun, or runs/speedrun_verify)")
    args = parser.parse_args()
    folder = args.output_dir or Path("runs") / ("speedrun_verify" if args.verify else "speedrun")
    with ending_in_a_line():
        if args.verify:
            holds, words = verify(args.verify, here, folder)
            print(f"{words}; {folder / RECORD}")
            sys.exit(0 if holds else 1)
        best = None if args.against is None else read_record(args.against)  # refused before anything runs
        record = race(read_entry(args.config, here), args.seeds, here, folder)
    low, high = record["interval"]
    print(
        f"{record['ratio']:.3f} of the reference's seconds ({low:.3f} to {high:.3f}; {args.seeds} seeds): "
        f"{record['seconds']:.0f} and {record['reference_seconds']:.0f} s to a mean accuracy of "
        f"{record['accuracy']:.3f} and {record['reference_accuracy']:.3f} (goal {GOAL}); {folder / RECORD}"
    )
    if best is not None:
        print(compared(record, best))
    if record["why_not"]:
        sys.exit(f"error: no record: {record['why_not']}")


if __name__ == "__main__":
    main()
