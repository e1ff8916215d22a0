"""Candidate and reference answer -> equal or not: equal if one of three stages says so."""

from __future__ import annotations

import re

from trl_ext.rewards.compatible.mathd import mathd_normal_form
from trl_ext.rewards.compatible.plain_text import is_integer_text, plain_text_normal_form, strip_thousands_commas
from trl_ext.rewards.compatible.symbolic import symbolically_equal
from trl_ext.rewards.extract import boxed_content

MAX_LENGTH = 4_000  # characters; beyond it only the same text is equal
_BRACKETS = frozenset("()[]")
_PLAIN_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")


def compare(answer: str, reference: str, math_verify: bool = False) -> tuple[bool, str]:
    r"""Whether the course's grader would accept `answer` for `reference`, and why.

    Args:
        reference: if it has a `\boxed{}`, the content of that.
        math_verify: with the third stage, math-verify.
    """
    correct = _is_equal(answer, reference, math_verify)
    return correct, "equal" if correct else "not equal"


def _is_equal(candidate: str, reference: str, math_verify: bool) -> bool:
    if "\\boxed" in reference:
        content = boxed_content(reference)
        if content is None:
            return False
        reference = content
    if candidate == reference:
        return True
    if max(len(candidate), len(reference)) > MAX_LENGTH:
        return False
    if mathd_normal_form(candidate) == mathd_normal_form(reference):
        return True
    c, t = plain_text_normal_form(candidate), plain_text_normal_form(reference)
    return t == c or _elements_equal(t, c) or (math_verify and verified(candidate, reference))


def _elements_equal(reference: str, candidate: str) -> bool:
    """Element by element; the brackets count where there are several elements."""
    if not candidate:
        return False
    references, candidates = _elements(reference), _elements(candidate)
    if len(references) != len(candidates):
        return False
    if len(references) > 1 and (reference[0], reference[-1]) != (candidate[0], candidate[-1]):
        return False
    return all(_element_equal(t, c) for t, c in zip(references, candidates, strict=True))


def _elements(text: str) -> list[str]:
    text = strip_thousands_commas(text)
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS and not _BRACKETS & set(text[1:-1]):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text] if text else []


def _element_equal(reference: str, candidate: str) -> bool:
    if _PLAIN_FRACTION.fullmatch(reference) and _PLAIN_FRACTION.fullmatch(candidate):
        return reference == candidate  # an unreduced fraction is incorrect
    if is_integer_text(reference) != is_integer_text(candidate):
        return False  # nothing is evaluated against an integer
    return symbolically_equal(reference, candidate)


def verified(candidate: str, reference: str) -> bool:
    """Stage C: math-verify's verdict. It has no time limit here: it runs in a worker, which has one."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    try:
        gold, answer = (
            parse(
                text if "$" in text else f"${text}$",
                extraction_config=targets,
                fallback_mode="no_fallback",
                extraction_mode="first_match",
                parsing_timeout=None,
            )
            for text in (reference, candidate)
        )
        return bool(verify(gold, answer, timeout_seconds=None))
    except Exception:  # as in the course's grader, any error is no match
        return False
