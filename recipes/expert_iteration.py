r"""Expert iteration: sample, keep what is correct, fine-tune on it, repeat. Without arguments: mini-MATH, on two cores.

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

from trl_ext.recipes.settings_help import answer_help

if __name__ == "__main__":
    answer_help(__file__)  # before the imports below, which take seconds

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import ModelConfig

from trl_ext.imitation.expert_iteration import FOLDER, ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.recipes.cli import start
from trl_ext.recipes.expert_iteration import EXPERT_ITERATION_SETTINGS, EndOfStep, ExpertIterationTask, steps_so_far
from trl_ext.recipes.model_settings import loaded_as
from trl_ext.recipes.preflight import prepare
from trl_ext.recipes.run import open_run
from trl_ext.runs.layout import GENERATIONS


def main(task: ExpertIterationTask, model: ModelConfig, config: ExpertIterationConfig) -> Mapping[str, Any]:
    prepared = prepare(task, model, config, task.data)  # refuses what cannot work before a model loads
    questions, wanted = len(prepared.data.train), config.questions_per_step
    if questions < wanted:
        prepared.say(f"there are {questions} questions, fewer than questions_per_step ({wanted}): every step takes all")
    with open_run(prepared) as run:  # in a folder of its own, or resumed
        trainer = ExpertIterationTrainer(
            args=config,
            questions=list(run.data.train),
            grader=task.grader(),
            folder=run.folder / FOLDER,
            **loaded_as(model),
        )
        trainer.add_callback(EndOfStep(trainer))  # saves and ends where a step does
        run.train(
            trainer,
            validate_when=lambda state: trainer.is_step_over(),
            log_responses_to=run.folder / GENERATIONS,
        )
        names = ("n_ei_steps", "questions_per_step", "group_size", "epochs_per_step", "selection")
        steps = steps_so_far(run.folder) if trainer.is_world_process_zero() else []
        return run.finish(trainer, **{name: getattr(config, name) for name in names}, steps=steps)


if __name__ == "__main__":
    start(main, EXPERT_ITERATION_SETTINGS, __doc__, default_config=Path(__file__).with_suffix(".yaml"))
