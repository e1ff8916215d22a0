"""Which rows a step computes, in which micro-batches, and how wide."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from trl_ext.step.batching import Batching, lengths_of, select_rows
from trl_ext.step.micro_batch import Contiguous, MicroBatch, OnPrompts
from trl_ext.step.packing import (
    Row,
    as_on_every_rank,
    cost,
    group_by_prompt,
    pack_by_tokens,
    pack_on_shared_prompts,
    pack_without_padding,
    split_into,
    unite,
)
from trl_ext.step.prompt_sharing import Completions
from trl_ext.step.rows import Rows, TRLBatch, numbers_of_sequences

PROMPTS, COMPLETIONS = [2, 2, 1, 3], [4, 1, 2, 3]
GROUPS, ADVANTAGES = [0, 0, 1, 1], [1.0, -1.0, 0.0, 0.5]


def of_trl() -> TRLBatch:
    """Four rows; every token's id says which row and position it is."""
    prompt_mask = torch.tensor([[0] * (3 - n) + [1] * n for n in PROMPTS])
    completion_mask = torch.tensor([[1] * n + [0] * (4 - n) for n in COMPLETIONS])
    places = torch.arange(4)[:, None] * 10
    return {
        "prompt_ids": (places + torch.arange(3) + 100) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": (places + torch.arange(4) + 200) * completion_mask,
        "completion_mask": completion_mask,
        "sampling_per_token_logps": places.float().expand(4, 4),
        "advantages": torch.tensor(ADVANTAGES),
        "row": torch.arange(4),
        "group": torch.tensor(GROUPS),
        "num_items_in_batch": torch.tensor(10),
    }


def batch(**changes: torch.Tensor | None) -> Rows:
    """The four rows, typed, with other values in some of TRL's fields."""
    found = {name: value for name, value in (of_trl() | changes).items() if value is not None}
    return Rows.of_trl(found)


def indices(runs: list[list[Row]]) -> list[list[int]]:
    return [[row.index for row in run] for run in runs]


def test_rows_have_their_lengths_without_padding_and_their_group() -> None:
    assert lengths_of(batch()) == [
        Row(i, *sizes) for i, sizes in enumerate(zip(PROMPTS, COMPLETIONS, GROUPS, strict=True))
    ]
    assert [row.group for row in lengths_of(batch(group=None))] == [0, 1, 2, 3]


