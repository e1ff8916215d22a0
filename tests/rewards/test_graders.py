"""A table of nasty answers: grading moves results more than losses do."""

from __future__ import annotations

import os
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from trl_ext.registry import UnknownName
from trl_ext.rewards import ANSWER_FORMATS, GRADERS, REWARDS, math_reward_fn, question_only_reward_fn, r1_zero_reward_fn
from trl_ext.rewards.graders import forget_verdicts
from trl_ext.rewards.hooks import completion_text
from trl_ext.rewards.score import Score
from trl_ext.rewards.workers.pool import Pool, PoolError, WorkerLimits

COMPARE = ["compatible", "strict"]  # the graders and rewards that compare an answer with a reference answer

HUGE = 200_000  # characters, far more than any model writes


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so it is 4 </think> <answer> 4 </answer>", "4"),
        ("</think> <answer>4</answer>", "4"),
        ("</think> <answer>\n\t 4 \n</answer>\n", "4"),
        ("</think> <answer> 1 </answer> no: <answer> 2 </answer>", "2"),  # the last one counts
        ("<answer> 1 </answer> </think> <answer> 2 </answer>", "2"),
        ("</think> <answer> 4 </answer> The end.", "4"),
        ("</think> <answer> 4 </answer></answer>", "4"),
        ("</think> <answer> a < b </answer>", "a < b"),
        ("</think> <answer></answer>", ""),
        ("</think> <answer> 4 </answer> <answer></answer>", ""),  # the last one is empty
        ("</think> <answer> 4 </answer> <answer>", None),  # the last one is not closed
        ("</think> <answer> 4 </answer> <answer> 5", None),
        ("</answer> </think> <answer> 42", None),
        ("<answer> 1 </answer> </think> <answer> 42", None),
        ("", None),
        ("4", None),
        ("<answer> 4 </answer>", None),  # the thought was never closed
        ("<answer> 4 </answer> </think>", None),  # nor is the order free
        ("</think><answer> 4 </answer>", None),  # one space, as the prompt shows
        ("</think>  <answer> 4 </answer>", None),
        ("</think>\n<answer> 4 </answer>", None),
        ("</think> <answer> 4", None),
        ("</think> <answer> 4 <answer>", None),
        ("</THINK> <ANSWER> 4 </ANSWER>", None),
        (r"</think> \boxed{4}", None),
    ],
)
def test_r1_zero_takes_the_last_answer_after_a_closed_thought(response: str, answer: str | None) -> None:
    assert ANSWER_FORMATS["r1_zero"](response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{4}", "4"),
        (r"so \boxed{ 4 }.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, \{2\}\right\}}", r"\left\{1, \{2\}\right\}"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),  # cut off: the last complete one
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{4}}", "4"),
        (r"\boxed{4", None),
        (r"\boxed 4", None),
        (r"\fbox{4}", None),
        (r"boxed{4}", None),
        ("", None),
    ],
)
def test_boxed_takes_the_last_complete_box(response: str, answer: str | None) -> None:
    assert ANSWER_FORMATS["boxed"](response) == answer


@pytest.mark.parametrize("name", sorted(ANSWER_FORMATS))
@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 4000, r"\boxed{" * 4000 + "}", "{" * HUGE, r"\boxed{" + "{" * HUGE, "<answer>" * (HUGE // 8),
        "</think> <answer>" * (HUGE // 17), "</answer>" * (HUGE // 9), "\x00" * HUGE, "4" * HUGE,
    ],
    ids=lambda text: text[:20].strip("\x00"),
)  # fmt: skip
def test_extraction_from_a_huge_response_is_fast_and_safe(text: str, name: str) -> None:
    began = time.perf_counter()
    ANSWER_FORMATS[name](text)
    # linear in the length: well below 0.1 s; where every box is searched to the end of the text, many seconds
    assert time.perf_counter() - began < 1


# Graders and hooks.

R1 = "it is {} </think> <answer> {} </answer>"
BOX = r"it is {} so \boxed{{{}}}"
WRITTEN = {"r1_zero": R1, "boxed": BOX}
GRADER_AND_FORMAT = [(grader, answer_format) for grader in COMPARE for answer_format in sorted(ANSWER_FORMATS)]


