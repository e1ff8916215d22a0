"""`Rollout`: the scored completions of one call of TRL's scoring, their rows for the log, and metrics next to TRL's.

Letters: N completions of all ranks, M of this rank, R reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_ext.algorithms.advantages import ADVANTAGES, for_training
from trl_ext.algorithms.selection import SELECTIONS
from trl_ext.generation.floats import widest_float
from trl_ext.generation.tokens import completion_texts, special_ids_with_text
from trl_ext.rewards.hooks import completion_text
from trl_ext.training.state import to_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rollout:
    """Scored completions, of training or of an evaluation."""

    rewards: Tensor  # (N, R), NaN where a function did not score the completion
    reward: Tensor  # (N,) weighted sums of `rewards`
    finished: Tensor  # (M,) bool, whether the model ended the completion
    lengths: Tensor  # (M,) in tokens
    correct: Tensor  # (M,) 1, 0, or NaN for neither
    offset: int  # position of this rank's first completion among the N

    def advantage_inputs(
        self, names: Sequence[str], weights: Tensor, group_size: int, gather: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """What an advantage asks for next to the total rewards, by name: (P, G), (P, G, R), or the weights as they are.

        Args:
            gather: concatenates the ranks' values; called for what is asked for only.
        """
        own = {"lengths": self.lengths, "truncated": 1.0 - self.finished.float(), "correct": self.correct}
        found = {name: gather(own[name]).view(-1, group_size) for name in names if name in own}
        every = {"rewards": self.rewards.view(-1, group_size, self.rewards.shape[1]), "weights": weights}
        return found | {name: value for name, value in every.items() if name in names}

    def advantages(
        self,
        function: Callable[..., Tensor],
        weights: Tensor,
        group_size: int,
        gather: Callable[[Tensor], Tensor],
        left_out: Tensor | None = None,
    ) -> Tensor:
        """(N,) or (N, T) advantages of all ranks by a member of `ADVANTAGES`.

        Args:
            left_out: (P, G) bool, completions whose rewards nothing is computed from.
        """
        reward, asked = self.reward.view(-1, group_size), ADVANTAGES.inputs_of(function)
        inputs = self.advantage_inputs(asked, weights, group_size, gather)
        if left_out is not None:
            reward = reward.masked_fill(left_out, torch.nan)
            if "rewards" in inputs:
                inputs["rewards"] = inputs["rewards"].masked_fill(left_out[:, :, None], torch.nan)
        return for_training(function(reward, **inputs), reward).flatten(0, 1)

    def kept(self, select: Callable[..., Tensor], group_size: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """(P, G) bool: the completions of all ranks that a member of `SELECTIONS` keeps."""
        reward = self.reward.view(-1, group_size)
        asked = SELECTIONS.inputs_of(select)
        found: Tensor = select(reward, **self.advantage_inputs(asked, self.reward.new_ones(0), group_size, gather))
        return found

    def own(self, values: Tensor) -> Tensor:
        """(N, ...) values of all ranks -> (M, ...) of this rank."""
        return values[self.offset : self.offset + len(self.finished)]

    def complete(
        self, rows: Sequence[dict[str, Any]], columns: Mapping[str, Sequence[object]], reward_names: Sequence[str]
    ) -> None:
        """Add the rewards and the columns that reward functions have logged to this rank's M rows of the log."""
        for column, values in columns.items():
            for row, value in zip(rows, values, strict=True):
                row[column] = to_plain(value)
        for row, finished in zip(rows, self.finished.tolist(), strict=True):
            row["finish_reason"] = "stop" if finished else "length"  # as an evaluation's rows have it
        for row, rewards, reward in zip(rows, self.own(self.rewards), self.own(self.reward), strict=True):
            row["rewards"] = dict(zip(reward_names, rewards.tolist(), strict=True))
            row["reward"] = reward.item()


