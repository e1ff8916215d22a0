"""Members of `DISTILLATIONS` against the divergences that they are to lower, written out and enumerated in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import ragged_mask
from trl_ext.algorithms.distillation import DISTILLATIONS, Distillation, event_log_probs

OF_TOKENS = sorted(name for name, member in DISTILLATIONS.items() if not getattr(member, "of_distribution", False))
DIVERGENCES = sorted(DISTILLATIONS.keys() - set(OF_TOKENS))
VOCABULARY = 5


def logits(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Of probabilities, over the last dimension."""
    return (p * (p / q).log()).sum(dim=-1)


# Each member as its formula, of probabilities of the teacher and of the student, (..., V).
PAPERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse_kl": lambda t, s: kl(s, t),
    "reverse_kl_mean": lambda t, s: kl(s, t),  # of responses of one token
    "full_reverse_kl": lambda t, s: kl(s, t),
    "full_forward_kl": lambda t, s: kl(t, s),
    "jensen_shannon": lambda t, s: 0.5 * kl(t, (t + s) / 2) + 0.5 * kl(s, (t + s) / 2),
}


@pytest.mark.parametrize("name", OF_TOKENS)
def test_the_expected_update_of_a_token_lowers_the_divergence(name: str) -> None:
    student, teacher = logits(VOCABULARY, seed=0).requires_grad_(), logits(VOCABULARY, seed=1).softmax(-1)
    logp = student.log_softmax(-1)  # every token once, as a response of its own: (V, 1)
    advantage = DISTILLATIONS.build(name)(
        teacher.log()[:, None], logp[:, None], torch.ones(VOCABULARY, 1, dtype=torch.bool)
    )
    assert not advantage.requires_grad
    surrogate = -(logp.exp().detach() * advantage[:, 0] * logp).sum()  # the mean over samples of -A log pi
    wanted = PAPERS[name](teacher, logp.exp())
    for_student = [torch.autograd.grad(value, student, retain_graph=True)[0] for value in (surrogate, wanted)]
    assert_close(*for_student, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("discount", "horizon"), [(0.0, 1), (1.0, 3)])
def test_discounts_choose_between_next_tokens_and_responses(discount: float, horizon: int) -> None:
    """With discount 1 the divergence of whole responses, whose later tokens depend on the earlier ones; with 0 not."""
    tables = [logits(*[VOCABULARY] * (t + 1), seed=t).requires_grad_() for t in range(3)]
    teachers = [logits(*[VOCABULARY] * (t + 1), seed=10 + t).log_softmax(-1) for t in range(3)]
    own = [table.log_softmax(-1) for table in tables]
    responses = list(itertools.product(range(VOCABULARY), repeat=3))
    logp = torch.stack([torch.stack([own[t][r[: t + 1]] for t in range(3)]) for r in responses])  # (V^3, 3)
    teacher = torch.stack([torch.stack([teachers[t][r[: t + 1]] for t in range(3)]) for r in responses])
    probability = logp.sum(dim=1).exp().detach()
    advantage = DISTILLATIONS.build("reverse_kl", discount=discount)(teacher, logp, torch.ones(logp.shape).bool())
    surrogate = -(probability[:, None] * advantage * logp).sum()
    if horizon == 1:  # states as they come, only the next token's divergence is lowered
        per_place = [kl(own[t].exp(), teachers[t].exp()) for t in range(3)]
        reached = [own[0].new_ones(()), own[0].exp().detach(), (own[0][:, None] + own[1]).exp().detach()]
        wanted = sum((weight * value).sum() for weight, value in zip(reached, per_place, strict=True))
    else:
        wanted = (logp.sum(dim=1).exp() * (logp - teacher).sum(dim=1)).sum()
    assert isinstance(wanted, Tensor)
    for of_ours, of_formula in zip(
        torch.autograd.grad(surrogate, tables, retain_graph=True), torch.autograd.grad(wanted, tables), strict=True
    ):
        assert_close(of_ours, of_formula, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_of_all_tokens_is_its_formula(name: str) -> None:
    student, teacher = logits(2, 3, VOCABULARY, seed=0).requires_grad_(), logits(2, 3, VOCABULARY, seed=1)
    order = torch.stack([torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(n)) for n in range(6)])
    events = [event_log_probs(x.flatten(0, 1), order).unflatten(0, (2, 3)) for x in (teacher, student)]
    ours, wanted = DISTILLATIONS.build(name)(*events), PAPERS[name](teacher.softmax(-1), student.softmax(-1))
    assert_close(ours, wanted, rtol=0, atol=1e-12)
    assert_close(
        *(torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (ours, wanted)),
        rtol=0, atol=1e-9,
    )  # fmt: skip
    assert DISTILLATIONS.build(name)(events[0], events[0]).abs().max() < 1e-15