@pytest.mark.parametrize(("grader", "answer_format"), GRADER_AND_FORMAT)
def test_answer_reward_needs_format_and_total_reward_needs_both(grader: str, answer_format: str) -> None:
    text = WRITTEN[answer_format]
    responses = [text.format(4, 4), text.format(4, 5), text.format("", ""), "4"]
    grades = GRADERS[grader](responses, ["4"] * 4, answer_format=answer_format)
    assert [grade.rewards() for grade in grades] == [
        {"format_reward": 1, "answer_reward": 1, "reward": 1},
        {"format_reward": 1, "answer_reward": 0, "reward": 0},
        {"format_reward": 1, "answer_reward": 0, "reward": 0},
        {"format_reward": 0, "answer_reward": 0, "reward": 0},
    ]
    assert [grade.reason for grade in grades[:2]] == ["same text", "different value"]
    assert (grades[3].answer, grades[3].reason) == (None, "no answer")


@pytest.mark.moderate
def test_the_three_functions_return_the_handouts_dict_of_floats() -> None:
    correct = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}
    for rewards in (
        math_reward_fn(R1.format(4, "2/4"), "0.5"),
        math_reward_fn(BOX.format(4, "2/4"), "0.5", answer_format="boxed"),
        r1_zero_reward_fn(R1.format(4, "1/2"), r"\frac12"),
        question_only_reward_fn(BOX.format(4, "1/2"), r"\frac12"),
    ):
        assert rewards == correct
        assert all(type(value) is float for value in rewards.values())
    assert math_reward_fn(R1.format(4, "7 kg"), r"7\text{ km}")["reward"] == 0
    assert r1_zero_reward_fn(R1.format(4, "7 kg"), r"7\text{ km}")["reward"] == 1  # the course's verdict
    assert r1_zero_reward_fn(R1.format(4, "2/4"), r"\frac12")["reward"] == 0
    assert r1_zero_reward_fn(R1.format(4, "2/4"), r"\frac12", fast=False)["reward"] == 1  # math-verify's


@pytest.mark.parametrize("grader", COMPARE)
@pytest.mark.parametrize(
    ("reference", "correct"),
    [(4, True), (4.0, True), ("4", True), (["5", "4"], True), ([5, 6], False), ([], False), (Fraction(8, 2), True)],
)
def test_a_reference_is_a_text_a_number_or_a_list_of_them(grader: str, reference: Any, correct: bool) -> None:
    assert GRADERS[grader]([R1.format(4, 4)], [reference])[0].correct is correct


def test_empty_answer_is_never_correct_for_the_strict_grader() -> None:
    assert [GRADERS[name]([R1.format(4, "")], [""])[0].correct for name in ("strict", "compatible")] == [False, True]


@pytest.mark.parametrize(
    ("answer", "reference", "correct"),
    [("007", "7", True), ("-0", "0", True), ("12345678901234567891", "12345678901234567890", False)],
)
def test_integers_are_compared_as_numbers(answer: str, reference: str, correct: bool) -> None:
    assert GRADERS["strict"]([R1.format(4, answer)], [reference])[0].correct is correct


def test_a_long_integer_is_left_to_the_rule() -> None:
    """The course's grader rounds to a double."""
    assert GRADERS["compatible"]([R1.format(4, "12345678901234567891")], ["12345678901234567890"])[0].correct


def test_the_two_rewards_are_those_of_the_two_graders() -> None:
    responses, references = [R1.format(4, "2/4"), R1.format(4, "c+b")], [r"\frac{1}{2}", "a+b"]
    assert REWARDS["strict"](responses, references) == [1.0, 0.0]
    assert REWARDS["compatible"](responses, references) == [0.0, 1.0]


def test_a_reward_pays_for_the_format_too() -> None:
    responses = [R1.format(4, "4"), R1.format(4, "5"), "4"]
    assert REWARDS["strict_and_format"](responses, ["4"] * 3) == [2.0, 1.0, 0.0]
    assert REWARDS.options("strict_and_format") == REWARDS.options("strict")