def with_special_tokens(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    tags_only: bool,
) -> list[Any]:
    """Completions as TRL decodes them, but with the special tokens that are text; what it has parsed stays as it is.

    Args:
        completions: texts, or messages, of which one that has nothing but a text is the decoded completion.
        tags_only: leave a completion to TRL unless it has a tag of the answer format among its special tokens.
    """
    found, shown = list(completions), special_ids_with_text(tokenizer, eos_ids, tags_only)
    are_parsed = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
    for row, (completion, ids) in enumerate(zip(completions, completion_ids, strict=True)):
        if shown.isdisjoint(ids):
            continue
        (text,) = completion_texts(tokenizer, [ids], eos_ids)
        if isinstance(completion, str):
            found[row] = text
        elif not are_parsed and len(completion) == 1 and set(completion[0]) == {"role", "content"}:
            found[row] = [{**completion[0], "content": text}]
    return found


def log_rows(
    inputs: Sequence[Mapping[str, Any]],
    prompts: Sequence[object],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    entropies: Sequence[float | None],
) -> list[dict[str, Any]]:
    """Completions as they are logged, without their rewards; one value per completion, all but the last are TRL's.

    Args:
        entropies: estimated from the sampled tokens' log-probabilities.
    """
    return [
        {
            "prompt": prompt,
            "response": completion_text(completion),
            "ground_truth": row.get("answer"),
            "tokens": len(ids),
            "entropy_estimate": entropy,
            "token_entropy": None,  # exact, from the logits; set for rows that are trained on
            "advantage": None,  # set in training where a completion has one
            "finish_reason": None,
        }
        for prompt, completion, row, ids, entropy in zip(
            prompts, completions, inputs, completion_ids, entropies, strict=True
        )
    ]


def sample_metrics(
    lengths: Tensor, finished: Tensor, correct: Tensor, entropy: Tensor, gather: Callable[[Tensor], Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """TRL's truncation metrics; mean lengths by outcome and entropy of all tokens: of all ranks' completions.

    In the first, completions that ended at a stop string count as finished. In the second, what no response has is
    left out.

    Args:
        lengths: (M,) in tokens.
        finished: (M,) bool.
        correct: (M,) 1, 0, or NaN for neither.
        entropy: (M,) means over a completion's tokens; NaN where it is not known.
        gather: concatenates the ranks' values; called once, with a few numbers instead of the rows.
    """
    groups = [finished, correct == 1, correct == 0]
    sums = [value for rows in groups for value in (rows.sum(), (lengths * rows).sum())]
    dtype = widest_float(lengths.device)
    sums += [(lengths * ~entropy.isnan()).sum(), (lengths * entropy).to(dtype).nansum()]
    ended = lengths[finished]
    extremes = [ended.min(), -ended.max()] if len(ended) else [lengths.new_tensor(torch.inf)] * 2
    own = torch.stack([value.to(dtype) for value in (lengths.new_tensor(len(lengths)), *sums, *extremes)])
    everyones = gather(own[None])  # (ranks, 11)
    rows, ends, ended_tokens, *outcomes, tokens, nats = everyones[:, :9].sum(dim=0).tolist()
    shortest, minus_longest = everyones[:, 9:].amin(dim=0).tolist()
    found = {
        "completions/clipped_ratio": 1 - _float32(ends / rows),
        "completions/mean_terminated_length": _float32(ended_tokens / ends) if ends else 0.0,
        "completions/min_terminated_length": shortest if ends else 0.0,
        "completions/max_terminated_length": -minus_longest if ends else 0.0,
    }
    by_outcome = zip(("correct", "incorrect"), outcomes[::2], outcomes[1::2], strict=True)
    sampled = {f"completions/mean_length_{name}": length / n for name, n, length in by_outcome if n}
    return found, sampled | ({"sampling/entropy_estimate": nats / tokens} if tokens else {})


def _float32(value: float) -> float:
    """The value with the digits that TRL logs."""
    return torch.tensor(value).item()