@pytest.mark.parametrize("name", DIVERGENCES)
def test_with_fewer_tokens_the_rest_is_one_event(name: str) -> None:
    student, teacher = logits(1, 4, VOCABULARY, seed=0).requires_grad_(), logits(1, 4, VOCABULARY, seed=1)
    ids = teacher[0].topk(2).indices
    events = [event_log_probs(x[0], ids)[None] for x in (teacher, student)]
    assert events[0].shape == (1, 4, 3)
    assert_close(events[1].exp().sum(dim=-1), torch.ones(1, 4, dtype=torch.float64), rtol=0, atol=1e-12)

    def coarse(x: Tensor) -> Tensor:
        chosen = x.softmax(-1)[0].gather(-1, ids)
        return torch.cat([chosen, 1 - chosen.sum(dim=-1, keepdim=True)], dim=-1)[None]

    ours, wanted = DISTILLATIONS.build(name)(*events), PAPERS[name](coarse(teacher), coarse(student))
    assert_close(ours, wanted, rtol=0, atol=1e-12)
    assert_close(
        *(torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (ours, wanted)),
        rtol=0, atol=1e-9,
    )  # fmt: skip
    assert (ours <= PAPERS[name](teacher.softmax(-1), student.softmax(-1))).all()  # a lower bound


def test_the_rest_keeps_its_digits_where_it_is_small() -> None:
    sharp = torch.tensor([[50.0, 0.0, 1.0]], dtype=torch.float64)
    (found,) = event_log_probs(sharp, torch.tensor([[0]]))
    assert found[1].item() == pytest.approx(math.log(1 + math.e) - 50, rel=1e-12)  # 1 - exp(0) would be none


