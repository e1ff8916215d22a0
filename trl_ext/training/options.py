"""The limits of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import GenerationConfig

from trl_ext.generation.sampling import NOT_FOR_ROLLOUTS
from trl_ext.registry import unknown

if TYPE_CHECKING:
    from transformers import TrainingArguments


def stop_strings(given: str | Sequence[str] | None) -> list[str]:
    """The strings at which generation stops, given as one, several or none; an empty text is none.

    Raises:
        ValueError: there is an empty one next to others, at which every completion would end.
    """
    listed = [given] if isinstance(given, str) else list(given or ())
    if any(listed) and not all(listed):
        raise ValueError(f"stop={listed} has an empty string, at which every completion would end; leave it out")
    return listed if all(listed) else []


def check_sampling(config: TrainingArguments) -> None:
    """Refuse what a rollout of GRPO cannot be drawn with; an engine would, once it is loaded, in its own words."""
    if config.temperature <= 0:
        raise ValueError(
            f"sampling_temperature must be above 0, got {config.temperature:g}: greedy rollouts of a prompt are all "
            "the same and have no advantage to learn from. Greedy validations are --validation_temperature 0"
        )
    if not 0 < config.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (1: off), got {config.top_p}")
    if config.top_k < (-1 if config.use_vllm else 0):
        raise ValueError(f"top_k must be at least 0 (0: off), got {config.top_k}")
    if config.min_p is not None and not 0 <= config.min_p <= 1:
        raise ValueError(f"min_p must be between 0 and 1 (0: off), got {config.min_p}")
    if config.repetition_penalty <= 0:
        raise ValueError(f"repetition_penalty must be above 0 (1: off), got {config.repetition_penalty}")
    if not config.use_vllm:
        _check_fields(config.generation_kwargs or {})


def _check_fields(given: Mapping[str, object]) -> None:
    """Refuse fields for HF generate that transformers does not know, or does not take for a batch of rollouts."""
    known = [name for name in vars(GenerationConfig()) if name[0] != "_"]
    for name in given:
        if name not in known:
            raise unknown("field of generation_kwargs for HF generate", name, known)
        if name in NOT_FOR_ROLLOUTS:
            raise ValueError(f"generation_kwargs: {name} {NOT_FOR_ROLLOUTS[name]}")


def check_files(config: TrainingArguments) -> None:
    """Refuse a setting that names a JSON file which is not there."""
    for name in ("deepspeed", "fsdp_config", "accelerator_config"):
        value = getattr(config, name)
        if isinstance(value, str) and value.endswith(".json") and not Path(value).is_file():
            raise ValueError(f"{name} {value}: there is no such file")


def check_evaluation(config: TrainingArguments) -> None:
    """Refuse what decides by evaluations of transformers' Trainer where there are none."""
    if str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no":
        return
    decides = {"load_best_model_at_end: true": config.load_best_model_at_end}
    schedule = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    decides[f"lr_scheduler_type: {schedule}"] = schedule in ("reduce_lr_on_plateau", "greedy")
    for setting in (setting for setting, is_set in decides.items() if is_set):
        raise ValueError(
            f"{setting} needs evaluations by transformers' Trainer, and eval_strategy is no; a recipe validates by "
            "itself (--validate_every) and --restore_best true ends with the best weights"
        )
