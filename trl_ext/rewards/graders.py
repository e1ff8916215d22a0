"""Two graders, one pipeline: extract the answer, then compare it with the truth in a worker that can be killed.

`strict` is right where it can be and is meant for training; `compatible` has the verdicts of the course's grader and is
meant for numbers that others can compare with. A grader of your own is a function with their signature.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from trl_ext.registry import Registry, unknown
from trl_ext.rewards.compatible.extract import extract_question_only, extract_r1_zero
from trl_ext.rewards.extract import ANSWER_FORMATS, Extraction
from trl_ext.rewards.ground_truth import truths_of
from trl_ext.rewards.workers.pool import Failure, Pool

GRADERS = Registry("grader")
CACHED_PAIRS = 100_000

# Two integers of at most 15 digits (exact as doubles too) are compared on the spot, under any rule.
_SMALL_INTEGER = re.compile(r"-?[0-9]{1,15}")
_COMPATIBLE_FORMATS = {"r1_zero": extract_r1_zero, "boxed": extract_question_only}
_verdicts: dict[tuple[str, str, str], tuple[bool, str]] = {}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One graded response."""

    in_format: bool
    answer: str | None  # as extracted; None where there was nothing to extract
    right: bool
    reason: str
    failure: str | None = None  # `timeout`, `memory`, `crash` or `error`: no verdict came back, scored as wrong

    def rewards(self) -> dict[str, float]:
        """The handout's dict: `format_reward`, `answer_reward` and `reward`, each 0 or 1; the reward needs both."""
        right = float(self.right)
        return {"format_reward": float(self.in_format), "answer_reward": right, "reward": right}


@GRADERS.register
def strict(
    responses: Sequence[str],
    truths: Sequence[Any],
    *,
    answer_format: str = "r1_zero",
    numeric_tolerance: float = 0.0,
) -> list[Verdict]:
    """Equal in value, in any usual spelling; nothing for hedging, other units, other variables.

    Args:
        truths: a text, a number or a list of accepted answers per response.
        answer_format: a name in `ANSWER_FORMATS`.
        numeric_tolerance: relative error that a number may have, as 0.333 has for 1/3; 0 for none.

    Raises:
        UnknownName: no such answer format.
        TypeError: a truth is of another type, or a response is no text.
        PoolError: the workers cannot start, or fail on everything.
    """
    extract = ANSWER_FORMATS.get_function(answer_format)
    rule = f"strict:{numeric_tolerance}" if numeric_tolerance else "strict"
    return _grade(rule, [Extraction.of(extract(response)) for response in texts_of(responses)], truths)


@GRADERS.register
def compatible(
    responses: Sequence[str], truths: Sequence[Any], *, answer_format: str = "r1_zero", fast: bool = True
) -> list[Verdict]:
    """The course grader's verdicts, its known mistakes included; `fast=False` adds its third stage, math-verify.

    Raises:
        UnknownName: no such answer format.
        ImportError: `fast=False` without math-verify.
        TypeError: a truth is neither text, number nor a list of them, or a response is no text.
        PoolError: the workers cannot start, or fail on everything.
    """
    if answer_format not in _COMPATIBLE_FORMATS:
        raise unknown("answer format", answer_format, _COMPATIBLE_FORMATS)
    if not fast and importlib.util.find_spec("math_verify") is None:
        raise ImportError("fast=False needs math-verify: pip install 'trl_ext[math]'")
    extract = _COMPATIBLE_FORMATS[answer_format]
    return _grade("compatible" if fast else "lenient", [extract(response) for response in texts_of(responses)], truths)


def math_reward_fn(response: str, ground_truth: Any, answer_format: str = "r1_zero") -> dict[str, float]:
    """The strict grader's rewards of one response; see `strict`."""
    return strict([response], [ground_truth], answer_format=answer_format)[0].rewards()


def r1_zero_reward_fn(response: str, ground_truth: Any, fast: bool = True) -> dict[str, float]:
    """The course's reward for the r1_zero prompt; see `compatible`."""
    return compatible([response], [ground_truth], fast=fast)[0].rewards()


def question_only_reward_fn(response: str, ground_truth: Any, fast: bool = True) -> dict[str, float]:
    r"""The course's reward for the question_only prompt, whose answer is in a `\boxed{}`; see `compatible`."""
    return compatible([response], [ground_truth], answer_format="boxed", fast=fast)[0].rewards()


def texts_of(responses: Sequence[str]) -> Sequence[str]:
    """The responses themselves.

    Raises:
        TypeError: one of them is no text; the message names it.
    """
    for place, response in enumerate(responses):
        if not isinstance(response, str):
            raise TypeError(f"response {place} is {str(response)[:80]}, not a text")
    return responses


def _grade(rule: str, extractions: Sequence[Extraction], truths: Sequence[Any]) -> list[Verdict]:
    accepted = [truths_of(truth) for _, truth in zip(extractions, truths, strict=True)]
    pairs = {
        (e.answer, truth): None
        for e, group in zip(extractions, accepted, strict=True)
        if e.answer is not None
        for truth in group
    }
    compared = compare_pairs(rule, list(pairs))
    return [_verdict(e, group, compared) for e, group in zip(extractions, accepted, strict=True)]


def _verdict(
    extraction: Extraction,
    truths: Sequence[str],
    compared: Mapping[tuple[str, str], tuple[bool, str] | Failure],
) -> Verdict:
    answer = extraction.answer
    if answer is None:
        return Verdict(extraction.in_format, None, False, "no answer")
    outcomes = [compared[answer, truth] for truth in truths]
    failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    verdicts = [outcome for outcome in outcomes if not isinstance(outcome, Failure)]
    right = next((reason for equal, reason in verdicts if equal), None)
    if right is not None:
        return Verdict(True, answer, True, right)
    if failure is not None:
        return Verdict(True, answer, False, failure.kind, failure.kind)
    return Verdict(True, answer, False, verdicts[0][1] if verdicts else "no truth to compare with")


def compare_pairs(rule: str, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[bool, str] | Failure]:
    """Verdict and reason for each (answer, truth): from the cache, here if trivial, else from the workers."""
    compared: dict[tuple[str, str], tuple[bool, str] | Failure] = {}
    hard = []
    for pair in pairs:
        known = _trivial(rule, *pair) or _verdicts.get((rule, *pair))
        if known is None:
            hard.append(pair)
        else:
            compared[pair] = known
    for pair, outcome in zip(hard, shared_pool().map([(rule, *pair) for pair in hard]) if hard else (), strict=True):
        if isinstance(outcome, Failure):
            compared[pair] = outcome  # not kept: it may have been the machine's fault
            continue
        if len(_verdicts) >= CACHED_PAIRS:
            _verdicts.clear()
        compared[pair] = _verdicts[rule, *pair] = (bool(outcome[0]), str(outcome[1]))
    return compared


def forget_verdicts() -> None:
    """Empty the cache of verdicts."""
    _verdicts.clear()


def _trivial(rule: str, answer: str, truth: str) -> tuple[bool, str] | None:
    answer, truth = answer.strip(), truth.strip()  # every rule does
    if answer == truth and (answer.lower() not in ("", "nan") or not rule.startswith("strict")):
        return True, "same text"
    if ":" not in rule and _SMALL_INTEGER.fullmatch(answer) and _SMALL_INTEGER.fullmatch(truth):
        return (True, "same value") if int(answer) == int(truth) else (False, "different value")
    return None


@cache
def shared_pool() -> Pool:
    """The process's workers, started at the first comparison that needs them."""
    return Pool("trl_ext.rewards.rules:compare")
