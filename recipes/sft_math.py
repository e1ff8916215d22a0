r"""Supervised fine-tuning on reasoning traces. Without arguments: mini-MATH's, on a tiny policy built locally.

    accelerate launch recipes/sft_math.py
    accelerate launch recipes/sft_math.py --num_unique_examples 128 --filter_correct
    accelerate launch recipes/sft_math.py --traces sft.jsonl --trace_prompt prompt --trace_response response
    accelerate launch --config_file accelerate_configs/two_gpus_zero2.yaml \
        recipes/sft_math.py --config recipes/sft_math_qwen2.5_math_1.5b.yaml --traces sft.jsonl

Several sizes in one plot: recipes/sft_sizes.py. Settings come from a YAML file (`--config`, default
recipes/sft_math.yaml), then from the command line.
"""

from __future__ import annotations

from trl_ext.recipes.settings_help import answer_help

if __name__ == "__main__":
    answer_help(__file__)  # before the imports below, which take seconds

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import ModelConfig

from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer
from trl_ext.recipes.cli import start
from trl_ext.recipes.model_settings import loaded_as
from trl_ext.recipes.preflight import prepare
from trl_ext.recipes.run import open_run
from trl_ext.recipes.sft import SFT_SETTINGS, SFTTask, tokenized_traces
from trl_ext.runs.layout import GENERATIONS


def main(task: SFTTask, model: ModelConfig, config: ExtSFTConfig) -> Mapping[str, Any]:
    prepared = prepare(task, model, config, task.data)  # refuses what cannot work before a model loads
    with open_run(prepared) as run:  # in a folder of its own, or resumed
        trainer = ExtSFTTrainer(
            args=config,
            train_dataset=tokenized_traces(run.data, model, config),
            **loaded_as(model),
        )
        run.train(trainer, log_responses_to=run.folder / GENERATIONS)
        which = {name: getattr(task, name) for name in ("traces", "num_unique_examples", "filter_correct")}
        return run.finish(trainer, **which, trace_counts=run.data.counts, normalize_constant=config.normalize_constant)


if __name__ == "__main__":
    start(main, SFT_SETTINGS, __doc__, default_config=Path(__file__).with_suffix(".yaml"))
