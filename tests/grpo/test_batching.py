"""Which rows a step computes, in which micro-batches, and how wide."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from trl_ext.grpo.batching import Batching, concatenate, has_gradient, numbers_of_sequences, rows_of, select_rows
from trl_ext.grpo.packing import (
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
from trl_ext.grpo.prompt_sharing import Rows

PROMPTS, COMPLETIONS = [2, 2, 1, 3], [4, 1, 2, 3]
GROUPS, ADVANTAGES = [0, 0, 1, 1], [1.0, -1.0, 0.0, 0.5]


def batch() -> dict[str, Any]:
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


def indices(runs: list[list[Row]]) -> list[list[int]]:
    return [[row.index for row in run] for run in runs]


def test_rows_have_their_lengths_without_padding_and_their_group() -> None:
    assert rows_of(batch()) == [
        Row(i, *sizes) for i, sizes in enumerate(zip(PROMPTS, COMPLETIONS, GROUPS, strict=True))
    ]
    alone = {name: value for name, value in batch().items() if name != "group"}
    assert [row.group for row in rows_of(alone)] == [0, 1, 2, 3]


def test_row_without_advantage_or_unmasked_token_changes_nothing() -> None:
    assert has_gradient(batch()) == [True, True, False, True]
    masked = batch()
    masked["completion_mask"][0] = 0
    assert has_gradient(masked) == [False, True, False, True]
    tools = {**batch(), "tool_mask": torch.tensor([[1] * 4, [0] * 4, [1] * 4, [1] * 4])}
    assert has_gradient(tools) == [True, False, False, True]
    per_token = {**batch(), "advantages": torch.tensor([[0.0, 0, 0, 0], [0, 0.1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])}
    assert has_gradient(per_token) == [False, True, False, True]
    assert has_gradient({**batch(), "advantages": torch.tensor([torch.nan, 0, 0, 0])})[0]


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
    rows = rows_of(batch())
    taken = select_rows(batch(), [rows[2], rows[1]])
    assert taken["prompt_ids"].tolist() == [[0, 122], [111, 112]]
    assert taken["completion_ids"].tolist() == [[220, 221], [210, 0]]
    assert taken["completion_mask"].tolist() == [[1, 1], [1, 0]]
    assert taken["sampling_per_token_logps"].tolist() == [[20, 20], [10, 10]]
    assert taken["advantages"].tolist() == [0.0, -1.0]
    assert taken["row"].tolist() == [2, 1]
    assert taken["num_items_in_batch"] == 10


def test_widths_are_multiples_where_asked() -> None:
    rows = rows_of(batch())
    taken = select_rows(batch(), [rows[1]], multiple_of=3)
    assert (taken["prompt_ids"].shape, taken["completion_ids"].shape) == ((1, 3), (1, 3))
    assert select_rows(batch(), [rows[1]], multiple_of=8)["completion_ids"].shape == (1, 4)  # no wider than it was


def test_a_micro_batch_of_no_rows_has_one_that_trains_nothing() -> None:
    taken = select_rows(batch(), [])
    assert taken["completion_ids"].shape[0] == 1
    assert taken["prompt_mask"].sum() > 0, "attention needs a token"
    assert not taken["completion_mask"].any()
    assert not taken["advantages"].any()
    assert "row" not in taken


def test_micro_batches_are_joined_again() -> None:
    whole = batch()
    halves = [{k: v if v.ndim == 0 else v[i : i + 2] for k, v in whole.items()} for i in (0, 2)]
    again = concatenate(halves)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def sizes(plan: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(len(b["row"]) if "row" in b else 0, b["prompt_ids"].shape[1], b["completion_ids"].shape[1]) for b in plan]


def test_plan_skips_zero_advantage_rows_and_trims() -> None:
    assert sizes(Batching(rows=2).plan(batch())) == [(2, 3, 4), (1, 2, 1)]
    assert sizes(Batching(rows=2, skip_zero_advantage=False).plan(batch())) == [(2, 3, 4), (2, 2, 2)]
    assert sizes(Batching(rows=2, tokens=100).plan(batch())) == [(3, 3, 4)]
    assert sizes(Batching(rows=2, dynamic=False).plan(batch())) == [(2, 3, 4), (1, 3, 4)]
    kept = Batching(rows=2, dynamic=False, skip_zero_advantage=False).plan(batch())
    assert [b["row"].tolist() for b in kept] == [[0, 1], [2, 3]]


def test_of_equal_rows_one_is_computed() -> None:
    rows = {**batch(), "sequence": torch.tensor([4, 4, 5, 4]), "advantages": torch.tensor([0.0, 1.0, -1.0, 2.0])}
    assert unite(rows_of(rows)[1:], [4, 4, 5, 4]) == [replace(rows_of(rows)[1], copies=(3,)), rows_of(rows)[2]]
    (whole,) = Batching(rows=2, tokens=100).plan(rows)
    assert whole["row"].tolist() == [1, 2, 3]
    assert whole["advantages"].tolist() == [1.0, -1.0, 2.0]
    assert (whole["computed"], whole["copy_of"].tolist()) == (2, [0, 1, 0])
    assert "copy_of" not in Batching(rows=2, dynamic=False).plan(rows)[0]


def random_batch(seed: int) -> dict[str, Any]:
    """24 rows in six groups, with prompts of 1 to 40 tokens and completions of 1 to 30."""
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 41, (6, 1), generator=random).repeat_interleave(4, dim=0)
    completions = torch.randint(1, 31, (24, 1), generator=random)
    prompt_mask, completion_mask = (torch.arange(40) >= 40 - prompts).long(), (torch.arange(30) < completions).long()
    ones = torch.ones(24)
    return {
        "prompt_ids": prompt_mask, "prompt_mask": prompt_mask, "completion_ids": completion_mask,
        "completion_mask": completion_mask, "advantages": ones, "row": torch.arange(24),
        "group": torch.arange(6).repeat_interleave(4),
    }  # fmt: skip


def passes(plan: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Rows and tokens of each forward pass of a plan, those over shared prompts too."""
    for one in plan:
        shared = "prompts" in one
        yield len(one["prompt_ids"]), sum(one["rows"].lengths) if shared else len(one["prompt_ids"]) * one["columns"]
    for prompts in {id(one["prompts"]): one["prompts"] for one in plan if "prompts" in one}.values():
        yield len(prompts.ids), prompts.ids.numel()


