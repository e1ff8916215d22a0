r"""How good is a model on a set of problems: zero-shot accuracy, the three categories, every sample in a file.

    python recipes/evaluate.py
    python recipes/evaluate.py --model_name_or_path runs/grpo_math --output_dir runs/after
    accelerate launch --config_file accelerate_configs/two_gpus_ddp.yaml \
        recipes/evaluate.py --config recipes/evaluate_math.yaml
    python recipes/evaluate.py --show 10 --category format0
    python recipes/evaluate.py --replay runs/after/summary.json
    python recipes/evaluate.py --model_name_or_path smollm2 --benchmark gsm8k,math500 --problems 64

Interrupted, it resumes where it stopped when it is started again; finished, it prints its table at once.
"""

from __future__ import annotations

from trl_ext.recipes.settings_help import answer_help

if __name__ == "__main__":
    answer_help(__file__)  # before the imports below, which take seconds

import sys
from pathlib import Path

from trl_ext.errors import InputError
from trl_ext.recipes.benchmarks import default_config, run_evaluations
from trl_ext.recipes.cli import start
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.replay import replay_of, summary_asked_for

if __name__ == "__main__":
    try:
        summary = summary_asked_for(sys.argv)
        run, config = replay_of(summary) if summary else (run_evaluations, default_config(Path(__file__), sys.argv))
    except InputError as error:
        sys.exit(f"error: {error}")
    start(run, (Evaluation,), __doc__, default_config=config)
