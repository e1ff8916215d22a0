"""`Rollout`: the scored completions of one call of TRL's scoring, their rows for the log, and metrics next to TRL's.

Letters: N completions of all ranks, M of this rank, K reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trl_ext.algorithms.advantages import ADVANTAGES, for_training, total_reward
from trl_ext.algorithms.masking import masked_mean
from trl_ext.algorithms.selection import SELECTIONS
from trl_ext.generation.completion import entropy_estimates
from trl_ext.generation.floats import widest_float
from trl_ext.generation.tokens import completion_texts, special_ids_with_text
from trl_ext.grpo.rewards import correct_by_row
from trl_ext.rewards.hooks import completion_text
from trl_ext.step import Rows, TRLBatch, loss_mask, numbers_of_sequences
from trl_ext.training.checkpoint_state import to_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trl_ext.rewards.guard import Guard


@dataclass(frozen=True)
class Rollout:
    """Scored completions, of training or of an evaluation."""

    rewards: Float[Tensor, "N K"]  # NaN where a function did not score the completion
    reward: Float[Tensor, " N"]  # weighted sums of `rewards`
    finished: Bool[Tensor, " M"]  # whether the model ended the completion
    lengths: Int[Tensor, " M"]  # in tokens
    correct: Float[Tensor, " M"]  # 1, 0, or NaN for neither
    offset: int  # position of this rank's first completion among the N
    turns: Float[Tensor, "M S 2"] | None = None  # tokens and reward of each turn, 0 after the last

    @classmethod
    def scored(
        cls, rewards: Tensor, weights: Tensor, functions: Sequence[Guard], finished: Tensor, lengths: Tensor, rank: int,
        turns: Tensor | None = None,
    ) -> Rollout:  # fmt: skip
        """By the rewards of all ranks' completions, and what the reward functions say of this rank's.

        Args:
            weights: (K,) of the reward functions.
            functions: those of them that are no reward models.
            rank: this one's number.
        """
        reward, offset = total_reward(rewards, weights), rank * len(finished)
        correct = correct_by_row(functions, reward[offset : offset + len(finished)])
        return cls(rewards, reward, finished, lengths, correct, offset, turns)

    def advantage_inputs(
        self, names: Sequence[str], weights: Tensor, group_size: int, gather: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """What an advantage asks for next to the total rewards, by name: (P, G), (P, G, any), or the weights alone.

        Args:
            gather: concatenates the ranks' values; called for what is asked for only.
        """
        own = {"lengths": self.lengths, "truncated": 1.0 - self.finished.float(), "correct": self.correct}
        one_turn = torch.stack([self.lengths, torch.zeros_like(self.lengths)], dim=-1)[:, None]
        turns = one_turn if self.turns is None else self.turns  # (M, S, 2)
        own |= {"turn_lengths": turns[..., 0].long(), "turn_rewards": turns[..., 1]}
        asked = {name: gather(own[name]) for name in names if name in own}
        by_completion = {name: values.view(-1, group_size, *values.shape[1:]) for name, values in asked.items()}
        every = {"rewards": self.rewards.view(-1, group_size, self.rewards.shape[1]), "weights": weights}
        return by_completion | {name: value for name, value in every.items() if name in names}

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
        is_kept: Tensor = select(reward, **self.advantage_inputs(asked, self.reward.new_ones(0), group_size, gather))
        return is_kept

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


@dataclass(frozen=True)
class SampledBatch:
    """What one call of TRL's sampling and scoring gave on this rank."""

    batch: TRLBatch  # M rows
    rollout: Rollout
    rows: list[dict[str, Any]]  # of the log
    problems: list[int] | None  # by number, one per row


def add_numbers(batch: TRLBatch, offset: int, group_size: int | None, sequences: bool) -> None:
    """Add what of a row survives TRL's shuffle: `row`, and in training `group` and `sequence`, see `Rows`.

    Args:
        offset: of this rank's first row among those of all ranks.
        group_size: None in an evaluation.
        sequences: equal completions are to be found.
    """
    batch["row"] = torch.arange(len(batch["prompt_ids"]), device=batch["prompt_ids"].device)
    if group_size is None:
        return
    group = (offset + batch["row"]) // group_size
    batch["group"] = numbers_of_sequences(batch["prompt_ids"], batch["prompt_mask"], group)
    if sequences:
        trained = batch["completion_mask"] + loss_mask(batch)  # whose tokens are whose is a part of them, too
        batch["sequence"] = numbers_of_sequences(batch["completion_ids"], trained, batch["group"])


