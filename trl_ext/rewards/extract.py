r"""Text -> answer. A response follows a format or it does not; only a response that follows it has an answer.

`r1_zero`: `... </think> <answer> ... </answer>`, the course handout's rule. `boxed`: the last `\boxed{...}`. What the
course's grader takes is in odd places something else: nothing is stripped, text after the closing tag is part of the
answer, and a last `\boxed{` that stays open is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trl_ext.registry import Registry

ANSWER_FORMATS = Registry("answer format")
BOXED = "\\boxed"
_BRACE = re.compile("[{}]")


@dataclass(frozen=True, slots=True)
class Extraction:
    """Whether a response follows the format, and the answer in it (None: nothing to compare)."""

    well_formed: bool
    answer: str | None


@ANSWER_FORMATS.register
def r1_zero(response: str) -> str | None:
    """The text of the last `<answer>` block, or None if the response does not follow the format."""
    opened = _after_last_tag(response)
    if opened is None or "</answer>" not in opened:  # one that closes another block does not close the last
        return None
    return opened.partition("</answer>")[0].strip()


def _after_last_tag(response: str) -> str | None:
    if "</think> <answer>" not in response or "</answer>" not in response:
        return None
    return response.rpartition("<answer>")[2]


@ANSWER_FORMATS.register
def boxed(response: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, braces balanced, or None if there is none."""
    last, answer = -1, None
    opened: list[int] = []  # per open brace: where the content of its box starts, or -1 if it opens no box
    for brace in re.finditer(r"\\boxed\{|[{}]", response):
        if brace[0] != "}":
            opened.append(brace.end() if len(brace[0]) > 1 else -1)
        elif opened and (start := opened.pop()) > last:
            last, answer = start, response[start : brace.start()].strip()
    return answer


def compatible_r1_zero(response: str) -> Extraction:
    r"""The text after the last `<answer>`, without closing tags; if it has a `\boxed`, the content of that."""
    if (opened := _after_last_tag(response)) is None:
        return Extraction(False, None)
    candidate = opened.replace("</answer>", "")
    return Extraction(True, boxed_content(candidate) if BOXED in candidate else candidate)


def compatible_boxed(response: str) -> Extraction:
    r"""The content of the last `\boxed{...}`; the response is well formed if that is."""
    candidate = boxed_content(response)
    return Extraction(candidate is not None, candidate)


COMPATIBLE_FORMATS = {"r1_zero": compatible_r1_zero, "boxed": compatible_boxed}


def boxed_content(text: str) -> str | None:
    r"""The content of the last `\boxed`, or None if no brace follows it at once or that brace is not closed."""
    start = text.rfind(BOXED)
    opening = start + len(BOXED)
    if start < 0 or not text.startswith("{", opening) or (closing := closing_brace(text, opening)) is None:
        return None
    return text[opening + 1 : closing]


def closing_brace(text: str, opening: int) -> int | None:
    """The place of the brace that closes the one at `opening`. Escaped braces count like the others."""
    depth = 0
    for brace in _BRACE.finditer(text, opening):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None
