r"""Supervised finetuning on reasoning traces. Without arguments: mini-MATH's, on a tiny policy made on this machine.

    accelerate launch recipes/sft_math.py
    accelerate launch recipes/sft_math.py --num_unique_examples 128 --filter_correct
    accelerate launch recipes/sft_math.py --traces sft.jsonl --trace_prompt prompt --trace_response response
    accelerate launch --config_file accelerate_configs/two_gpus_zero2.yaml \
        recipes/sft_math.py --config recipes/sft_math_qwen2.5_math_1.5b.yaml --traces sft.jsonl

Several sizes in one plot: recipes/sft_sizes.py. Settings come from a YAML file (`--config`, default
recipes/sft_math.yaml), then from the command line.
"""

from __future__ import annotations

from pathlib import Path

from trl_ext.recipes.cli import start
from trl_ext.recipes.run import run_recipe
from trl_ext.recipes.sft import SFT_SETTINGS

if __name__ == "__main__":
    start(run_recipe, SFT_SETTINGS, __doc__, default_config=Path(__file__).with_suffix(".yaml"))