def test_row_without_advantage_or_unmasked_token_changes_nothing() -> None:
    assert batch().has_gradient() == [True, True, False, True]
    mask = of_trl()["completion_mask"]
    mask[0] = 0
    assert batch(completion_mask=mask).has_gradient() == [False, True, False, True]
    tools = torch.tensor([[1] * 4, [0] * 4, [1] * 4, [1] * 4])
    assert batch(tool_mask=tools).has_gradient() == [True, False, False, True]
    per_token = torch.tensor([[0.0, 0, 0, 0], [0, 0.1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert batch(advantages=per_token).has_gradient() == [False, True, False, True]
    assert batch(advantages=torch.tensor([torch.nan, 0, 0, 0])).has_gradient()[0]


def test_rows_are_grouped_by_group_and_unpadded_prompt() -> None:
    ids = torch.tensor([[9, 5, 7], [0, 5, 7], [0, 5, 7], [8, 5, 7], [4, 5, 7]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]])
    found = numbers_of_sequences(ids, mask, torch.tensor([6, 6, 6, 7, 7])).tolist()
    assert found == [0, 0, 1, 2, 3]


def test_the_cost_counts_padding() -> None:
    assert cost([Row(0, 5, 3, 0), Row(1, 5, 7, 0), Row(2, 4, 1, 1)]) == 3 * 5 + 3 * 7


def test_rows_are_cut_by_tokens_in_order_of_length() -> None:
    rows = [Row(i, 2, n, i) for i, n in enumerate([1, 8, 2, 7, 3])]
    assert indices(pack_by_tokens(rows, budget=20)) == [[1, 3], [4, 2, 0]]
    assert indices(pack_by_tokens(rows, budget=1)) == [[1], [3], [4], [2], [0]]
    assert indices(pack_by_tokens(rows, budget=1000)) == [[1, 3, 4, 2, 0]]
    assert pack_by_tokens([], budget=10) == []


def test_groups_of_similar_length_share_a_batch_if_prompts_fit() -> None:
    rows = [Row(i, 4, n, i % 3) for i, n in enumerate([1, 9, 5, 2, 1, 6])]  # the longest of groups 0, 1, 2: 2, 9, 6
    assert indices(group_by_prompt(rows, budget=8)) == [[1, 4, 2, 5], [0, 3]]
    assert indices(group_by_prompt(rows, budget=1)) == [[1, 4], [2, 5], [0, 3]]
    assert group_by_prompt([], budget=8) == []


def test_prompts_and_completions_of_a_micro_batch_fit_the_budget() -> None:
    rows = [Row(i, 4, n, i % 3) for i, n in enumerate([1, 9, 5, 2, 1, 6])]
    sets = pack_on_shared_prompts(rows, budget=20)
    assert [indices(runs) for runs in sets] == [[[1, 4], [5, 2]], [[3, 0]]]
    assert {row.prompt for runs in sets for run in runs for row in run} == {4}
    for runs in sets:
        prompts = 4 * len({row.group for run in runs for row in run})
        assert all(prompts + sum(row.completion for row in run) <= 20 for run in runs)


def test_rows_without_padding_go_where_there_is_room() -> None:
    rows = [Row(i, 4, n, 0) for i, n in enumerate([3, 9, 2, 8, 5, 12])]
    assert indices(pack_without_padding(rows, 10)) == [[5], [1], [3, 2], [4, 0]]


def test_ranks_get_the_number_of_micro_batches_they_agreed_on() -> None:
    runs = [[Row(0, 1, 9, 0), Row(1, 1, 8, 0)], [Row(2, 1, 1, 0), Row(3, 1, 1, 0)]]
    assert split_into(runs, 2) == runs
    assert indices(split_into(runs, 3)) == [[0], [1], [2, 3]]
    assert sorted(map(len, split_into(runs, 6))) == [0, 0, 1, 1, 1, 1]
    assert split_into([], 2) == [[], []]
    with pytest.raises(ValueError, match="2 micro-batches do not fit into 1"):
        split_into(runs, 1)


def other_rank(*counts: int) -> Callable[[list[int]], list[int]]:
    """The maxima of this rank's numbers and of the other rank's."""
    return lambda own: [max(pair) for pair in itertools.zip_longest(own, counts, fillvalue=0)]


def test_every_set_has_as_many_micro_batches_on_all_ranks() -> None:
    one = [[[Row(0, 1, 9, 0), Row(1, 1, 8, 0)], [Row(2, 1, 1, 0)]]]
    assert [indices(runs) for runs in as_on_every_rank(one, other_rank(2))] == [[[0, 1], [2]]]
    assert [indices(runs) for runs in as_on_every_rank(one, other_rank(3, 2))] == [[[0], [1], [2]], [[], []]]
    assert as_on_every_rank([], other_rank(0)) == [[[]]]


def test_what_is_taken_is_trimmed_to_its_longest_row() -> None:
    lengths = lengths_of(batch())
    found = select_rows(batch(), [lengths[2], lengths[1]])
    taken = found.rows
    assert taken.prompt_ids.tolist() == [[0, 122], [111, 112]]
    assert taken.completion_ids.tolist() == [[220, 221], [210, 0]]
    assert taken.completion_mask.tolist() == taken.trained.long().tolist() == [[1, 1], [1, 0]]
    assert taken.sampled_logp is not None
    assert taken.sampled_logp.tolist() == [[20, 20], [10, 10]]
    assert taken.advantages.tolist() == [[0.0], [-1.0]]
    assert rows_trained(found) == [2, 1]
    assert taken.tokens_of_rollout == 10
    assert found.forward == Contiguous(3)


def test_widths_are_multiples_where_asked() -> None:
    lengths = lengths_of(batch())
    taken = select_rows(batch(), [lengths[1]], multiple_of=3).rows
    assert (taken.prompt_ids.shape, taken.completion_ids.shape) == ((1, 3), (1, 3))
    wide = select_rows(batch(), [lengths[1]], multiple_of=8)
    assert wide.rows.completion_ids.shape == (1, 4)  # no wider than it was


def test_a_micro_batch_of_no_rows_has_one_that_trains_nothing() -> None:
    taken = select_rows(batch(), [])
    assert len(taken.rows) == 1
    assert taken.rows.prompt_mask.sum() > 0, "attention needs a token"
    assert_untrained(taken)


def test_micro_batches_are_joined_again() -> None:
    whole = of_trl()
    halves = [{k: v if v.ndim == 0 else v[i : i + 2] for k, v in whole.items()} for i in (0, 2)]
    again, rows = Rows.joined([Rows.of_trl(half) for half in halves]).tensors(), batch().tensors()
    assert again.keys() == rows.keys()
    assert all(torch.equal(again[name], rows[name]) for name in rows)


def test_a_field_of_another_shape_is_refused_where_rows_are_made() -> None:
    """By beartype, which the tests install: annotations are true."""
    with pytest.raises(TypeError, match="advantages"):
        batch(advantages=torch.zeros(3))
    with pytest.raises(TypeError, match="sampled_logp"):
        batch(sampling_per_token_logps=torch.zeros(4, 3))


def rows_trained(one: MicroBatch) -> list[int]:
    return [] if one.rows.row is None else one.rows.row.tolist()


def assert_untrained(one: MicroBatch) -> None:
    assert not one.trains
    assert not one.rows.trained.any()
    assert not one.rows.completion_mask.any()
    assert not one.rows.advantages.any()


def sizes(plan: list[MicroBatch]) -> list[tuple[int, int, int]]:
    return [(len(rows_trained(b)), b.rows.prompt_ids.shape[1], b.rows.completion_ids.shape[1]) for b in plan]


def test_plan_skips_zero_advantage_rows_and_trims() -> None:
    assert sizes(Batching(rows=2).plan(batch())) == [(2, 3, 4), (1, 2, 1)]
    assert sizes(Batching(rows=2, skip_zero_advantage=False).plan(batch())) == [(2, 3, 4), (2, 2, 2)]
    assert sizes(Batching(rows=2, tokens=100).plan(batch())) == [(3, 3, 4)]
    assert sizes(Batching(rows=2, dynamic=False).plan(batch())) == [(2, 3, 4), (1, 3, 4)]
    kept = Batching(rows=2, dynamic=False, skip_zero_advantage=False).plan(batch())
    assert [rows_trained(b) for b in kept] == [[0, 1], [2, 3]]
    assert [b.forward for b in kept] == [None, None], "as TRL pads them"


def test_of_equal_rows_one_is_computed() -> None:
    rows = batch(sequence=torch.tensor([4, 4, 5, 4]), advantages=torch.tensor([0.0, 1.0, -1.0, 2.0]))
    lengths = lengths_of(rows)
    assert unite(lengths[1:], [4, 4, 5, 4]) == [replace(lengths[1], copies=(3,)), lengths[2]]
    (whole,) = Batching(rows=2, tokens=100).plan(rows)
    assert rows_trained(whole) == [1, 2, 3]
    assert whole.rows.advantages.tolist() == [[1.0], [-1.0], [2.0]]
    assert whole.copies is not None
    assert (whole.copies.computed, whole.copies.source.tolist()) == (2, [0, 1, 0])
    assert Batching(rows=2, dynamic=False).plan(rows)[0].copies is None


def random_batch(seed: int) -> Rows:
    """24 rows in six groups, with prompts of 1 to 40 tokens and completions of 1 to 30."""
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 41, (6, 1), generator=random).repeat_interleave(4, dim=0)
    completions = torch.randint(1, 31, (24, 1), generator=random)
    prompt_mask, completion_mask = (torch.arange(40) >= 40 - prompts).long(), (torch.arange(30) < completions).long()
    return Rows(
        prompt_mask, prompt_mask, completion_mask, completion_mask, completion_mask.bool(), torch.ones(24, 1),
        row=torch.arange(24), group=torch.arange(6).repeat_interleave(4),
    )  # fmt: skip


def passes(plan: list[MicroBatch]) -> Iterator[tuple[int, int]]:
    """Rows and tokens of each forward pass of a plan, those over shared prompts too."""
    for one in plan:
        assert one.forward is not None
        n = len(one.rows)
        yield n, sum(one.forward.completions.lengths) if isinstance(one.forward, OnPrompts) else n * one.forward.columns
    for prompts in {
        id(one.forward.prompts): one.forward.prompts for one in plan if isinstance(one.forward, OnPrompts)
    }.values():
        yield len(prompts.ids), prompts.ids.numel()


@pytest.mark.moderate
@pytest.mark.parametrize("sharing", [False, True])
def test_no_pass_of_several_rows_has_more_tokens_than_the_limit(sharing: bool) -> None:
    """However many micro-batches that takes, whatever the width is rounded to, and whatever another rank has."""
    settings = itertools.product((1, 40, 100, 250, 800), (None, 8), (False, True), (1, 16))
    for limit, multiple, checkpointing, rows in settings:
        made = Batching(
            rows, limit, skip_zero_advantage=False, share_prompts=sharing, multiple_of=multiple,
            checkpointing=checkpointing,
        )  # fmt: skip
        for others in (other_rank(), other_rank(3, 2)):
            plan = made.plan(random_batch(0), others)
            assert sorted(row for one in plan for row in rows_trained(one)) == list(range(24))
            assert any(isinstance(one.forward, OnPrompts) for one in plan if one.trains) == sharing
            beyond = [(n, tokens) for n, tokens in passes(plan) if n > 1 and tokens > limit]
            assert beyond == [], (limit, multiple, checkpointing, rows)
    (whole,) = Batching(1, 10_000, skip_zero_advantage=False).plan(random_batch(0))
    assert len(rows_trained(whole)) == 24


def test_step_without_useful_rows_still_has_a_micro_batch() -> None:
    skipped = batch(advantages=torch.zeros(4))
    assert sizes(Batching(rows=2).plan(skipped)) == [(0, 2, 1)]
    assert sizes(Batching(rows=2).plan(skipped, max_over_ranks=other_rank(2))) == [(0, 2, 1)] * 2
    assert sizes(Batching(rows=2, tokens=100).plan(batch(), max_over_ranks=other_rank(2))) == [(1, 2, 4), (2, 3, 3)]


def on_prompts(one: MicroBatch) -> OnPrompts:
    assert isinstance(one.forward, OnPrompts)
    return one.forward


def test_micro_batches_of_one_set_share_prompts_and_their_width() -> None:
    shared = Batching(rows=2, tokens=1000, skip_zero_advantage=False, share_prompts=True)
    rows = batch(group=torch.tensor([0, 0, 1, 2]))
    (whole,) = shared.plan(rows)
    by = on_prompts(whole)
    assert by.prompts.groups == [0, 1, 2]
    assert by.prompts.mask.tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]
    assert by.prompts.ids[1:].tolist() == [[0, 0, 122], [130, 131, 132]]
    assert by.prompts.micro_batches == 1
    assert by.completions == Completions([0, 2, 1, 0], [4, 3, 2, 1])
    assert whole.rows.group is not None
    assert by.completions.groups == whole.rows.group.tolist()
    two = shared.plan(rows, max_over_ranks=other_rank(0, 2))
    assert on_prompts(two[0]).prompts is on_prompts(two[1]).prompts
    assert on_prompts(two[0]).prompts.micro_batches == 2
    assert [b.rows.prompt_ids.shape[1] for b in two] == [3, 3]
    assert [b.rows.completion_ids.shape[1] for b in two] == [4, 2]


