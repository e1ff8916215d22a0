"""What the model is asked next, by hand; and what is found of a program in its answer."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from tests.support.discovery import PROBLEM, attempt
from trl_ext.tools.discovery.archive import Attempt, best_valid, populations, ranked
from trl_ext.tools.discovery.problem import CUT_OFF, NO_PROGRAM, Problem, Verdict, extract_program
from trl_ext.tools.discovery.strategies import STRATEGIES, Proposal, feedback

PENDING = Attempt(90)


def ask(strategy: str, attempts: list[Attempt], seed: int = 0, **options: Any) -> Proposal | None:
    return STRATEGIES.build(strategy, **options)(PROBLEM, attempts, Random(seed))


def asked(strategy: str, attempts: list[Attempt], seed: int = 0, **options: Any) -> Proposal:
    proposal = ask(strategy, attempts, seed, **options)
    assert proposal is not None
    return proposal


def contents(proposal: Proposal) -> list[str]:
    return [message["content"] for message in proposal.messages]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_starts_with_the_task_and_ends_with_user(strategy: str) -> None:
    for attempts in ([], [attempt(0, (1,))], [attempt(0, (1,)), attempt(1)]):
        proposal = (
            ask(strategy, attempts, explore=0.0)
            if "explore" in STRATEGIES.options(strategy)
            else ask(strategy, attempts)
        )
        if proposal is None:
            continue
        task = PROBLEM.hybrid_task if strategy == "hybrid" else PROBLEM.task
        assert proposal.messages[0]["content"].startswith(task)
        assert [m["role"] for m in proposal.messages] == ["user", "assistant"] * (len(proposal.messages) // 2) + [
            "user"
        ]


def test_single_asks_once_and_best_of_n_n_times() -> None:
    assert contents(asked("single", [])) == [PROBLEM.task]
    assert ask("single", [PENDING]) is None
    assert contents(asked("best_of_n", [PENDING, attempt(0)], n=3)) == [PROBLEM.task]
    assert ask("best_of_n", [PENDING, attempt(0), attempt(1)], n=3) is None


def test_refine_feeds_back_the_exact_message_of_its_own_chain() -> None:
    attempts = [attempt(0, (1,), valid=False, group=0), attempt(1, (2,), group=1)]
    proposal = asked("refine", attempts, chains=2)
    assert (proposal.group, proposal.parents) == (0, (0,))
    task, answer, told = contents(proposal)
    assert (task, answer) == (PROBLEM.task, "```python\nprogram 0\n```")
    assert told == "The verifier says: message 0\nCorrect this. Answer with the complete program."


def test_refine_shows_the_last_turns_without_thought() -> None:
    attempts = [attempt(i, (i,), response=f"<think>long</think>\n```python\np{i}\n```") for i in range(4)]
    proposal = asked("refine", attempts, turns=2)
    assert proposal.parents == (2, 3)
    assert contents(proposal)[1] == "```python\np2\n```"


@pytest.mark.parametrize("response", ["<think>long and cut off", "", "<think>long</think>\n"])
def test_turn_without_answer_is_not_empty_and_shows_no_thought(response: str) -> None:
    assert contents(asked("refine", [attempt(0, response=response)]))[1] == "(no answer)"


def test_refine_extends_the_shortest_chain_without_open_request() -> None:
    assert ask("refine", [PENDING]) is None
    assert asked("refine", [PENDING], chains=2).group == 1
    assert asked("refine", [attempt(0, group=0), attempt(1, group=0), attempt(2, group=1)], chains=2).group == 1


def test_an_attempt_without_an_answer_is_no_turn() -> None:
    failed = Attempt(0, error="no answer")
    assert contents(asked("refine", [failed])) == [PROBLEM.task]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"verdict": Verdict(True, (5, -1), "m")}, "valid, with 5 points. Find a better one"),
        ({"verdict": Verdict(False, (), "too close")}, "The verifier says: too close\nCorrect this"),
        ({"response": "I cannot."}, NO_PROGRAM),
        ({"response": "Let me", "finish_reason": "length"}, CUT_OFF),
        ({"polished": Verdict(True, (9,), "polished")}, "The verifier says: polished"),
    ],
)
def test_feedback_has_the_verdict_and_an_instruction(changed: dict[str, Any], words: str) -> None:
    assert words in feedback(PROBLEM, attempt(0, (1,), **changed))


def test_islands_show_their_own_good_programs_worst_first() -> None:
    attempts = [
        attempt(0, (1,), group=0),
        attempt(1, (9,), group=1),
        attempt(2, (3,), group=0),
        attempt(3, (2,), group=1),
    ]
    for seed in range(8):  # in whatever order they are drawn
        proposal = asked("islands", attempts, seed, islands=2, parents=2, explore=0.0)
        assert (proposal.group, proposal.parents) == (0, (0, 2))
    (text,) = contents(proposal)
    assert text.index("program 0") < text.index("message 0") < text.index("program 2") < text.index("message 2")
    assert "program 1" not in text


def test_islands_take_turns_and_explore_from_nothing() -> None:
    attempts = [attempt(0, (1,), group=0)]
    assert asked("islands", attempts, islands=2).group == 1
    assert asked("islands", [*attempts, attempt(1, (1,), group=1)], islands=2, explore=1.0).parents == ()


def test_better_programs_are_shown_more_often() -> None:
    attempts = [attempt(i, (i,), group=0) for i in range(4)]
    shown = [asked("islands", attempts, seed, islands=1, parents=1, explore=0.0).parents[0] for seed in range(200)]
    counts = [shown.count(i) for i in range(4)]
    assert counts == sorted(counts)
    assert counts[3] > 80
    assert counts[0] > 0


def test_best_of_an_island_migrates_after_a_number_of_attempts() -> None:
    attempts = [attempt(i, (10 - i,), group=i % 2) for i in range(4)]  # islands: 0, 2 and 1, 3
    before = populations(attempts[:2], 2, migrate_every=2)
    assert [[a.id for a in island] for island in before] == [[0], [1]]
    after = populations(attempts, 2, migrate_every=2)
    assert [[a.id for a in island] for island in after] == [[0, 2, 1], [1, 3, 0]]


def test_hybrid_polishes_and_needs_a_polishable_problem() -> None:
    assert asked("hybrid", []).polish
    assert not asked("islands", []).polish
    with pytest.raises(ValueError, match="'toy' has no numeric method"):
        STRATEGIES["hybrid"](Problem("toy", "", PROBLEM.verify), [], Random(0))


@pytest.mark.parametrize(
    ("strategy", "options"), [("best_of_n", {"n": 0}), ("refine", {"turns": 0}), ("islands", {"explore": 1.5})]
)
def test_options_out_of_range_are_refused(strategy: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|from 0 to 1"):
        ask(strategy, [], **options)


# The archive


def test_ranking_is_lexicographic_unique_and_prefers_the_earlier() -> None:
    attempts = [
        attempt(0, (5, -0.5)), attempt(1, (5, -0.1)), attempt(2, (4, 0)), attempt(3), attempt(4, (5, -0.5)),
        attempt(5, (9,), response="```python\nprogram 0\n```"),
    ]  # fmt: skip
    assert [a.id for a in ranked(attempts)] == [1, 0, 4, 2]


def test_best_valid_may_be_polished_or_score_below_an_invalid() -> None:
    attempts = [attempt(0, (3,)), attempt(1, (7,), valid=False), attempt(2, (1,), polished=Verdict(True, (4,), "f"))]
    found = best_valid(attempts)
    assert found is not None
    assert (found[0].id, found[1].message) == (2, "f")
    assert best_valid([attempt(1, (7,), valid=False)]) is None


# Programs in answers


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("one\n```python\na\n```\ntwo\n```python\nb\n```\nend", "b\n"),
        ("```py\na\n```\n```text\nout\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```\na\n```\n```python\nb\n```\n```\nc\n```", "b\n"),
        ("```python\na\nb", "a\nb"),
        ("~~~python\na\n~~~", "a\n"),
        ("```Python title=x\na\n```", "a\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("<think>\n```python\nno\n```\n</think>\n```python\nyes\n```", "yes\n"),
        ("<think>\n```python\nno\n```", None),
        ("thought without a beginning </think> ```not a line", None),
        ("```bash\nrm\n```", None),
        ("```python\n\n```", None),
        ("points = []", None),
        ("", None),
    ],
)
def test_the_program_in_an_answer(response: str, program: str | None) -> None:
    assert extract_program(response) == program


def test_a_valid_verdict_has_a_score() -> None:
    with pytest.raises(ValueError, match="a valid verdict needs a score; the verifier gave none with 'fine'"):
        Verdict(True, (), "fine")


@pytest.mark.parametrize(
    "text", ["~" * 100_000, "`" * 100_000, " " * 100_000, "```python\n" * 10_000, "```\n~~~\n" * 10_000]
)
def test_no_answer_takes_long_to_read(text: str) -> None:
    began = time.process_time()
    extract_program(text)
    assert time.process_time() - began < 1
