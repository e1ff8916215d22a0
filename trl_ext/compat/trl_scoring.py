"""TRL's scoring of a rollout without its own pass for old log-probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from trl import GRPOTrainer


@contextlib.contextmanager
def old_log_probs_left_out(trainer: GRPOTrainer, on_policy: bool) -> Iterator[None]:
    """In the block `_generate_and_score_completions` computes neither old log-probabilities nor what follows from them.

    It computes them of all rows, before their advantages are known, whenever the rollout is trained on in several
    steps or an engine's mismatch is corrected. The reference model's it computes as ever.

    Args:
        on_policy: the rollout is trained on in one step; the only reason is an engine's mismatch then.
    """
    compute = trainer._get_per_token_logps_and_entropies

    def of_another_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = model is trainer.model and not on_policy  # on-policy it may be the reference, without its adapter
        return (None, None, None) if is_ours else compute(model, *args, **kwargs)

    with (
        patch.object(trainer, "vllm_importance_sampling_correction", False),
        patch.object(trainer, "_get_per_token_logps_and_entropies", of_another_model),
    ):
        yield