@pytest.mark.parametrize("grader", COMPARE)
@pytest.mark.parametrize("reference", [None, {"value": 4}, b"4", ["4", None]])
def test_reference_of_wrong_type_is_refused_even_without_answer(grader: str, reference: Any) -> None:
    for response in (R1.format(4, 4), "nothing"):
        with pytest.raises(TypeError, match="reference answer"):
            GRADERS[grader]([response], [reference])


@pytest.mark.parametrize("grader", COMPARE)
def test_an_unknown_format_is_answered_with_the_choices(grader: str) -> None:
    with pytest.raises(
        UnknownName, match=r"unknown answer format 'box'\. Did you mean 'boxed'\? Known: boxed, r1_zero"
    ):
        GRADERS[grader](["4"], ["4"], answer_format="box")


def test_pair_is_compared_once_and_trivial_ones_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_verdicts()
    sent: list[Any] = []

    class Counting(Pool):
        def map(self, jobs: Any) -> Any:
            sent.extend(jobs)
            return super().map(jobs)

    with Counting("trl_ext.rewards.workers.comparison:compare") as pool:
        monkeypatch.setattr("trl_ext.rewards.graders.shared_pool", lambda _: pool)
        responses = [R1.format(1, a) for a in ("7", "1/2", "1/2", "8", "x", "2/4")]
        for _ in range(2):
            grades = GRADERS["strict"](responses, ["7", "0.5", "0.5", "7", "x", "0.5"])
            assert [grade.correct for grade in grades] == [True, True, True, False, True, True]
    assert [job[2:] for job in sent] == [("1/2", "0.5"), ("2/4", "0.5")]


@pytest.mark.moderate
def test_hanging_comparison_fails_only_its_answer_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_verdicts()
    metrics: dict[str, float] = {}
    extra: dict[str, list[Any]] = {}
    answers = [f"{n}/7" for n in range(1, 10)]
    answers[4] = "hang"
    with Pool("tests.support.hostile:compare", WorkerLimits(seconds=0.5)) as pool:
        monkeypatch.setattr("trl_ext.rewards.graders.shared_pool", lambda _: pool)
        rewards = REWARDS["strict"](
            [R1.format(1, a) for a in answers],
            [f" {n}/7" for n in range(1, 10)],
            log_metric=metrics.__setitem__,
            log_extra=extra.__setitem__,
        )
    assert rewards == [1.0] * 4 + [0.0] + [1.0] * 4
    assert metrics["grader/timeouts"] == metrics["grader/failures"] == 1
    assert extra["reason"][4] == "timeout"


@pytest.mark.slow
def test_a_grader_that_fails_on_everything_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_verdicts()
    with Pool("tests.support.hostile:compare", WorkerLimits(seconds=0.2)) as pool:
        monkeypatch.setattr("trl_ext.rewards.graders.shared_pool", lambda _: pool)
        with pytest.raises(PoolError):
            REWARDS["strict"]([R1.format(1, f"hang{n}") for n in range(10)], ["1"] * 10)
    forget_verdicts()


@pytest.mark.parametrize("name", COMPARE)
@pytest.mark.parametrize("answer_format", sorted(ANSWER_FORMATS))
def test_reward_has_trl_signature_and_one_float_per_completion(name: str, answer_format: str) -> None:
    text = WRITTEN[answer_format]
    completions = [text.format(1, 1), text.format(2, 2), "2", ""]
    columns = {"prompts": ["p"] * 4, "completion_ids": [[1]] * 4, "level": [1] * 4, "trainer_state": None}
    reward = REWARDS.build(name, answer_format=answer_format)
    rewards = reward(completions=completions, answer=["1", "3", "2", ""], **columns)
    assert rewards == [1.0, 0.0, 0.0, 0.0]
    assert all(type(reward) is Score for reward in rewards), "floats that say whether the response is correct"
    assert [reward.correct for reward in rewards] == [True, False, False, False]
    assert reward.__name__ == name  # which TRL logs


