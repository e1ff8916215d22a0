"""A pipeline of recipes in one command, with one wall-clock budget: each stage starts from the model of the one before.

    python recipes/pipeline.py
    python recipes/pipeline.py --time_budget 300 --seed 1
    python recipes/pipeline.py --config recipes/pipeline_qwen2.5_math_1.5b.yaml

The YAML file lists the stages (`recipe`, `config`, `share` of the budget, more `settings`); see recipes/pipeline.yaml.
All of them are checked before the first one runs. Interrupted, it resumes where it was when it is started again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_ext.tools.experiments.ending import ending_in_a_line
from trl_ext.tools.experiments.pipeline.run import run_pipeline
from trl_ext.tools.experiments.pipeline.settings import read_pipeline


def main() -> None:
    """Read, check, run."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).with_suffix(".yaml")
    parser.add_argument("--config", type=Path, default=default, help=f"the stages (default: {default.name})")
    parser.add_argument("--output_dir", help="default: runs/ and the name of the YAML file")
    parser.add_argument("--model_name_or_path", help="what the first stage starts from")
    parser.add_argument("--time_budget", type=float, metavar="S", help="seconds of wall-clock for all stages")
    parser.add_argument("--seed", type=int, help="of every stage (default: 0)")
    given = vars(parser.parse_args())
    with ending_in_a_line():
        summary = run_pipeline(read_pipeline(given.pop("config"), **given), here)
    before, after = summary["validation_accuracy_before"], summary["validation_accuracy_after"]
    print(f"accuracy {before:.3f} before, {after:.3f} after all stages, {summary['wall_clock_s']:.0f} s in all")


if __name__ == "__main__":
    main()
