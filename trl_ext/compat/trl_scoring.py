"""TRL's scoring of a rollout without its forward pass for old log-probabilities, and without gathering its texts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from trl import GRPOTrainer
from trl.trainer import grpo_trainer


@contextlib.contextmanager
def only_what_is_used(trainer: GRPOTrainer, on_policy: bool | None) -> Iterator[None]:
    """In the block, `_generate_and_score_completions` leaves out what nobody reads: see the functions below.

    Args:
        on_policy: None if TRL's old log-probabilities are used.
    """
    with contextlib.ExitStack() as left_out:
        if on_policy is not None:
            left_out.enter_context(old_log_probs_left_out(trainer, on_policy))
        if not trainer.log_completions:
            left_out.enter_context(texts_left_on_ranks(trainer))
        yield


def old_log_probs_left_out(trainer: GRPOTrainer, on_policy: bool) -> AbstractContextManager[object]:
    """In the block, `_generate_and_score_completions` computes neither old log-probabilities nor engine corrections.

    TRL computes them for all rows, before their advantages are known, if the rollout is trained on in several steps or
    an engine's mismatch is corrected, which is the only reason if it is `on_policy`: trained on in one step.
    Log-probabilities of the reference model are still computed.
    """
    compute = trainer._get_per_token_logps_and_entropies

    def of_reference(model: nn.Module, *args: object, **kwargs: object) -> tuple[Tensor | None, ...]:
        is_policy = model is trainer.model and not on_policy  # on-policy it may be the reference, without its adapter
        return (None, None, None) if is_policy else compute(model, *args, **kwargs)

    return patch.multiple(
        trainer, vllm_importance_sampling_correction=False, _get_per_token_logps_and_entropies=of_reference
    )


@contextlib.contextmanager
def texts_left_on_ranks(trainer: GRPOTrainer) -> Iterator[None]:
    """In the block, `_generate_and_score_completions` gathers neither prompts nor completions nor images.

    TRL gathers them for the table of `log_completions`, whether the first rank is to print it or not.
    """
    score, texts = trainer._calculate_rewards, list[Any]()
    gather_object = grpo_trainer.gather_object

    def noted(inputs: object, prompts: list[Any], completions: list[Any], *others: object) -> Tensor:
        texts[:] = [prompts, completions]
        return score(inputs, prompts, completions, *others)

    def gathered(values: list[Any]) -> list[Any]:
        return values if any(values is own for own in texts) else gather_object(values)

    with (
        patch.object(trainer, "_calculate_rewards", noted),
        patch.object(grpo_trainer, "gather_object", gathered),
        patch.object(trainer, "log_multimodal", False),
    ):
        yield
