"""`MicroBatch`: rows of a step that go through the model at once, and which forward pass computes them.

Letters: B rows, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_ext.compat.trl_head import tiles_in_cache
from trl_ext.step.contiguous import VALUES, can_pack, contiguous_log_probs
from trl_ext.step.prompt_sharing import Completions, SharedPrompts, completion_log_probs
from trl_ext.step.rows import Rows, TRLBatch


@dataclass(frozen=True)
class Contiguous:
    """Each row begins with its prompt and has all padding at its end."""

    columns: int  # of the longest row, or more


@dataclass(frozen=True)
class OnPrompts:
    """Prompts are computed once for several micro-batches, and completions continue on them without padding."""

    prompts: SharedPrompts
    completions: Completions


Pass: TypeAlias = Contiguous | OnPrompts


@dataclass(frozen=True)
class Copies:
    """Rows that equal others and are not computed."""

    computed: int  # number of rows that are, which come first
    source: Int[Tensor, " B"]  # the computed row that each row equals

    def of(self, computed: Tensor) -> Tensor:
        """Values of the computed rows, (computed, T, ...) -> those of all rows, (B, T, ...)."""
        # By `embedding`, whose backward pass adds gradients in the same order every time.
        return nn.functional.embedding(self.source, computed.flatten(1)).view(-1, *computed.shape[1:])


@dataclass(frozen=True)
class MicroBatch:
    """Rows in one forward pass; those of a rank that has fewer micro-batches than others are not trained on."""

    rows: Rows
    forward: Pass | None = None  # None: TRL's own, with all padding
    copies: Copies | None = None

    @classmethod
    def of_trl(cls, batch: TRLBatch) -> MicroBatch:
        """A slice of TRL's as it is."""
        return cls(Rows.of_trl(batch))

    @property
    def trains(self) -> bool:
        """Whether it is there for its rows, and not because other ranks have as many micro-batches."""
        return self.rows.row is not None

    def untrained(self) -> MicroBatch:
        """The same rows, of which no token is trained on."""
        return replace(self, rows=self.rows.untrained())

    def with_old(self, logp: Float[Tensor, "B T"]) -> MicroBatch:
        """The same with the log-probabilities of the policy before the rollout's first step."""
        return replace(self, rows=replace(self.rows, old_logp=logp))

    def on_contiguous_rows(self) -> MicroBatch:
        """The same for a pass that every causal model has, of whole rows with all padding behind them."""
        longest = (self.rows.prompt_mask.sum(dim=1) + self.rows.completion_mask.sum(dim=1)).max()
        return replace(self, forward=Contiguous(max(2, int(longest))))

    def log_probs(
        self, model: Callable[..., Any], bare: PreTrainedModel, values: Sequence[str] = VALUES
    ) -> tuple[Shaped[Tensor, "B T *_"], ...]:
        """Values of the completions' tokens by the pass that it is planned for: log-probabilities and entropies.

        Args:
            model: with TRL's fused head, wrapped by the distributed backend.
            bare: without that wrapper, and without an adapter's.
            values: of the model's output.
        """
        assert self.forward is not None, "TRL's own pass is the trainer's"
        rows = self.rows if self.copies is None else self.rows.first(self.copies.computed)
        with tiles_in_cache(bare.config.get_text_config().vocab_size, rows.prompt_ids.device):
            if isinstance(self.forward, OnPrompts):
                cache = self.forward.prompts.cache(bare.base_model, self.forward.completions)
                tokens = rows.prompt_ids, rows.completion_ids, rows.completion_mask
                found = completion_log_probs(model, cache, *tokens, self.forward.completions, values)
            else:
                sides = rows.prompt_ids, rows.prompt_mask, rows.completion_ids, rows.completion_mask
                found = contiguous_log_probs(model, *sides, self.forward.columns, can_pack(bare), values)
        return found if self.copies is None else tuple(self.copies.of(each) for each in found)

    def finish(self) -> None:
        """Call after its backward pass: the last one on some prompts of a process alone has theirs follow."""
        if isinstance(self.forward, OnPrompts):
            self.forward.prompts.backward()
