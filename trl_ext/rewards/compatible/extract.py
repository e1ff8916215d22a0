r"""Response -> candidate answer, for the two prompt formats of the compatible grader.

`r1_zero` looks for `</think> <answer>` and `</answer>`, `question_only` for the last `\boxed{...}`. Every scan is one
pass over the text, whatever the text is. The rules are those of `math_grader.py` in sail-sg/understand-r1-zero,
whose grader the course's reward functions wrap; they differ from `trl_ext.rewards.extract` in odd places (text after
the closing tag is part of the answer, nothing is stripped).
"""

from __future__ import annotations

from trl_ext.rewards.extract import BOXED, Extraction, boxed_content


def extract_r1_zero(response: str) -> Extraction:
    r"""The text after the last `<answer>`, without closing tags; if it has a `\boxed`, the content of that."""
    if "</think> <answer>" not in response or "</answer>" not in response:
        return Extraction(False, None)
    candidate: str | None = response.rpartition("<answer>")[2].replace("</answer>", "")
    if candidate is not None and BOXED in candidate:
        candidate = boxed_content(candidate)
    return Extraction(True, candidate)


def extract_question_only(response: str) -> Extraction:
    r"""The content of the last `\boxed{...}`; the response is well formed if that is."""
    candidate = boxed_content(response)
    return Extraction(candidate is not None, candidate)