@pytest.mark.parametrize("sharing", [False, True])
def test_no_pass_of_several_rows_has_more_tokens_than_the_limit(sharing: bool) -> None:
    """However many micro-batches that takes, whatever the width is rounded to, and whatever another rank has."""
    settings = itertools.product(range(3), (1, 40, 100, 250, 800), (None, 8), (False, True), (1, 16))
    for seed, limit, multiple, checkpointing, rows in settings:
        made = Batching(
            rows, limit, skip_zero_advantage=False, share_prompts=sharing, multiple_of=multiple,
            checkpointing=checkpointing,
        )  # fmt: skip
        for others in (other_rank(), other_rank(3, 2)):
            plan = made.plan(random_batch(seed), others)
            assert sorted(row for one in plan if "row" in one for row in one["row"].tolist()) == list(range(24))
            assert any("prompts" in one for one in plan if "row" in one) == sharing
            beyond = [(n, tokens) for n, tokens in passes(plan) if n > 1 and tokens > limit]
            assert beyond == [], (seed, limit, multiple, checkpointing, rows)
    (whole,) = Batching(1, 10_000, skip_zero_advantage=False).plan(random_batch(0))
    assert len(whole["row"]) == 24


def test_step_without_useful_rows_still_has_a_micro_batch() -> None:
    skipped = {**batch(), "advantages": torch.zeros(4)}
    assert sizes(Batching(rows=2).plan(skipped)) == [(0, 2, 1)]
    assert sizes(Batching(rows=2).plan(skipped, max_over_ranks=other_rank(2))) == [(0, 2, 1)] * 2
    assert sizes(Batching(rows=2, tokens=100).plan(batch(), max_over_ranks=other_rank(2))) == [(1, 2, 4), (2, 3, 3)]


