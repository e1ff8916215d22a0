"""What the log tells about single tokens: the values that an optimizer step has computed anyway, kept until its end.

Letters: B rows of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trl_ext.algorithms.types import LossInputs

DIGITS = 4  # decimals of a value in the log


@dataclass(frozen=True)
class _MicroBatch:
    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool
    advantage: Tensor  # (B, 1) or (B, T)
    values: dict[str, Tensor]  # by name, (B, T)


class TokenLog:
    """The micro-batches of the current optimizer step, as references: nothing is copied before a row is asked for.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._step = -1
        self._places: dict[int, tuple[_MicroBatch, int]] = {}

    def keep(
        self,
        step: int,
        row: Tensor,
        ids: Tensor,
        x: LossInputs,
        sampled: Tensor | None,
        entropy: Tensor,
        teacher_logp: Tensor | None = None,
    ) -> None:
        """Keep a micro-batch; the first one of a step takes the place of those of the step before.

        Args:
            row: (B,) numbers of its rows in the rollout.
            ids: (B, T) of the completions.
            sampled: (B, T) an engine's log-probabilities; without, the sampler is the old policy.
            entropy: (B, T)
            teacher_logp: (B, T), of teachers by their weights, where there are any.
        """
        if step != self._step:
            self._step, self._places = step, {}
        sampled = x.old_logp if sampled is None else sampled
        values = {"logp": x.logp.detach(), "sampled_logp": sampled.detach(), "entropy": entropy.detach()}
        values |= {} if teacher_logp is None else {"teacher_logp": teacher_logp}
        kept = _MicroBatch(ids, x.mask, x.advantage, values)
        self._places |= {number: (kept, place) for place, number in enumerate(row.tolist())}

    def of_row(self, row: int) -> dict[str, Any]:
        """`per_token` of a row: a list for each value, the tokens' texts, and the advantage (a number if all agree).

        Empty if the row was not trained on in the step. A token that ends within a character has the text `�`.
        """
        if row not in self._places:
            return {}
        batch, place = self._places[row]
        is_trained = batch.mask[place]
        per_token: dict[str, Any] = {"text": [self._decode([n]) for n in batch.ids[place][is_trained].tolist()]}
        advantages = batch.advantage[place].expand_as(is_trained)[is_trained]
        is_one = len(advantages) > 0 and bool((advantages == advantages[0]).all())
        per_token["advantage"] = _rounded(advantages[:1])[0] if is_one else _rounded(advantages)
        values = {name: value[place][is_trained] for name, value in batch.values.items()}
        per_token |= {name: _rounded(value) for name, value in values.items() if not value.isnan().all()}
        return {"per_token": per_token}


def _rounded(values: Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]
