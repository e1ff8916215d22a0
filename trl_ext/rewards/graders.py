"""Two graders, one pipeline: extract the answer, then compare it with the reference answer in a worker process.

`strict` is mathematically correct wherever it can be and is meant for training; `compatible` returns the verdicts of
the course's grader and is meant for numbers that others can compare with. Any function with their signature can take
their place.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from trl_ext.registry import Registry, unknown
from trl_ext.rewards.extract import ANSWER_FORMATS, COMPATIBLE_FORMATS, Extraction
from trl_ext.rewards.ground_truth import accepted_answers
from trl_ext.rewards.restated import asks_for_factors, asks_for_percentage, asks_for_terms, occurs_in
from trl_ext.rewards.strict import NOT_EXPANDED, NOT_FACTORED, PERCENTAGE
from trl_ext.rewards.workers.pool import Failure, Pool, WorkerLimits


def takes_one_response(function: Callable[..., Any]) -> bool:
    """Whether a function is `(response, reference) -> reward dict`, as the course hands out.

    Its first parameter is in the singular, and it has no `**columns`, which TRL passes to every reward.
    """
    parameters = list(inspect.signature(function).parameters.values())
    has_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return bool(parameters) and not has_columns and not parameters[0].name.endswith("s")


def each_response(function: Callable[..., Any], path: str) -> Callable[..., Any]:
    """A grader from a function of one response at an import path; one of all responses, as ours are, is left as it is.

    It runs in workers, since it reads what a model wrote: a call that hangs or dies costs that response only.
    """
    if not takes_one_response(function):
        return function

    where, _, name = path.rpartition(":")
    pool = _pool_of(f"{Path(where).resolve() if where.endswith('.py') else where}:{name}")

    @wraps(function)
    def grader(responses: Sequence[str], references: Sequence[object]) -> list[Grade]:
        outcomes = pool.map(list(zip(responses, references, strict=True)))
        return [
            Grade(False, None, False, reward.kind, reward.kind)
            if isinstance(reward, Failure)
            else Grade(bool(reward["format_reward"]), read_answer(response), bool(reward["answer_reward"]), "")
            for response, reward in zip(responses, outcomes, strict=True)
        ]

    return grader


def read_answer(response: str) -> str | None:
    """The answer as we extract it, for logs and majorities, where a grader does not say."""
    return COMPATIBLE_FORMATS["r1_zero" if "<answer>" in response else "boxed"](response).answer


@cache
def _pool_of(path: str) -> Pool:
    return Pool(path, ONE_RESPONSE)


GRADERS = Registry("grader", inputs=("problems", "tolerances", "log_metric"), adapt=each_response)
ONE_RESPONSE = WorkerLimits(seconds=10)  # for a function of one response, which may be slower than ours
CACHED_PAIRS = 100_000  # per comparison

# Two integers of at most 15 digits, which are exact as doubles too, are compared in this process.
_SMALL_INTEGER = re.compile(r"-?[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """How an answer is compared with a reference answer, in a worker.

    Attributes:
        function: `module:name` of a function `(answer, reference, **options) -> (correct, reason)`.
        same_text_is_equal: the same text is always correct; otherwise not if it is empty or NaN.
        tolerance: relative error that a number may have.
        math_verify: whether math-verify is asked too.
        worked_out: whether an answer has to be worked out as far as the reference answer is.
    """

    function: str
    same_text_is_equal: bool = False
    tolerance: float = 0.0
    math_verify: bool = False
    worked_out: bool = True

    def options(self) -> dict[str, object]:
        """Keyword arguments of the function, without those at their defaults."""
        given: dict[str, object] = {"tolerance": self.tolerance, "math_verify": self.math_verify}
        given = {name: value for name, value in given.items() if value}
        return given if self.worked_out else {**given, "worked_out": False}


STRICT = Comparison("trl_ext.rewards.strict:compare")
SAME_FORM = Comparison("trl_ext.rewards.strict:has_same_form")
COMPATIBLE = Comparison("trl_ext.rewards.compatible:compare", same_text_is_equal=True)

SAME_TEXT = "same text"

Pair = tuple[str, str]  # answer, reference answer
_verdicts: dict[Comparison, dict[Pair, tuple[bool, str]]] = {}


@dataclass(frozen=True, slots=True)
class Grade:
    """One graded response."""

    well_formed: bool
    answer: str | None  # as extracted; None if there was nothing to extract
    correct: bool
    reason: str
    failure: str | None = None  # `timeout`, `memory`, `crash`, ...: no verdict was reached; counts as incorrect
    score: float | None = None  # the reward where it is more than correct or not; NaN for none
    columns: Mapping[str, object] = field(default_factory=dict)  # what else is known of it, for logs

    def rewards(self) -> dict[str, float]:
        """The handout's dict: `format_reward`, `answer_reward` and `reward`, each 0 or 1 unless there is a score."""
        correct = float(self.correct)
        reward = correct if self.score is None else self.score
        return {"format_reward": float(self.well_formed), "answer_reward": correct, "reward": reward}