def test_sets_of_other_ranks_have_prompts_here_without_training() -> None:
    shared = Batching(rows=1, tokens=1000, skip_zero_advantage=False, share_prompts=True)
    rows = batch(group=torch.tensor([0, 0, 1, 2]))
    ours, filler, *others = shared.plan(rows, max_over_ranks=other_rank(0, 1, 2))
    assert rows_trained(ours) == [0, 3, 2, 1]
    for empty in (filler, *others):
        assert_untrained(empty)
        assert empty.rows.prompt_mask.any()
    by = on_prompts(filler)
    assert by.prompts is on_prompts(others[0]).prompts is not on_prompts(ours).prompts
    assert by.prompts.micro_batches == 2
    assert filler.rows.group is not None
    assert by.prompts.groups == by.completions.groups == filler.rows.group.tolist() == [0]


def test_waiting_prompts_count_half_with_checkpointing() -> None:
    rows = [Row(i, 4, 4, 0) for i in range(3)]
    assert [len(run) for run in pack_on_shared_prompts(rows, 12)[0]] == [2, 1]
    assert [len(run) for run in pack_on_shared_prompts(rows, 12, waiting=0.5)[0]] == [2, 1]
    assert [len(run) for run in pack_on_shared_prompts(rows, 14, waiting=0.5)[0]] == [3]
    ones = {
        name: torch.ones(3, 4).long() for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    }
    alike = Rows.of_trl({**ones, "advantages": torch.ones(3), "group": torch.zeros(3).long()})
    for on, micro_batches in ((False, 2), (True, 1)):
        assert len(Batching(rows=1, tokens=14, share_prompts=True, checkpointing=on).plan(alike)) == micro_batches