@pytest.mark.parametrize("name", COMPARE)
def test_conversational_completion_is_graded_by_its_last_message(name: str) -> None:
    chats = [[{"role": "assistant", "content": "4"}, {"role": "assistant", "content": R1.format(4, 4)}]]
    assert REWARDS[name](chats, ["4"]) == [1.0]
    assert completion_text(chats[0]) == R1.format(4, 4)


@pytest.mark.parametrize("name", COMPARE)
def test_as_many_answers_as_completions_are_needed(name: str) -> None:
    for completions, answers in ((["4", "5"], ["4"]), (["4"], ["4", "5"])):
        with pytest.raises(ValueError, match="argument 2 is"):
            REWARDS[name](completions, answers)


@pytest.mark.parametrize("name", COMPARE)
def test_reward_logs_extraction_reason_and_handout_components(name: str) -> None:
    extra: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    completions = [R1.format(1, 1), R1.format(2, 2), "3", "4"]
    REWARDS[name](completions, list("1111"), log_extra=extra.__setitem__, log_metric=metrics.__setitem__)
    assert [(text or "").strip() for text in extra["extracted"]] == ["1", "2", "", ""]
    assert extra["correct"] == [True, False, False, False]
    assert extra["reason"][2:] == ["no answer", "no answer"]
    assert extra["format_reward"] == [1.0, 1.0, 0.0, 0.0]
    assert metrics == {
        "rewards/format_reward": 0.5, "rewards/answer_reward": 0.25, "grader/timeouts": 0, "grader/failures": 0,
    }  # fmt: skip


@pytest.mark.parametrize("reference", [float("nan"), [5, float("nan")]])
def test_a_reference_that_is_nan_is_refused(reference: Any) -> None:
    with pytest.raises(ValueError, match="a reference answer is NaN"):
        math_reward_fn("</think> <answer>nan</answer>", reference)


def test_the_text_nan_of_a_table_earns_no_reward() -> None:
    assert math_reward_fn("</think> <answer>nan</answer>", "nan")["reward"] == 0
    assert math_reward_fn("</think> <answer> NaN </answer>", "nan")["reward"] == 0


@pytest.mark.moderate
def test_the_courses_grader_is_plugged_in_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of one response that returns the reward dict runs in a worker; one of all responses stays as it is."""
    file = tmp_path / "theirs.py"
    file.write_text(
        "import os\n"
        "from trl_ext.rewards import Grade\n"
        "def r1_zero_reward_fn(response, ground_truth, fast=True):\n"
        "    while response == 'endless':\n"
        "        pass\n"
        f"    good, elsewhere = response == ground_truth, os.getpid() != {os.getpid()}\n"
        "    return {'format_reward': float(elsewhere), 'answer_reward': float(good), 'reward': float(good)}\n"
        "def mine(responses, truths):\n"
        "    return [Grade(True, r, True, '') for r in responses]\n"
    )
    monkeypatch.setattr("trl_ext.rewards.graders.ONE_RESPONSE", WorkerLimits(seconds=1, workers=1))
    monkeypatch.chdir(tmp_path)
    grades = GRADERS.build("theirs.py:r1_zero_reward_fn")(["4", "5", "endless"], ["4", "4", "4"])
    assert [grade.rewards() for grade in grades] == [
        {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0},
        {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0},
        {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0},
    ]
    assert [grade.failure for grade in grades] == [None, None, "timeout"]
    grader = GRADERS.build("theirs.py:r1_zero_reward_fn")
    told = grader(["</think> <answer> 4 </answer>", r"so \boxed{5}", "4"], ["4"] * 3)  # for majorities
    assert [grade.answer for grade in told] == [" 4 ", "5", None]
    assert GRADERS.build(f"{file}:mine")(["4"], ["5"])[0].correct
    reward = REWARDS.build("theirs.py:r1_zero_reward_fn")
    assert reward(prompts=["2 + 2 ="] * 2, completions=["4", "5"], answer=["4", "4"], trainer_state=None) == [1.0, 0.0]
