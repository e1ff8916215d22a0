r"""Text -> answer. A response follows a format or it does not; only a response that follows it has an answer.

`r1_zero`: `... </think> <answer> ... </answer>`, the course handout's rule. `boxed`: the last `\boxed{...}`.
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
    if "</think> <answer>" not in response or "</answer>" not in response:
        return None
    return response.rpartition("<answer>")[2].partition("</answer>")[0].strip()


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