@GRADERS.register
def strict(
    responses: Sequence[str],
    references: Sequence[object],
    *,
    answer_format: str = "r1_zero",
    numeric_tolerance: float = 0.0,
    worked_out: bool = True,
    problems: Sequence[str] | None = None,
    tolerances: Sequence[float] | None = None,
) -> list[Grade]:
    """Equal in value, in any usual spelling; nothing for hedging, other units, other variables, restated problems.

    Args:
        references: per response a text, a number or a list of accepted answers.
        answer_format: a name in `ANSWER_FORMATS`.
        numeric_tolerance: relative error that a number may have, as 0.333 has for 1/3; 0 for none.
        worked_out: the answer has to be worked out as far as the reference answer is: 42, and not 17+25.
        problems: the problem or the whole prompt of each response, if known. An answer in another form than the
            reference answer's must not stand in it, and is to be factored or multiplied out only if it says so.
        tolerances: the relative error of each response's number, where it is larger than `numeric_tolerance`.

    Raises:
        UnknownName: no such answer format.
        TypeError: a reference answer has another type, or a response is not a text.
        PoolError: the workers cannot start, or fail on everything.
    """
    extract = ANSWER_FORMATS.get_function(answer_format)
    answers = [extract(response) for response in texts_of(responses)]
    extractions = [Extraction(answer is not None, answer) for answer in answers]
    graded = list(zip(extractions, references, strict=True))
    grades: list[Grade] = []
    for tolerance, part in groupby(zip(tolerances or [0.0] * len(graded), graded, strict=True), key=itemgetter(0)):
        comparison = replace(STRICT, tolerance=max(tolerance, numeric_tolerance), worked_out=worked_out)
        grades += _grade(comparison, *zip(*(pair for _, pair in part), strict=True))
    return grades if problems is None or not worked_out else _in_view_of(problems, grades, references)


@GRADERS.register
def compatible(
    responses: Sequence[str], references: Sequence[object], *, answer_format: str = "r1_zero", math_verify: bool = False
) -> list[Grade]:
    """The course grader's verdicts, its known mistakes included; `math_verify` adds its third stage, math-verify.

    Raises:
        UnknownName: no such answer format.
        ImportError: `math_verify` where it is not installed.
        TypeError: a reference answer is not a text, a number or a list of them, or a response is not a text.
        PoolError: the workers cannot start, or fail on everything.
    """
    if answer_format not in COMPATIBLE_FORMATS:
        raise unknown("answer format", answer_format, COMPATIBLE_FORMATS)
    if math_verify and importlib.util.find_spec("math_verify") is None:
        raise ImportError("math_verify=True needs math-verify: pip install 'trl_ext[math]'")
    extract = COMPATIBLE_FORMATS[answer_format]
    comparison = replace(COMPATIBLE, math_verify=math_verify)
    return _grade(comparison, [extract(response) for response in texts_of(responses)], references)


def _in_view_of(problems: Sequence[str], grades: Sequence[Grade], references: Sequence[object]) -> list[Grade]:
    """The grades, once more for answers in another form than the reference answer's, with the problem at hand."""
    graded = list(zip(problems, grades, references, strict=True))
    copied = [
        bool(grade.answer) and grade.reason != SAME_TEXT and occurs_in(str(grade.answer), problem)
        for problem, grade, _ in graded
    ]
    pairs = {
        (str(grade.answer), reference): None
        for (_, grade, accepted), is_copied in zip(graded, copied, strict=True)
        if is_copied and grade.correct
        for reference in accepted_answers(accepted)
    }
    outcomes = compare_pairs(SAME_FORM, list(pairs)).items()
    forms = {pair for pair, outcome in outcomes if not isinstance(outcome, Failure) and outcome[0]}
    return [
        _once_more(grade, problem, is_copied, any((str(grade.answer), text) in forms for text in accepted_answers(ref)))
        for (problem, grade, ref), is_copied in zip(graded, copied, strict=True)
    ]


def _once_more(grade: Grade, problem: str, is_copied: bool, in_same_form: bool) -> Grade:
    if grade.correct and is_copied and not in_same_form:
        return replace(grade, correct=False, reason="restates the problem")
    asks = {NOT_FACTORED: asks_for_factors, NOT_EXPANDED: asks_for_terms}.get(grade.reason)
    is_asked_for = grade.reason == PERCENTAGE and asks_for_percentage(problem)
    if is_asked_for or (asks and not is_copied and not asks(problem)):
        return replace(grade, correct=True, reason="same value")
    return grade


def math_reward_fn(response: str, ground_truth: object, answer_format: str = "r1_zero") -> dict[str, float]:
    """The strict grader's rewards of one response; see `strict`."""
    return strict([response], [ground_truth], answer_format=answer_format)[0].rewards()