def note(log: Sequence[dict[str, Any]], name: str, values: Tensor) -> None:
    """Add a value to each row of the log."""
    for row, value in zip(log, values.tolist(), strict=True):
        row[name] = value


def note_entropies(log: Sequence[dict[str, Any]], rows: Rows, entropy: Tensor) -> None:
    """Add the mean entropy of its trained tokens, of (B, T), to the log's row of each row."""
    if rows.row is not None:
        means = masked_mean(entropy, rows.trained, dim=1)
        note([log[number] for number in rows.row.tolist()], "token_entropy", means)


def replace_last(table: MutableSequence[float], values: Sequence[float]) -> None:
    """Put values in the place of as many at the end of a table that may have room for fewer."""
    for _ in range(min(len(values), len(table))):
        table.pop()
    table.extend(values)


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
    decoded, shown = list(completions), special_ids_with_text(tokenizer, eos_ids, tags_only)
    are_parsed = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
    for row, (completion, ids) in enumerate(zip(completions, completion_ids, strict=True)):
        if shown.isdisjoint(ids):
            continue
        (text,) = completion_texts(tokenizer, [ids], eos_ids)
        if isinstance(completion, str):
            decoded[row] = text
        elif not are_parsed and len(completion) == 1 and set(completion[0]) == {"role", "content"}:
            decoded[row] = [{**completion[0], "content": text}]
    return decoded


def log_rows(
    inputs: Sequence[Mapping[str, Any]],
    prompts: Sequence[object],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    generated_logps: Sequence[Sequence[float | None]] | None,
) -> list[dict[str, Any]]:
    """Completions as they are logged, without their rewards; one value per completion, all but the last are TRL's.

    Args:
        generated_logps: of their tokens, from which the entropy is estimated; None if unknown.
    """
    entropies = entropy_estimates(completion_ids, generated_logps)
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
    rollout: Rollout, rows: Sequence[Mapping[str, Any]], gather: Callable[[Tensor], Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """TRL's truncation metrics; mean lengths by outcome and entropy of all tokens: of all ranks' completions.

    In the first, completions that ended at a stop string count as finished. In the second, what no response has is
    left out.

    Args:
        rows: this rank's of the log.
        gather: concatenates the ranks' values; called once, with a few numbers instead of the rows.
    """
    lengths, finished, correct = rollout.lengths, rollout.finished, rollout.correct
    estimates = [row["entropy_estimate"] for row in rows]
    entropy = torch.tensor([torch.nan if e is None else e for e in estimates], device=lengths.device)
    groups = [finished, correct == 1, correct == 0]
    sums = [value for of_group in groups for value in (of_group.sum(), (lengths * of_group).sum())]
    dtype = widest_float(lengths.device)
    sums += [(lengths * ~entropy.isnan()).sum(), (lengths * entropy).to(dtype).nansum()]
    ended = lengths[finished]
    extremes = [ended.min(), -ended.max()] if len(ended) else [lengths.new_tensor(torch.inf)] * 2
    own = torch.stack([value.to(dtype) for value in (lengths.new_tensor(len(lengths)), *sums, *extremes)])
    everyones = gather(own[None])  # (ranks, 11)
    count, ends, ended_tokens, *outcomes, tokens, nats = everyones[:, :9].sum(dim=0).tolist()
    shortest, minus_longest = everyones[:, 9:].amin(dim=0).tolist()
    metrics = {
        "completions/clipped_ratio": 1 - _float32(ends / count),
        "completions/mean_terminated_length": _float32(ended_tokens / ends) if ends else 0.0,
        "completions/min_terminated_length": shortest if ends else 0.0,
        "completions/max_terminated_length": -minus_longest if ends else 0.0,
    }
    by_outcome = zip(("correct", "incorrect"), outcomes[::2], outcomes[1::2], strict=True)
    sampled = {f"completions/mean_length_{name}": length / n for name, n, length in by_outcome if n}
    return metrics, sampled | ({"sampling/entropy_estimate": nats / tokens} if tokens else {})


def _float32(value: float) -> float:
    """The value with the digits that TRL logs."""
    return torch.tensor(value).item()