def test_micro_batches_of_one_set_share_prompts_and_their_width() -> None:
    shared = Batching(rows=2, tokens=1000, skip_zero_advantage=False, share_prompts=True)
    rows = {**batch(), "group": torch.tensor([0, 0, 1, 2])}
    (whole,) = shared.plan(rows)
    assert whole["prompts"].groups == [0, 1, 2]
    assert whole["prompts"].mask.tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]
    assert whole["prompts"].ids[1:].tolist() == [[0, 0, 122], [130, 131, 132]]
    assert whole["prompts"].micro_batches == 1
    assert whole["rows"] == Rows([0, 2, 1, 0], [4, 3, 2, 1])
    assert whole["rows"].groups == whole["group"].tolist()
    two = shared.plan(rows, max_over_ranks=other_rank(0, 2))
    assert two[0]["prompts"] is two[1]["prompts"]
    assert two[0]["prompts"].micro_batches == 2
    assert [b["prompt_ids"].shape[1] for b in two] == [3, 3]
    assert [b["completion_ids"].shape[1] for b in two] == [4, 2]


def test_sets_of_other_ranks_have_prompts_here_without_training() -> None:
    shared = Batching(rows=1, tokens=1000, skip_zero_advantage=False, share_prompts=True)
    rows = {**batch(), "group": torch.tensor([0, 0, 1, 2])}
    ours, filler, *others = shared.plan(rows, max_over_ranks=other_rank(0, 1, 2))
    assert ours["row"].tolist() == [0, 3, 2, 1]
    for empty in (filler, *others):
        assert not empty["completion_mask"].any()
        assert not empty["advantages"].any()
        assert empty["prompt_mask"].any()
    assert filler["prompts"] is others[0]["prompts"] is not ours["prompts"]
    assert filler["prompts"].micro_batches == 2
    assert filler["prompts"].groups == filler["rows"].groups == filler["group"].tolist() == [0]


def test_waiting_prompts_count_half_with_checkpointing() -> None:
    rows = [Row(i, 4, 4, 0) for i in range(3)]
    assert [len(run) for run in pack_on_shared_prompts(rows, 12)[0]] == [2, 1]
    assert [len(run) for run in pack_on_shared_prompts(rows, 12, waiting=0.5)[0]] == [2, 1]
    assert [len(run) for run in pack_on_shared_prompts(rows, 14, waiting=0.5)[0]] == [3]
    ones = {
        name: torch.ones(3, 4).long() for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    }
    alike = {**ones, "advantages": torch.ones(3), "group": torch.zeros(3).long()}
    for on, micro_batches in ((False, 2), (True, 1)):
        assert len(Batching(rows=1, tokens=14, share_prompts=True, checkpointing=on).plan(alike)) == micro_batches


def test_prompts_of_one_token_are_padded_where_they_are_shared() -> None:
    rows = {**batch(), "prompt_ids": torch.tensor([[7], [7], [8], [9]]), "prompt_mask": torch.ones(4, 1).long()}
    rows["group"] = torch.arange(4)
    (whole,) = Batching(rows=4, skip_zero_advantage=False, share_prompts=True).plan(rows)
    assert whole["prompts"].ids.tolist() == [[0, 7], [0, 7], [0, 8], [0, 9]]
    assert whole["prompts"].mask.tolist() == [[0, 1]] * 4
    assert whole["prompt_ids"].shape == (4, 2)


def test_a_group_of_long_completions_does_not_share_its_prompt() -> None:
    """Two tokens of a prompt are saved, and for completions of 4 and 1 tokens 4^2 + 1 - 2^2 comparisons are added."""
    rows = {**batch(), "group": torch.tensor([0, 0, 1, 2])}  # the others have no one to share with

    def plan(attention: float) -> list[tuple[bool, list[int]]]:
        shared = Batching(rows=2, tokens=1000, skip_zero_advantage=False, share_prompts=True, attention=attention)
        return [("prompts" in run, run["row"].tolist()) for run in shared.plan(rows)]

    assert plan(2 * 2 / 13 - 1e-6) == [(False, [3, 2]), (True, [0, 1])]
    assert plan(2 * 2 / 13 + 1e-6) == [(False, [0, 3, 1, 2])]
