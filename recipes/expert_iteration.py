r"""Expert iteration: sample, keep what is right, finetune on it, and again. Without arguments: mini-MATH, on two cores.

    accelerate launch recipes/expert_iteration.py
    accelerate launch recipes/expert_iteration.py --group_size 8 --epochs_per_step 2
    accelerate launch recipes/expert_iteration.py --selection shortest --selection_options k=2
    accelerate launch --config_file accelerate_configs/two_gpus_zero2.yaml \
        recipes/expert_iteration.py --config recipes/expert_iteration_qwen2.5_math_1.5b.yaml

What each step sampled and kept is in `expert_iteration/step_N/rollouts.jsonl` and `kept.jsonl` of the run's folder,
its figures in `expert_iteration/steps.jsonl`. Settings come from a YAML file (`--config`, default
recipes/expert_iteration.yaml), then from the command line.
"""

from __future__ import annotations

from pathlib import Path

from trl_ext.recipes.cli import start
from trl_ext.recipes.expert_iteration import EXPERT_ITERATION_SETTINGS
from trl_ext.recipes.run import run_recipe

if __name__ == "__main__":
    start(run_recipe, EXPERT_ITERATION_SETTINGS, __doc__, default_config=Path(__file__).with_suffix(".yaml"))