def r1_zero_reward_fn(response: str, ground_truth: object, fast: bool = True) -> dict[str, float]:
    """The course's reward for the r1_zero prompt; see `compatible`."""
    return compatible([response], [ground_truth], math_verify=not fast)[0].rewards()


def question_only_reward_fn(response: str, ground_truth: object, fast: bool = True) -> dict[str, float]:
    r"""The course's reward for the question_only prompt, whose answer is in a `\boxed{}`; see `compatible`."""
    return compatible([response], [ground_truth], answer_format="boxed", math_verify=not fast)[0].rewards()


def texts_of(responses: Sequence[str]) -> Sequence[str]:
    """The responses themselves.

    Raises:
        TypeError: one of them is not a text; the message names it.
    """
    for place, response in enumerate(responses):
        if not isinstance(response, str):
            raise TypeError(f"response {place} is {str(response)[:80]}, not a text")
    return responses


def _grade(comparison: Comparison, extractions: Sequence[Extraction], references: Sequence[object]) -> list[Grade]:
    accepted = [accepted_answers(reference) for _, reference in zip(extractions, references, strict=True)]
    graded = list(zip(extractions, accepted, strict=True))
    pairs = {(e.answer, reference): None for e, group in graded if e.answer is not None for reference in group}
    compared = compare_pairs(comparison, list(pairs))
    return [
        Grade(e.well_formed, None, False, "no answer")
        if e.answer is None
        else _grade_of(e.answer, [compared[e.answer, reference] for reference in group])
        for e, group in graded
    ]


def _grade_of(answer: str, outcomes: Sequence[tuple[bool, str] | Failure]) -> Grade:
    """Correct if the answer equals one of the accepted answers; else a failed comparison is reported."""
    verdicts = [outcome for outcome in outcomes if not isinstance(outcome, Failure)]
    equal = next((reason for correct, reason in verdicts if correct), None)
    if equal is not None:
        return Grade(True, answer, True, equal)
    failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    if failure is not None:
        return Grade(True, answer, False, failure.kind, failure.kind)
    return Grade(True, answer, False, verdicts[0][1] if verdicts else "no reference answer to compare with")


def compare_pairs(comparison: Comparison, pairs: Sequence[Pair]) -> dict[Pair, tuple[bool, str] | Failure]:
    """Verdict and reason for each pair: from the cache, in this process if it is trivial, else from the workers."""
    compared: dict[Pair, tuple[bool, str] | Failure] = {}
    hard, verdicts = [], _verdicts.setdefault(comparison, {})
    for pair in pairs:
        known = _trivial(comparison, *pair) or verdicts.get(pair)
        if known is None:
            hard.append(pair)
        else:
            compared[pair] = known
    jobs = [(comparison.function, comparison.options(), *pair) for pair in hard]
    for pair, outcome in zip(hard, shared_pool(comparison.math_verify).map(jobs) if jobs else (), strict=True):
        if isinstance(outcome, Failure):
            compared[pair] = outcome  # not cached: the machine may be the cause
            continue
        if len(verdicts) >= CACHED_PAIRS:
            verdicts.clear()
        compared[pair] = verdicts[pair] = (bool(outcome[0]), str(outcome[1]))
    return compared


def equality_of(grader: str) -> Callable[[Sequence[Pair]], list[bool]] | None:
    """Whether pairs of answers mean the same by a grader's comparison; None of one that compares in its own way."""
    comparison = {"strict": replace(STRICT, worked_out=False), "compatible": COMPATIBLE}.get(grader)
    if comparison is None:
        return None

    def equal(pairs: Sequence[Pair]) -> list[bool]:
        outcomes = compare_pairs(comparison, list(dict.fromkeys(pairs)))
        verdicts = [outcomes[pair] for pair in pairs]
        return [not isinstance(verdict, Failure) and verdict[0] for verdict in verdicts]

    return equal


def forget_verdicts() -> None:
    """Empty the cache of verdicts."""
    _verdicts.clear()


def _trivial(comparison: Comparison, answer: str, reference: str) -> tuple[bool, str] | None:
    answer, reference = answer.strip(), reference.strip()  # as every comparison does
    if answer == reference and (answer.lower() not in ("", "nan") or comparison.same_text_is_equal):
        return True, SAME_TEXT
    if not comparison.tolerance and _SMALL_INTEGER.fullmatch(answer) and _SMALL_INTEGER.fullmatch(reference):
        return (True, "same value") if int(answer) == int(reference) else (False, "different value")
    return None


@cache
def shared_pool(math_verify: bool) -> Pool:
    """The process's workers, started at the first comparison that needs them; others for math-verify."""
    module = "with_math_verify" if math_verify else "comparison"
    return Pool(f"trl_ext.rewards.workers.{module}:compare")