def test_prompts_of_one_token_are_padded_where_they_are_shared() -> None:
    ids, mask = torch.tensor([[7], [7], [8], [9]]), torch.ones(4, 1).long()
    rows = batch(prompt_ids=ids, prompt_mask=mask, group=torch.arange(4))
    (whole,) = Batching(rows=4, skip_zero_advantage=False, share_prompts=True).plan(rows)
    assert on_prompts(whole).prompts.ids.tolist() == [[0, 7], [0, 7], [0, 8], [0, 9]]
    assert on_prompts(whole).prompts.mask.tolist() == [[0, 1]] * 4
    assert whole.rows.prompt_ids.shape == (4, 2)


def test_a_group_of_long_completions_does_not_share_its_prompt() -> None:
    """Two tokens of a prompt are saved, and for completions of 4 and 1 tokens 4^2 + 1 - 2^2 comparisons are added."""
    rows = batch(group=torch.tensor([0, 0, 1, 2]))  # the others have no one to share with

    def plan(attention: float) -> list[tuple[bool, list[int]]]:
        shared = Batching(rows=2, tokens=1000, skip_zero_advantage=False, share_prompts=True, attention=attention)
        return [(isinstance(run.forward, OnPrompts), rows_trained(run)) for run in shared.plan(rows)]

    assert plan(2 * 2 / 13 - 1e-6) == [(False, [3, 2]), (True, [0, 1])]
    assert plan(2 * 2 / 13 + 1e-6) == [(False, [0, 3, 1, 2])]
