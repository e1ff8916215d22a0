"""`Rows`: what an optimizer step trains on, as tensors with their shapes; made once, from what TRL has shuffled.

Letters: B rows, L prompt tokens, T completion tokens; A is 1, or T where advantages are per token; M teachers, K tokens
and E events at each place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TRLBatch = dict[str, Any]  # a rollout, or a slice of one, as TRL's methods hand it on

PROMPT_FIELDS = ("prompt_ids", "prompt_mask")  # (B, L), padded on the left

# Fields of a batch that TRL's own loss passes to a model with image inputs.
_IMAGE_FIELDS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Prompts, padded on the left, and completions, padded on the right, with what the loss needs of them."""

    prompt_ids: Int[Tensor, "B L"]
    prompt_mask: Int[Tensor, "B L"]
    completion_ids: Int[Tensor, "B T"]
    completion_mask: Int[Tensor, "B T"]
    trained: Bool[Tensor, "B T"]  # which tokens the model has generated and is trained on
    advantages: Float[Tensor, "B A"]  # one of a row, or one of each token
    # By the policy before the rollout's first step has changed it: TRL's scores of the rollout; with `reuse_log_probs`
    # what `StepPlanner.store_old` computes or a checkpoint had; None where the current pass is by that policy. The
    # engine may have sampled with an earlier one (`rollout_ahead`).
    old_logp: Float[Tensor, "B T"] | None = None
    ref_logp: Float[Tensor, "B T"] | None = None
    sampled_logp: Float[Tensor, "B T"] | None = None  # as an engine has reported them, in its own arithmetic
    teacher_weight: Float[Tensor, "B 1 M"] | None = None  # of each teacher in a row
    teacher_logp: Float[Tensor, "B T M"] | None = None
    teacher_ids: Int[Tensor, "B T M K"] | None = None  # each teacher's most probable tokens
    teacher_events: Float[Tensor, "B T M E"] | None = None  # their log-probabilities, and the other tokens' together
    teacher_agrees: Float[Tensor, "B T M"] | None = None  # 1 where a token is the teacher's most probable one, else 0
    correct: Float[Tensor, " B"] | None = None  # 1, 0, or NaN for neither; where there are teachers
    row: Int[Tensor, " B"] | None = None  # number in the rollout; None where nothing is trained on
    group: Int[Tensor, " B"] | None = None  # equal for rows with the same prompt
    sequence: Int[Tensor, " B"] | None = None  # equal for rows with the same prompt and completion
    tokens_of_rollout: Tensor | int | None = None  # trained on, on all ranks, as TRL counts them
    images: Mapping[str, Any] = field(default_factory=dict)  # of TRL's batch

    @classmethod
    def of_trl(cls, batch: TRLBatch) -> Rows:
        """The rows of a batch of TRL's, whose keys say what it has."""
        return cls(
            prompt_ids=batch["prompt_ids"],
            prompt_mask=batch["prompt_mask"],
            completion_ids=batch["completion_ids"],
            completion_mask=batch["completion_mask"],
            trained=loss_mask(batch),
            advantages=batch["advantages"].view(len(batch["advantages"]), -1),
            old_logp=batch.get("old_per_token_logps"),
            ref_logp=batch.get("ref_per_token_logps"),
            sampled_logp=batch.get("sampling_per_token_logps"),
            teacher_weight=batch.get("teacher_weight"),
            correct=batch.get("correct"),
            row=batch.get("row"),
            group=batch.get("group"),
            sequence=batch.get("sequence"),
            tokens_of_rollout=batch.get("num_items_in_batch"),
            images={name: batch[name] for name in _IMAGE_FIELDS if name in batch},
        )

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Equally padded slices of one rollout, one after the other."""
        return parts[0]._with({name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].tensors()})

    def teachers_mean(self) -> Float[Tensor, "B T"] | None:
        """The teachers' log-probabilities by their weights in a row, NaN without one; None without teachers."""
        if self.teacher_logp is None or self.teacher_weight is None:
            return None
        weighted = torch.where(self.teacher_weight != 0, self.teacher_weight * self.teacher_logp, 0.0).sum(dim=-1)
        return weighted / self.teacher_weight.sum(dim=-1)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors with a value, or several, of each row, by the names of their fields."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor) and value.ndim}

    def taken(self, index: Int[Tensor, " N"], prompt: int, completion: int) -> Rows:
        """These rows, of which the last `prompt` and the first `completion` columns."""
        tensors = {}
        for name, value in self.tensors().items():
            chosen = value[index]
            if name in PROMPT_FIELDS:
                chosen = chosen[:, -prompt:]
            elif chosen.ndim > 1:
                chosen = chosen[:, :completion]
            tensors[name] = chosen
        return self._with(tensors)

    def first(self, n: int) -> Rows:
        """The first `n` rows, with all their columns."""
        return self._with({name: value[:n] for name, value in self.tensors().items()})

    def untrained(self) -> Rows:
        """The same rows, of which no token is trained on."""
        names = {"completion_mask", "trained", "advantages", "teacher_weight"} & self.tensors().keys()
        return replace(self._with({name: torch.zeros_like(getattr(self, name)) for name in names}), row=None)

    def with_two_prompt_tokens(self) -> Rows:
        """Prompts of one token with padding before it."""
        if self.prompt_ids.shape[1] > 1:
            return self
        return self._with({name: torch.nn.functional.pad(getattr(self, name), (1, 0)) for name in PROMPT_FIELDS})

    def _with(self, tensors: Mapping[str, Any]) -> Rows:
        return replace(self, **tensors)

    def has_gradient(self) -> list[bool]:
        """For each row, whether it has a nonzero advantage or a teacher, and a token that is trained on."""
        teaches = (self.advantages != 0).any(dim=1)
        if self.teacher_weight is not None:
            teaches = teaches | (self.teacher_weight != 0).flatten(1).any(dim=1)
        flags: list[bool] = (teaches & self.trained.any(dim=1)).tolist()
        return flags


def loss_mask(batch: TRLBatch) -> Bool[Tensor, "B T"]:
    """The completion tokens that the model generated and that are trained on."""
    mask = batch["completion_mask"]
    is_trained: Tensor = (mask if "tool_mask" not in batch else mask * batch["tool_mask"]).bool()
    return is_trained


def numbers_of_sequences(
    ids: Int[Tensor, "B S"], mask: Int[Tensor, "B S"], group: Int[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """Numbers, equal for rows with the same group and the same tokens, in the order of the groups.

    Of prompts too: a `rollout_func` or an environment may rewrite those of a group.

    Args:
        ids, mask: all padded on the same side.
    """
    return torch.unique(torch.cat([group[:, None], mask, ids * mask], dim=1), dim=0, return_inverse=True)[1]


def advantages_of(batch: TRLBatch, values: Tensor) -> Tensor:
    """(B,) values as they are; (B, any) values of the model's tokens, in their order, at the places of these.

    A tool's tokens between them have 0, as those after the last one.
    """
    if values.ndim == 1:
        return values
    completions = batch["completion_ids"]
    wide = torch.nn.functional.pad(values, (0, completions.shape[1] - values.shape[1]))
    if "tool_mask" not in batch:
        return wide
    place = (batch["tool_mask"].cumsum(dim=1) - 1).clamp(min=0)
    return wide.gather(1, place) * batch["tool_mask"]
