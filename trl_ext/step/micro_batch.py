"""`MicroBatch`: rows of a step that go through the model at once, and which forward pass computes them.

Letters: B rows, T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_ext.compat.trl_head import tiles_in_cache
from trl_ext.step.contiguous import can_pack, contiguous_log_probs
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
        """The same with the log-probabilities of the policy that has sampled it."""
        return replace(self, rows=replace(self.rows, old_logp=logp))

    def log_probs(self, model: nn.Module, bare: PreTrainedModel) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Log-probabilities and entropies of the completions' tokens, by the pass that it is planned for.

        Args:
            model: with TRL's fused head, wrapped by the distributed backend.
            bare: without that wrapper, and without an adapter's.
        """
        assert self.forward is not None, "TRL's own pass is the trainer's"
        rows = self.rows if self.copies is None else self.rows.first(self.copies.computed)
        with tiles_in_cache(bare.config.get_text_config().vocab_size, rows.prompt_ids.device):
            if isinstance(self.forward, OnPrompts):
                cache = self.forward.prompts.cache(bare.base_model, self.forward.completions)
                tokens = rows.prompt_ids, rows.completion_ids, rows.completion_mask
                logp, entropy = completion_log_probs(model, cache, *tokens, self.forward.completions)
            else:
                sides = rows.prompt_ids, rows.prompt_mask, rows.completion_ids, rows.completion_mask
                logp, entropy = contiguous_log_probs(model, *sides, self.forward.columns, can_pack(bare))
        if self.copies is None:
            return logp, entropy
        # By `embedding`, whose backward pass adds gradients in the same order every time.
        return nn.functional.embedding(self.copies.source, logp), nn.functional.embedding(self.copies.source, entropy)

    def finish(self) -> None:
        """Call after its backward pass: the last one on some prompts of a process alone has theirs follow."""
        if isinstance(self.forward, OnPrompts):
            self.forward.prompts.backward()
