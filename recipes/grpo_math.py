"""GRPO on math. Without arguments: mini-MATH and a tiny policy built locally, in minutes on two CPU cores.
accelerate launch recipes/grpo_math.py
accelerate launch recipes/grpo_math.py --preset dr_grpo --seed 2
accelerate launch recipes/grpo_math.py --config recipes/grpo_math_qwen2.5_math_1.5b.yaml
"""

from __future__ import annotations

from trl_ext.recipes.settings_help import answer_help

if __name__ == "__main__":
    answer_help(__file__)  # before the imports below, which take seconds

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import ModelConfig

from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.trainer import ExtGRPOTrainer
from trl_ext.recipes.cli import start
from trl_ext.recipes.grpo import GRPO_SETTINGS, GRPOTask
from trl_ext.recipes.model_settings import loaded_as
from trl_ext.recipes.preflight import prepare
from trl_ext.recipes.run import open_run
from trl_ext.runs.layout import GENERATIONS
from trl_ext.training.callbacks import GenerationsLog, ZeroVarianceWarning


def main(task: GRPOTask, model: ModelConfig, config: ExtGRPOConfig) -> Mapping[str, Any]:
    prepared = prepare(task, model, config, task.data)  # refuses what cannot work before a model loads
    config.check_problem_count(len(prepared.data.train))
    with open_run(prepared) as run:  # in a folder of its own, or resumed
        trainer = ExtGRPOTrainer(
            reward_funcs=task.reward_functions(),
            args=config,
            train_dataset=run.data.train,
            **loaded_as(model),
        )
        log_to, every = run.folder / GENERATIONS, task.log_generations_every
        whole = {"group": config.num_generations, "per_token": trainer.log_tokens()}
        trainer.add_callback(GenerationsLog(log_to, every, trainer, **whole))
        trainer.add_callback(ZeroVarianceWarning())
        run.train(trainer)
        axes = {name: getattr(config, name) for name in ("preset", "advantage", "policy_loss", "aggregation")}
        return run.finish(trainer, **axes)


if __name__ == "__main__":
    start(main, GRPO_SETTINGS, __doc__, default_config=Path(__file__).with_suffix(".yaml"))