@pytest.mark.parametrize("name", DIVERGENCES)
def test_an_impossible_token_counts_as_nothing_on_its_own_side(name: str) -> None:
    teacher = torch.tensor([[[0.5, 0.5, 0.0]]], dtype=torch.float64).log()
    student = torch.tensor([[[0.2, 0.2, 0.6]]], dtype=torch.float64).log().requires_grad_()
    value = DISTILLATIONS.build(name)(teacher, student)
    if name == "full_reverse_kl":  # it is infinite
        assert value.item() == math.inf
        return
    assert value.item() == pytest.approx(PAPERS[name](teacher.exp() + 1e-300, student.exp()).item(), abs=1e-9)
    assert torch.autograd.grad(value.sum(), student)[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "teacher", "student", "wanted"),
    [
        ("reverse_kl", {}, [[-1, -2, -3]], [[-2, -2, -1]], [[1, 0, -2]]),
        ("reverse_kl", {"clip": 1.0}, [[-1, -2, -3]], [[-2, -2, -1]], [[1, 0, -1]]),
        # from behind: -2, 0 + -2 / 2, 1 + -1 / 2
        ("reverse_kl", {"discount": 0.5}, [[-1, -2, -3]], [[-2, -2, -1]], [[0.5, -1, -2]]),
        ("reverse_kl_mean", {}, [[-1, -2, -3]], [[-2, -2, -1]], [[-1 / 3] * 3]),
        ("reverse_kl_mean", {"clip": 1.0}, [[-1, -2, -3]], [[-2, -2, -1]], [[0] * 3]),
        ("full_reverse_kl", {}, [[[0.5, 0.5]]], [[[0.25, 0.75]]], [[0.25 * math.log(0.5) + 0.75 * math.log(1.5)]]),
        ("full_forward_kl", {}, [[[0.5, 0.5]]], [[[0.25, 0.75]]], [[0.5 * math.log(2) + 0.5 * math.log(2 / 3)]]),
        # m = 5/8 of the first for beta 1/4... here the teacher is sure: m = 1/4 + 3/8, 3/8
        (
            "jensen_shannon", {"beta": 0.25}, [[[1.0, 0.0]]], [[[0.5, 0.5]]],
            [[0.25 * math.log(8 / 5) + 0.75 * (0.5 * math.log(0.5 * 8 / 5) + 0.5 * math.log(0.5 * 8 / 3))]],
        ),
    ],
)  # fmt: skip
def test_values_by_hand(
    name: str, options: dict[str, float], teacher: list[object], student: list[object], wanted: list[object]
) -> None:
    values = [torch.tensor(value, dtype=torch.float64) for value in (teacher, student)]
    if name in DIVERGENCES:
        found = DISTILLATIONS.build(name, **options)(*(value.log() for value in values))
    else:
        found = DISTILLATIONS.build(name, **options)(*values, torch.ones(values[0].shape, dtype=torch.bool))
    assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", OF_TOKENS)
def test_masked_tokens_neither_have_a_value_nor_count(name: str) -> None:
    mask = ragged_mask()
    member = DISTILLATIONS.build(name)
    teacher, student = (-logits(*mask.shape, seed=n).abs() for n in (0, 1))
    found = member(teacher, student, mask)
    others = torch.where(mask, teacher, torch.nan), torch.where(mask, student, -torch.inf)
    assert_close(member(*others, mask)[mask], found[mask], rtol=0, atol=0)
    lengths = mask.sum(dim=1).clamp(min=1)
    if name == "reverse_kl_mean":
        assert_close(found[:, 0], ((teacher - student) * mask).sum(dim=1) / lengths, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reverse_kl", {"discount": 1.5}, "discount must be between 0 and 1, got 1.5"),
        ("reverse_kl", {"clip": 0.0}, "clip must be positive, got 0"),
        ("jensen_shannon", {"beta": 1.0}, "beta must be above 0 and below 1, got 1"),
    ],
)
def test_options_without_a_meaning_are_refused(name: str, options: dict[str, float], message: str) -> None:
    two = torch.full((1, 2), -0.5)
    given = (two[None], two[None]) if name in DIVERGENCES else (two, two, torch.ones(1, 2).bool())
    with pytest.raises(ValueError, match=message):
        DISTILLATIONS.build(name, **options)(*given)


def test_several_teachers_count_by_their_weights() -> None:
    teachers, student = -logits(2, 3, 2, seed=0).abs(), -logits(2, 3, seed=1).abs()
    teachers[1, :, 1] = torch.nan  # whose weight is 0
    weight = torch.tensor([[[0.25, 0.75]], [[1.0, 0.0]]], dtype=torch.float64)
    learned = Distillation(DISTILLATIONS["reverse_kl"], coef=1.0, coef_end=1.0)
    found = learned.advantages(teachers, weight, student, torch.ones(2, 3).bool())
    assert_close(found[0], 0.25 * teachers[0, :, 0] + 0.75 * teachers[0, :, 1] - student[0])
    assert_close(found[1], teachers[1, :, 0] - student[1])


def test_the_coefficient_changes_linearly_and_stays_at_its_end() -> None:
    learned = Distillation(DISTILLATIONS["reverse_kl"], coef=2.0, coef_end=0.5)
    assert [learned.coefficient(done) for done in (0, 0.5, 1, 1.5)] == [2.0, 1.25, 0.5, 0.5]
