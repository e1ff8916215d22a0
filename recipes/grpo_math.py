"""GRPO on math. Without arguments: mini-MATH and a tiny policy made on this machine, in minutes on two CPU cores.

    accelerate launch recipes/grpo_math.py
    accelerate launch recipes/grpo_math.py --preset dr_grpo --seed 2
    accelerate launch recipes/grpo_math.py --config recipes/grpo_math_qwen2.5_math_1.5b.yaml

Settings come from a YAML file (`--config`, default recipes/grpo_math.yaml), then from the command line.
"""

from __future__ import annotations

from pathlib import Path

from trl_ext.recipes.cli import start
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.run import run_recipe

if __name__ == "__main__":
    start(run_recipe, GRPO_SETTINGS, __doc__, default_config=Path(__file__).with_suffix(".yaml"))
