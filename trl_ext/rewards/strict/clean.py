r"""Text -> text with one spelling of everything that has several: dashes, `\dfrac`, `\left(`, `$...$`, `\,`, `½`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

from trl_ext.rewards.extract import BOXED, boxed_content, closing_brace
from trl_ext.rewards.strict.spellings import (
    MARKED_ENDS,
    MARKS,
    unwrapped,
    with_fractions,
    with_matrix_environments,
    with_named_currencies,
    with_periods,
    without_marks_in_text,
)

_CHARACTERS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "√": r"\sqrt ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "°": r"^\circ ",
    "∈": r"\in ", "∅": r"\emptyset ", "\xa0": " ", "⁄": "/", "¢": r"\text{ cents}", "∘": r"\circ ", "∶": ":",
    "≈": r"\approx ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}",
    "∖": r"\setminus ", "⋃": r"\cup ", "…": r"\ldots ", "⋯": r"\ldots ",
    "。": ".", "“": '"', "”": '"', "‘": "'", "’": "'", "′": "'",
}  # fmt: skip
_CHARACTER = re.compile("|".join(map(re.escape, _CHARACTERS)))
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?)?")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR_FRACTION = re.compile("[¼½¾⅐-⅞]")
_SPELLINGS = {  # of a macro; the first group only sets the type
    "": """left right displaystyle textstyle limits nonumber hfill big bigl bigr bigm Big Bigl Bigr Bigm bigg biggl
    biggr biggm Bigg Biggl Biggr Biggm boldsymbol bm pmb underline uline emph fbox framebox ensuremath hbox bf rm it sf
    tt bfseries itshape boldmath mathstrut strut noindent allowbreak tiny scriptsize footnotesize small normalsize large
    Large LARGE huge Huge scriptstyle scriptscriptstyle hline""",
    " ": "quad qquad",
    "|": "lvert rvert vert mid",
    r"\{": "lbrace",
    r"\}": "rbrace",
    r"\frac": "dfrac tfrac cfrac nicefrac sfrac flatfrac",
    r"\binom": "dbinom tbinom",
    r"\cup ": "bigcup",
    r"\ldots ": "dots cdots dotsc dotsb",
    ":": "colon",
    "(": "langle",
    ")": "rangle",
    r"\overline": "bar",
    r"\mathbb{R}": "R Reals reals",
    r"\text{ or }": "lor vee",
    r"\dollar ": "textdollar",
    r"\currencyeuro ": "euro texteuro",
    r"\currencysterling ": "pounds textsterling",
    r"\currencyyen ": "yen textyen",
    r"\currencyrupee ": "rupee",
    r"\le": "leqslant leq",
    r"\ge": "geqslant geq",
    r"\ne ": "neq",
    r"\setminus": "smallsetminus backslash",
    r"\text": "mbox textnormal textrm textbf textit textsf texttt mathrm mathbf mathit mathsf mathtt operatorname",
    r"\text{ degrees}": "degree",
}
# A font around mathematics, not words: what it is applied to has a macro or a group in it.
_FONT_OF_MATH = (
    r"\\(?:mbox|text(?:normal|rm|bf|it|sf|tt)?|math(?:rm|bf|it|sf|tt))\s*(?=\{[^{}]*(?:\\[a-zA-Z]|\d\\%|\{))"
)
_OPENING = r"(\\text\s*\{)?\s*"
_MACROS = {name: macro for macro, names in _SPELLINGS.items() for name in names.split()}


def _open_on_the_left(match: re.Match[str]) -> str:
    """`]1,2[` as `(1,2)`: brackets that turn away from the interval leave its ends out."""
    return f"({match[1]}{')' if match[2] == '[' else ']'}"


_PATTERNS: Sequence[tuple[str, str, str | Callable[[re.Match[str]], str]]] = (
    (".", r"\\(?:left|right)\s*\.", ""),
    (r"\!", r"(?<=\d)\s*(?:\\!\s*)*(?:,|\{,\})\s*(?:\\!\s*)+(?=\d{3}(?!\d))", ","),  # MATH's thousands
    (r"\!", r"\\!", ""),
    ("color", r"\\(?:text)?color(?:box)?\s*(?:\[[^\[\]]*\])?\s*\{[^{}]*\}", " "),
    ("color", r"\\fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\}", " "),
    (r"\text", r"\\text\s*\{[\s.,;:]*\}\s*$", ""),
    *(
        (sign, r"\\(?:text|mbox|textrm|mathrm)\s*\{\s*(\\(?:currency[a-z]+|dollar))\s*\}", r"\1 ")
        for sign in (r"\currency", r"\dollar")
    ),
    (r"S\dollar", r"(?<![a-zA-Z])US\\dollar", r"\\dollar"),
    *(
        (
            code,
            rf"(?<![a-zA-Z])(?:\\(?:text|mathrm|mbox)\s*\{{\s*{code}\s*\}}|{code})\s*(?:\\[ ,])?(?=\s*[\d.])",
            rf"\\{sign} ",
        )
        for code, sign in (
            ("USD", "dollar"),
            ("EUR", "currencyeuro"),
            ("GBP", "currencysterling"),
            ("INR", "currencyrupee"),
            ("JPY", "currencyyen"),
        )
    ),
    ("Rs", r"(?<![a-zA-Z])Rs\.?\s*(?=\d)", r"\\currencyrupee "),
    ("phantom", r"\\[hv]?phantom\s*(?:\{[^{}]*\}|[^\s\\{}])", ""),
    *(
        (macro, r"\\(?:vec|overrightarrow)\s*(?:\{([A-Za-z]{1,2})\}|([a-z]))\s*(?==)", r"\1\2")
        for macro in (r"\vec", r"\overrightarrow")
    ),
    ("sqrt", r"(?<![\\a-zA-Z])([a-zA-Z]?)sqrt ?(\d+(?:\.\d+)?)", r"\1\\sqrt{\2}"),
    ("sqrt(", r"(?<![\\a-zA-Z])([a-zA-Z])sqrt(?=\()", r"\1\\sqrt"),
    ("10^", r"(?<=\d) ?[xX] ?(?=10\^\{?-?\d)", r"\\cdot "),
    ("\\math", r"\\math(?:bin|rel|op|ord|punct)\s*\{([^{}]*)\}", r"\1"),
    *((font, _FONT_OF_MATH, "") for font in (r"\mbox", r"\text", r"\math")),
    *((end, r"\\(?:cr|tabularnewline)(?![a-zA-Z])", "\x00") for end in (r"\cr", r"\tab")),
    ("\x00", r"\x00\s*(?:\*|\[\s*-?[\d.]+\s*[a-z]{2}\s*\])", "\x00"),
    ("space", r"\\[hv]space\*?\s*\{[^{}]*\}", " "),
    (",", r"(?<=\d)\s*,\s+(?=\d{3}(?!\d))", ";"),  # a space makes a list of what else were thousands
    (
        "}",
        r"(?<=\d)\{(?:\\(?:rm|text)\s*\{?)?\s*([a-zA-Z]{1,9}(?:/[a-zA-Z]{1,9})?)\}?(\^\{?\d\}?)?\}",
        r"\\text{\1}\2",
    ),  # 4{cm}
    (r"\overline", r"\\overline\s*\{([A-Z]+)\}", r"\1"),
    ("{,}", r"(?<=\d)\{,\}(?=\d{3}(?!\d))", ""),
    ("~", r"(?<=\d)~(?=\d{3}(?!\d))", ""),
    ("\\", r"(?<=\d)(?:,?\\,|\\[;: ])(?=\d{3}(?!\d))", ""),
    ("{,}", r"\{,\}", ","),
    ("\\", r"\\[,;: >]", " "),
    ("~", "~", " "),
    ("\\", r"\\([a-zA-Z]+)", lambda match: _MACROS.get(match[1], match[0])),
    (r"\not", r"\\not\s*=", r"\\ne "),
    ("bb", r"\\(?:mathbb|Bbb)\s*\{?\s*([A-Z])\s*\}?", r"\\mathbb{\1}"),
    *(
        (
            sign,
            r"([(\[][^()\[\]]{1,80},[^()\[\]]{1,80}[)\]]|\\\{[^{}]{1,80}\\\})"
            r"\s*(?:[Uu]|union|\\text\s*\{\s*(?:[Uu]|union)\s*\})\s*(?=[(\[]|\\\{)",
            r"\1\\cup ",
        )
        for sign in ("U", "u")
    ),
    (r"\{", r"(?<=\})\s*-\s*(?=\\\{)", r"\\setminus "),
    (r"\circ", r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"\\text{ degrees}"),
    ("^", r"(?<=\d)\^\s*(?:\{\s*)?(?:\\text\s*\{\s*o\s*\}|o(?![a-zA-Z]))\s*\}?", r"\\text{ degrees}"),
    *(
        (
            " degrees}",
            rf"\\text\{{ degrees\}}\s*(?:\\text\s*\{{\s*{letter}\s*\}}|{letter}(?![a-zA-Z]))",
            rf"\\text{{ degrees {scale}}}",
        )
        for letter, scale in (("C", "Celsius"), ("F", "Fahrenheit"))
    ),
    (r"\%", r"\\%", "%"),
    *(
        (word, rf"(?<=\d)\s*(?:\\text\s*\{{\s*{word}\s*\}}|{word}(?![a-z]))", rf"\\cdot 10^{{{power}}}")
        for word, power in (("million", 6), ("billion", 9), ("trillion", 12))
    ),
    (":=", ":=", "="),
    ("'", r"(?<=\d)\s*''(?!')", r"\\text{ inches}"),
    ("'", r"(?<=\d)\s*'(?!')", r"\\text{ feet}"),
    ('"', r'(?<=\d)\s*"', r"\\text{ inches}"),
    ("]", r"(?<![^ =pn])\]([^\[\]()]{1,80},[^\[\]()]{1,80})([\[\]])", _open_on_the_left),  # ]1,2[
    ("[", r"\[([^\[\]()]{1,80},[^\[\]()]{1,80})\[", r"[\1)"),
    ("nswer", rf"\A{_OPENING}(?:[Tt]he )?(?:(?:[Ff]inal|[Cc]orrect) )?[Aa]nswer(?: is)?:", r"\1"),
)
# A pattern can match only where its telltale occurs, which is much faster to see.
_REWRITES = tuple((telltale, re.compile(pattern), replacement) for telltale, pattern, replacement in _PATTERNS)
_REWRITES_WITHOUT_MACROS = tuple(
    (telltale, pattern, replacement)
    for telltale, pattern, replacement in _REWRITES
    if "\\" not in telltale and telltale not in ("color", "space", "bb")
)
_MORE_REWRITES: Sequence[tuple[str, Callable[[str], str]]] = (
    (r"\over", with_fractions),
    (r"\choose", with_fractions),
    ("matrix{", with_matrix_environments),
    (".", with_periods),
)
_SPACES = re.compile(r" (?![a-zA-Z0-9])|(?<![a-zA-Z0-9]) ")
_DOUBLED = re.compile(r"(?<!\\)\\\\(?:d?frac|sqrt|text|pi|infty|left|begin|cdot|times|pm|le|ge|cup|in)(?![a-zA-Z])")
_SINGLE = re.compile(r"(?<!\\)\\(?:\\\\)*(?=[a-zA-Z])")
_THIN_SPACE = re.compile(r"(?<=\d)[\u2007\u2009\u202f\xa0](?=\d{3}(?!\d))")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]")  # soft hyphens, spaces without width
_SPACED_THOUSANDS = re.compile(r"((?:\\dollar ?)?-?)([1-9]\d{0,2}(?>(?: \d{3})+))(?![\d/!])")
_DELIMITERS = re.compile(r"\\[()\[\]]")


def clean(text: str) -> str:
    r"""One spelling of `text`, without math delimiters, `\boxed`, markdown and a final full stop."""
    text = _one_spelling_of_characters(_contents_of_boxes(text.strip()))
    text = unwrapped(text) if text.startswith(MARKS) else text
    text = _single_backslashes(text.replace("\x00", " "))
    text = text.replace("\\\\", "\x00")  # the end of a row, not the backslash of a macro after it
    text = _DELIMITERS.sub(" ", text) if "\\" in text else text
    text = text.replace(r"\$", r"\dollar ").replace("$", " ")
    for telltale, pattern, replacement in _REWRITES if "\\" in text else _REWRITES_WITHOUT_MACROS:
        if telltale in text:
            text = pattern.sub(replacement, text)
    text = _SPACES.sub("", " ".join(text.split()))
    if not text.isdecimal():
        for telltale, rewrite in _MORE_REWRITES:
            if telltale in text:
                text = rewrite(text)
        text = without_marks_in_text(text) if text.endswith(MARKED_ENDS) else text
    if " " in text and (match := _SPACED_THOUSANDS.match(text)):
        text = match[1] + match[2].replace(" ", "") + text[match.end() :]
    text = text.strip(" \x00=").replace("\x00", "\\\\").removesuffix("\\")
    text = text[:-1].removesuffix("\\") if text.endswith((".", ",", ";")) else text
    is_one_group = text.startswith("{") and closing_brace(text, 0) == len(text) - 1  # {5}, and not {5}{6}
    return text[1:-1] if is_one_group else text


def _contents_of_boxes(text: str) -> str:
    """The content of the only box, or of several that say the same; else every box's, which are several answers."""
    if BOXED not in text:
        return text
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


def _root(match: re.Match[str]) -> str:
    r"""`√13` is `\sqrt{13}`, and not `\sqrt13`, whose root ends after one digit."""
    index = {"∛": "[3]", "∜": "[4]"}.get(match[1], "")
    return rf"\sqrt{index}{{{match[2]}}}" if match[2] else rf"\sqrt{index} "


def _one_spelling_of_characters(text: str) -> str:
    if text.isascii():
        return text
    text = _THIN_SPACE.sub("", _INVISIBLE.sub("", text))
    text = _SUPERSCRIPTS.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0]).replace('−', '-')}}}", text)
    text = _SUBSCRIPTS.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = _ROOT.sub(_root, text)
    text = _VULGAR_FRACTION.sub(
        lambda m: rf"\frac{{{'}{'.join(unicodedata.normalize('NFKC', m[0]).split('⁄'))}}}", text
    )
    text = _CHARACTER.sub(lambda m: _CHARACTERS[m[0]], text)
    return with_named_currencies(_CHARACTER.sub(lambda m: _CHARACTERS[m[0]], unicodedata.normalize("NFKC", text)))
