r"""Text -> text with one spelling of everything that has several: dashes, `\dfrac`, `\left(`, `$...$`, `\,`, `½`."""

from __future__ import annotations

import re
import unicodedata

from trl_ext.rewards.extract import BOXED, boxed_content

_CHARACTERS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "√": r"\sqrt ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "°": r"^\circ ",
    "∈": r"\in ", "∅": r"\emptyset ", "\xa0": " ", "⁄": "/", "¢": r"\text{ cents}", "∘": r"\circ ", "∶": ":",
    "≈": r"\approx ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}",
    "∖": r"\setminus ",
}  # fmt: skip
_CHARACTER = re.compile("|".join(map(re.escape, _CHARACTERS)))
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR_FRACTION = re.compile("[¼½¾⅐-⅞]")
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:displaystyle|textstyle|limits|nonumber|hfill)(?![a-zA-Z])|\\!", ""),
        (r"(?<=\d)\s*,\s+(?=\d{3}(?!\d))", ";"),  # a space makes a list of what else were thousands
        (
            r"(?<=\d)\{(?:\\(?:rm|text)\s*\{?)?\s*([a-zA-Z]{1,9}(?:/[a-zA-Z]{1,9})?)\}?(\^\{?\d\}?)?\}",
            r"\\text{\1}\2",
        ),  # 4{cm}
        (r"\\overline\s*\{([A-Z]+)\}", r"\1"),
        (r"(?<=\d)(?:\{,\}|\\[,;: ]|~|,\\!|,\\,)(?=\d{3}(?!\d))", ""),
        (r"\{,\}", ","),
        (r"\\[,;: >]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\(?:leqslant|leq)(?![a-zA-Z])", r"\\le"),
        (r"\\(?:geqslant|geq)(?![a-zA-Z])", r"\\ge"),
        (r"\\neq(?![a-zA-Z])|\\not\s*=", r"\\ne "),
        (r"\\(?:mathbb|Bbb)\s*\{?\s*([A-Z])\s*\}?", r"\\mathbb{\1}"),
        (r"\\(?:smallsetminus|backslash)(?![a-zA-Z])|(?<=\})\s*-\s*(?=\\\{)", r"\\setminus "),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        (r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])", "|"),
        (
            r"\\(?:mbox|textnormal|textrm|textbf|textit|textsf|texttt|mathrm|mathbf|mathit|mathsf|operatorname)(?![a-zA-Z])",
            r"\\text",
        ),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])", r"\\text{ degrees}"),
        (r"\\%", "%"),
        *(
            (rf"(?<=\d)\s*(?:\\text\s*\{{\s*{word}\s*\}}|{word}(?![a-z]))", rf"\\cdot 10^{{{power}}}")
            for word, power in (("million", 6), ("billion", 9), ("trillion", 12))
        ),
        (r":=", "="),
        (r"\s+", " "),
        (r" (?![a-zA-Z0-9])|(?<![a-zA-Z0-9]) ", ""),
    )
)
_DOUBLED = re.compile(r"(?<!\\)\\\\(?:d?frac|sqrt|text|pi|infty|left|begin|cdot|times|pm|le|ge|cup|in)(?![a-zA-Z])")
_SINGLE = re.compile(r"(?<!\\)\\(?:\\\\)*(?=[a-zA-Z])")
_THIN_SPACE = re.compile(r"(?<=\d)[\u2007\u2009\u202f\xa0](?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"((?:\\dollar ?)?-?)([1-9]\d{0,2}(?>(?: \d{3})+))(?![\d/!])")
_MARKDOWN = re.compile(r"\*\*(.+)\*\*|`(.+)`|__(.+)__")
_DELIMITERS = re.compile(r"\\[()\[\]]")


def clean(text: str) -> str:
    r"""One spelling of `text`, without math delimiters, `\boxed`, markdown and a final full stop."""
    text = _contents_of_boxes(text.strip())
    if match := _MARKDOWN.fullmatch(text):
        text = next(group for group in match.groups() if group)
    text = _one_spelling_of_characters(text)
    text = _single_backslashes(text.replace("\x00", " ")).replace(
        "\\\\", "\x00"
    )  # ends a row: not the backslash of what follows it
    text = _DELIMITERS.sub(" ", text).replace(r"\$", r"\dollar ").replace("$", " ")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if " " in text and (match := _SPACED_THOUSANDS.match(text)):
        text = match[1] + match[2].replace(" ", "") + text[match.end() :]
    text = text.strip(" \x00=").replace("\x00", "\\\\").removesuffix("\\")
    text = text[:-1] if text.endswith((".", ",", ";")) else text
    return text[1:-1] if _is_one_group(text) else text


def _contents_of_boxes(text: str) -> str:
    """The content of the only box, or of several that say the same; else every box's, which are several answers."""
    contents = [content for part in text.split(BOXED)[1:] if (content := boxed_content(BOXED + part)) is not None]
    if len(set(contents)) > 1:
        return ";".join(contents)
    content = boxed_content(text)
    return text if content is None else content


def _single_backslashes(text: str) -> str:
    r"""`\\frac` as JSON leaves it: where every macro has two backslashes, each of them is one."""
    if "\\\\" in text and _DOUBLED.search(text) and not _SINGLE.search(text):
        return text.replace("\\\\", "\\")
    return text


def _is_one_group(text: str) -> bool:
    """Whether the first brace is closed by the last character, as in `{5}` and not in `{5}{6}`."""
    if not (text.startswith("{") and text.endswith("}")):
        return False
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return i == len(text) - 1
    return False


def _one_spelling_of_characters(text: str) -> str:
    if text.isascii():
        return text
    text = _THIN_SPACE.sub("", text)
    text = _SUPERSCRIPTS.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0]).replace('−', '-')}}}", text)
    text = _SUBSCRIPTS.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = _VULGAR_FRACTION.sub(
        lambda m: rf"\frac{{{'}{'.join(unicodedata.normalize('NFKC', m[0]).split('⁄'))}}}", text
    )
    text = _CHARACTER.sub(lambda m: _CHARACTERS[m[0]], text)
    return _CHARACTER.sub(lambda m: _CHARACTERS[m[0]], unicodedata.normalize("NFKC", text))
