r"""Text -> answer. A response follows a format or it does not; only what follows it has an answer to grade.

`r1_zero`: `... </think> <answer> ... </answer>`, the course handout's rule. `boxed`: the last `\boxed{...}`.
"""

from __future__ import annotations

from collections.abc import Callable

from trl_ext.registry import Registry

ANSWER_FORMATS = Registry("answer format")
Extract = Callable[[str], str | None]


@ANSWER_FORMATS.register
def r1_zero(response: str) -> str | None:
    """The text of the last `<answer>` block, or None if the response does not follow the format."""
    if "</think> <answer>" not in response or "</answer>" not in response:
        return None
    return response.rpartition("<answer>")[2].partition("</answer>")[0].strip()


@ANSWER_FORMATS.register
def boxed(response: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, braces balanced, or None if there is none."""
    start = response.rfind("\\boxed{")
    while start >= 0:
        content = _balanced(response, start + len("\\boxed{"))
        if content is not None:
            return content.strip()
        start = response.rfind("\\boxed{", 0, start)
    return None


def _balanced(text: str, start: int) -> str | None:
    """The text from `start` up to the brace that closes the one before it; None if it is never closed."""
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None
