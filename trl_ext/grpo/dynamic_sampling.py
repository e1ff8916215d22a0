"""A rollout that is sampled again until of every group some completion is trained on.

DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): others take the place of a group of which a selection, in DAPO
`mixed_groups`, keeps nothing. Here a rollout is tried a limited number of times; what is still missing then is filled
with groups of the first try.

Letters: P groups of a rollout, G completions per group, M rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_ext.grpo.rollout import Rollout, SampledBatch
from trl_ext.step import PROMPT_FIELDS, loss_mask


def sample_until_full(
    first: SampledBatch,
    sample: Callable[[int], SampledBatch],
    judge: Callable[[SampledBatch], list[bool]],
    may_retry: Callable[[int], bool],
    group_size: int,
    gather: Callable[[Tensor], Tensor],
    gather_rows: Callable[[list[Any]], list[Any]],
) -> tuple[SampledBatch, dict[str, float]]:
    """A rollout with other groups in place of uninformative ones, and metrics. A collective operation.

    Args:
        sample: gives a further try, given the number of tries before it.
        judge: tells for each of the P groups of a try whether it is informative.
        may_retry: whether there may be a further try, given the number of tries before it.
        gather, gather_rows: as for `assemble`.
    """
    tries, informative = [first], [judge(first)]
    while sum(map(sum, informative)) < len(informative[0]) and may_retry(len(tries)):
        tries.append(sample(len(tries)))
        informative.append(judge(tries[-1]))
    sampled, groups = first, fill(informative)
    if tries[1:]:
        sampled = assemble(tries, groups, group_size, gather, gather_rows)
        sampled.batch["num_items_in_batch"] = gather(loss_mask(sampled.batch).sum()).sum()
    return sampled, {
        "dynamic_sampling/tries": float(len(tries)),
        "dynamic_sampling/informative_frac": min(1.0, sum(map(sum, informative)) / len(groups)),
    }


def fill(informative: Sequence[Sequence[bool]]) -> list[tuple[int, int]]:
    """The P groups that are trained on, by try and place: informative ones in the order in which they were sampled.

    Args:
        informative: of each try, P values.
    """
    places = [(attempt, place) for attempt, of_try in enumerate(informative) for place, ok in enumerate(of_try) if ok]
    spare = [(0, place) for place, ok in enumerate(informative[0]) if not ok]
    return [*places, *spare][: len(informative[0])]


def assemble(
    tries: Sequence[SampledBatch],
    groups: Sequence[tuple[int, int]],
    group_size: int,
    gather: Callable[[Tensor], Tensor],
    gather_rows: Callable[[list[Any]], list[Any]],
) -> SampledBatch:
    """This rank's part of a rollout of these groups. A collective operation.

    Args:
        groups: by try and place, as `fill` gives them.
        gather: concatenates the ranks' tensors of equal shape.
        gather_rows: concatenates the ranks' lists.
    """
    first = tries[0].rollout
    places = [(attempt, group * group_size + i) for attempt, group in groups for i in range(group_size)]
    rows_per_try = len(first.reward)
    every = torch.tensor([attempt * rows_per_try + row for attempt, row in places], device=first.reward.device)
    own = first.own(every)

    def of_everyone(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([gather(value) for value in values])

    def of_log(rows: Sequence[list[Any]]) -> list[Any]:
        gathered = [row for of_try in rows for row in gather_rows(of_try)]
        return [gathered[i] for i in own.tolist()]

    batch = {}
    for name, value in tries[0].batch.items():
        values = [attempt.batch[name] for attempt in tries]
        is_per_row = isinstance(value, Tensor) and value.ndim > 0
        batch[name] = of_everyone(_equally_wide(values, name, gather))[own] if is_per_row else value
    own_facts = [torch.stack([t.rollout.finished.float(), t.rollout.lengths, t.rollout.correct], dim=1) for t in tries]
    finished, lengths, correct = of_everyone(own_facts)[own].unbind(dim=1)
    rewards, reward = (torch.cat([getattr(t.rollout, name) for t in tries])[every] for name in ("rewards", "reward"))
    rollout = Rollout(rewards, reward, finished.bool(), lengths, correct, first.offset)
    problems = None if tries[0].problems is None else of_log([list(t.problems or ()) for t in tries])
    return SampledBatch(batch, rollout, of_log([t.rows for t in tries]), problems)


def _equally_wide(values: Sequence[Tensor], name: str, gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """(M, any) values of the tries padded with 0 to the width of the widest on any rank, prompts on the left."""
    if values[0].ndim < 2:
        return list(values)
    widest = max(value.shape[1] for value in values)
    width = int(gather(torch.tensor([widest], device=values[0].device)).max())
    missing = [width - value.shape[1] for value in values]
    return [
        torch.nn.functional.pad(value, (pad, 0) if name in PROMPT_FIELDS else (0, pad))
        for value, pad in zip(values, missing, strict=True)
    ]
