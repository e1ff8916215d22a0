"""`ForwardPass`: a micro-batch through the policy, by the pass that it is planned for or by TRL's.

Letters: B rows of a micro-batch, T completion tokens, H the size of hidden states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from trl_ext.step import VALUES, Head, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Student = tuple[Head, Tensor]  # the head, and the hidden states (B, T, H) that it was applied to


class Forward(NamedTuple):
    """What a forward pass gives."""

    logp: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    aux_loss: Tensor | None = None  # of a mixture of experts, from TRL's pass
    student: Student | None = None  # if asked for


class ForwardPass:
    """The policy's forward passes.

    Args:
        trainer: whose pass computes what is not planned otherwise.
        bare: the policy without a backend's wrapper, and without an adapter's.
    """

    def __init__(self, trainer: GRPOTrainer, bare: PreTrainedModel) -> None:
        # Kept, since accelerate looks for installed packages, in files, whenever it is asked for an unwrapped model.
        self.trainer, self.bare = trainer, bare

    def __call__(self, model: nn.Module, batch: MicroBatch, with_student: bool = False) -> Forward:
        """With a graph, unless the caller has none.

        Args:
            model: wrapped by the distributed backend.
        """
        head = Head(model, self.bare.base_model) if with_student else None
        if batch.forward is not None:
            with self.trainer.accelerator.autocast():
                values = VALUES if head is None else (*VALUES, "hidden")
                logp, entropy, *hidden = batch.log_probs(head or model, self.bare, values)
            return Forward(logp, entropy, None, None if head is None else (head, hidden[0]))
        rows = batch.rows
        found: tuple[Any, ...] = self.trainer._get_per_token_logps_and_entropies(
            head or model,
            torch.cat([rows.prompt_ids, rows.completion_ids], dim=1),
            torch.cat([rows.prompt_mask, rows.completion_mask], dim=1),
            rows.completion_ids.shape[1],
            compute_entropy=True,
            compute_aux_loss=self.trainer.aux_loss_enabled,
            **rows.images,
        )
        student = None if head is None else (head, head.before(rows.completion_ids))
        return Forward(*found)._replace(student=student)

    @torch.no_grad()
    def log_probs(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """(B, T) log-probabilities, without a graph."""
        with disable_gradient_checkpointing(self.trainer.model, self.trainer.args.gradient_checkpointing_kwargs):
            return self(model, batch).logp
