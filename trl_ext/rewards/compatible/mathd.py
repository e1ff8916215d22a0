r"""Stage A: a textual normal form of LaTeX answers. Two answers agree when their normal forms are the same text.

The steps are those of the normalization that came with the MATH dataset (Hendrycks et al. 2021, `math_equivalence`)
as extended by the course's grader, in its order, because later steps see the leftovers of earlier ones.
"""

from __future__ import annotations

import re

from trl_ext.rewards.compatible.unit_words import remove_unit_words

_WHOLE_TEXT = re.compile(r"\\text\{(.+)\}")  # greedy, no newline inside
_ARRAY_BEGIN = re.compile(r"\\begin\{array\}\{[^}\n]*\}")
_FRACTION_OF_INTEGERS = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")


class _Malformed(Exception):
    """A step cannot be applied; the text stays as it was before the steps."""


def mathd_normal_form(text: str) -> str:
    """The normal form of one answer."""
    text = text.strip()
    if match := _WHOLE_TEXT.fullmatch(text):
        text = match[1].strip()
    try:
        return _apply_steps(text)
    except _Malformed:
        return text


def _apply_steps(text: str) -> str:
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = _ARRAY_BEGIN.sub(r"\\begin{pmatrix}", text).replace("\\end{array}", "\\end{pmatrix}")
    text = text.replace("bmatrix", "pmatrix")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("\\neq", "\\ne").replace("\\leq", "\\le").replace("\\geq", "\\ge")
    text = text.replace("\\left", "").replace("\\right", "")
    text = _cut_trailing_text(text)
    text = remove_unit_words(text)
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text = _cut_text_with_space(text)
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text.startswith("."):
        text = "0" + text
    head, equals, tail = text.partition("=")
    if equals and "=" not in tail and len(head) <= 2:
        text = tail
    text = _brace_roots(text).replace(" ", "")
    text = _brace_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    if match := _FRACTION_OF_INTEGERS.fullmatch(text):
        return f"\\frac{{{match[1]}}}{{{match[2]}}}"
    return text


def _cut_trailing_text(text: str) -> str:
    r"""`9\text{ apples}` -> `9`, from the first `\text{` on, unless nothing would be left."""
    cut = text
    if text.endswith("}") and "\\text{" in text:
        cut = text[: text.index("\\text{")]
    return cut.strip() or text


def _cut_text_with_space(text: str) -> str:
    head, opening, tail = text.partition("\\text{ ")
    if opening and "\\text{ " in tail:
        raise _Malformed
    return head


def _brace_roots(text: str) -> str:
    r"""`\sqrt3` -> `\sqrt{3}`: the character after a bare `\sqrt` is its argument."""
    head, *tails = text.split("\\sqrt")
    if not all(tails):
        raise _Malformed
    return "\\sqrt".join([head, *(tail if tail[0] == "{" else f"{{{tail[0]}}}{tail[1:]}" for tail in tails)])


def _brace_fractions(text: str) -> str:
    r"""`\frac12` -> `\frac{1}{2}`, `\frac1{72}` -> `\frac{1}{72}`."""
    head, *tails = text.split("\\frac")
    pieces = [head]
    for tail in tails:
        if not tail:
            raise _Malformed
        if tail[0] != "{":
            if len(tail) < 2:
                return text
            denominator = tail[1:] if tail[1] == "{" else f"{{{tail[1]}}}{tail[2:]}"
            tail = f"{{{tail[0]}}}{denominator}"
        pieces.append("\\frac" + tail)
    return "".join(pieces)
