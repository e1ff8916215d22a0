"""The micro-batches of an optimizer step on one GPU, planned by the trainer's own planner, and what they compute."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from trl_ext.generation.kv_sharing import unsupported_in_a_step
from trl_ext.step import Batching, MicroBatch, OnPrompts, Rows
from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.costs.operations import Polynomial, Work
from trl_ext.tools.estimate.costs.rollouts import spread_lengths

if TYPE_CHECKING:
    from trl_ext.tools.estimate.planned import PlannedRun


@dataclass(frozen=True)
class MicroBatches:
    """Of one optimizer step and GPU, as arrays over micro-batches; widths in tokens."""

    rows: np.ndarray
    prompts: np.ndarray  # width
    completions: np.ndarray  # width; on shared prompts, where there is no padding, their mean length
    shared: tuple[tuple[int, int], ...] | None  # prompts and their width of each set that is computed once, if shared


def shares_prompts(run: PlannedRun) -> bool:
    """Whether the trainer will compute a group's prompt once, by the reasons for which it does not."""
    config = copy.deepcopy(run.network)
    config._attn_implementation = run.attention
    model = cast(Any, SimpleNamespace(config=config))
    return run.packs and run.config.share_prompt_prefix and unsupported_in_a_step(model) is None


def plan_step(run: PlannedRun) -> MicroBatches:
    """The micro-batches of a typical step: lengths by quantiles, the fraction of groups that has a gradient."""
    batching = Batching(
        rows=run.config.per_device_train_batch_size,
        tokens=run.token_limit,
        dynamic=run.packs,
        skip_zero_advantage=getattr(run.config, "skip_zero_advantage_rows", False),
        share_prompts=shares_prompts(run),
        checkpointing=run.config.gradient_checkpointing,
    )
    planned = batching.plan(_rows(run))
    sets = {
        id(one.forward.prompts): one.forward.prompts.ids.shape for one in planned if isinstance(one.forward, OnPrompts)
    }
    return MicroBatches(
        rows=np.array([len(one.rows) for one in planned], dtype=float),
        prompts=np.array([one.rows.prompt_ids.shape[1] for one in planned], dtype=float),
        completions=np.array([_width(one) for one in planned], dtype=float),
        shared=tuple((int(u), int(width)) for u, width in sets.values()) if sets else None,
    )


def _width(one: MicroBatch) -> float:
    if isinstance(one.forward, OnPrompts):
        return float(np.mean(one.forward.completions.lengths))
    return one.rows.completion_ids.shape[1]


def _rows(run: PlannedRun) -> Rows:
    """One GPU's rows of a step as the trainer has them, of which only lengths, groups and advantages matter."""
    n, group = run.rows_per_gpu, min(run.group, run.rows_per_gpu)
    groups = -(-n // group)
    lengths = run.lengths
    prompts = spread_lengths(groups, lengths.prompt, lengths.longest_prompt).repeat(group)[:n]
    completions = spread_lengths(n, lengths.completion, lengths.max_completion)
    places = np.arange(groups + 1) * run.trained_fraction
    trained = (np.diff(np.floor(places + 1e-9)) > 0).repeat(group)[:n]  # at even distances
    prompt_mask = np.arange(prompts.max())[::-1] < prompts[:, None]
    completion_mask = np.arange(completions.max()) < completions[:, None]
    return Rows(
        prompt_ids=torch.zeros(prompt_mask.shape, dtype=torch.long),
        prompt_mask=torch.from_numpy(prompt_mask.astype(np.int64)),
        completion_ids=torch.zeros(completion_mask.shape, dtype=torch.long),
        completion_mask=torch.from_numpy(completion_mask.astype(np.int64)),
        trained=torch.from_numpy(completion_mask),
        advantages=torch.from_numpy(trained.astype(np.float32))[:, None],
        group=torch.arange(groups).repeat_interleave(group)[:n],
    )


def training_work(costs: ModelCosts, batches: MicroBatches, checkpointing: bool, on_gpu: bool) -> list[Work]:
    """Forward and backward of the micro-batches and of the prompts that they share; each Work an array of passes.

    Args:
        checkpointing: the decoder's forward pass is run twice.
        on_gpu: TRL's head leaves prompts out and folds a tile of logits in one pass over it.
    """
    decoder = costs.decoder_trained + costs.decoder if checkpointing else costs.decoder_trained
    head = folded(costs.head_trained, costs.vocabulary, passes=3) if on_gpu else costs.head_trained
    return _passes(batches, decoder, head, on_gpu)


def scoring_work(costs: ModelCosts, batches: MicroBatches, on_gpu: bool) -> list[Work]:
    """A forward pass without gradient over the same micro-batches."""
    return _passes(
        batches, costs.decoder, folded(costs.head, costs.vocabulary, passes=1) if on_gpu else costs.head, on_gpu
    )


def folded(head: Polynomial, vocabulary: int, passes: int) -> Polynomial:
    """The head with Triton's kernels, which read a tile of logits in bfloat16 and, in training, read and write it."""
    coefficients = head.coefficients.copy()
    coefficients[2, 1] = passes * vocabulary * torch.bfloat16.itemsize  # other bytes, per query
    return Polynomial(coefficients)


def _passes(batches: MicroBatches, decoder: Polynomial, head: Polynomial, on_gpu: bool) -> list[Work]:
    rows, prompts, completions = batches.rows, batches.prompts, batches.completions
    if batches.shared is None:
        both = prompts + completions
        return [decoder(rows, both, both) + head(rows, completions if on_gpu else both, 0)]
    once = np.array(batches.shared, dtype=float)
    once = once[once[:, 1] > 1]  # the last token of a prompt goes with the completion
    own = decoder(rows, completions, prompts + completions - 1) + head(rows, completions, 0)
    return [own, decoder(once[:, 0], once[:, 1] - 1, once[:, 1] - 1)] if len(once) else [own]
