r"""LaTeX -> text as pylatexenc 2.10 gives it, which the course's grader uses: `\sqrt{2}\pi` -> `sqrt(2)pi`.

Macros that are not listed vanish and leave their arguments behind: `\binom{5}{2}` is `52` here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

from trl_ext.rewards.cursor import Cursor

_TOKEN = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+\s*|\\.|[^\\]", re.DOTALL)
# Macro and symbol, pair by pair.
_PAIRS = r"""\cdot · \times × \div ÷ \pm ± \mp ∓ \ast ∗ \star ⋆ \bullet ∙ \oplus ⊕ \otimes ⊗ \odot ⊙ \wedge ∧ \vee ∨
    \pi π \infty ∞ \cup ∪ \cap ∩ \bigcup ⋃ \bigcap ⋂ \setminus ∖ \emptyset ∅ \varnothing ∅ \in ∈ \notin ∉ \subset ⊂
    \subseteq ⊆ \subsetneq ⊊ \supset ⊃ \supseteq ⊇ \circ ∘ \le ≤ \leq ≤ \ge ≥ \geq ≥ \neq ≠ \leqslant ⩽ \geqslant ⩾
    \leqq ≦ \geqq ≧ \nleq ≰ \ngeq ≱ \ll ≪ \gg ≫ \approx ≈ \approxeq ≊ \equiv ≡ \sim ∼ \simeq ≃ \cong ≅ \propto ∝
    \perp ⊥ \parallel ∥ \mid | \nmid ∤ \vert | \lvert | \rvert | \Vert ‖ \lVert ‖ \rVert ‖ \to → \rightarrow →
    \leftarrow ← \leftrightarrow ↔ \longrightarrow ⟶ \Rightarrow ⇒ \Leftrightarrow ⇔ \Longrightarrow ⟹ \mapsto ↦
    \uparrow ↑ \downarrow ↓ \langle ⟨ \rangle ⟩ \lfloor ⌊ \rfloor ⌋ \lceil ⌈ \rceil ⌉ \ldots … \dots … \cdots ⋯
    \vdots ⋮ \ddots ⋱ \angle ∠ \triangle △ \square □ \diamond ♢ \sum ∑ \prod ∏ \int ∫ \partial ∂ \nabla ∇ \forall ∀
    \exists ∃ \therefore ∴ \because ∵ \prime ' \ell ℓ \hbar ħ \aleph ℵ \i ı \j ȷ \l ł \o ø \dagger † \top ⊤
    \textbackslash \ \backslash \ \& & \# # \_ _ \epsilon ϵ \varepsilon ε \phi ϕ \varphi φ \vartheta ϑ""".split()
_SYMBOLS = {
    **dict(zip(_PAIRS[::2], _PAIRS[1::2], strict=True)),
    r"\,": " ", r"\;": " ", r"\:": " ", "\\ ": " ", r"\quad": "  ", r"\qquad": "    ", "~": "\xa0", "&": "   ",
    r"\\": "\n", r"\[": "\n", r"\]": "\n", r"\-": "\xad",
}  # fmt: skip
_TYPOGRAPHY = (("---", "—"), ("--", "–"), ("``", "“"), ("''", "”"))
_NAMES = """sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan arcsinh arccosh arctanh
    log ln exp lim max min sup inf limsup liminf"""
_SYMBOLS |= {rf"\{name}": name for name in _NAMES.split()}
_ALPHABETS = {
    r"\mathbf": "BOLD", r"\mathit": "ITALIC", r"\mathbb": "DOUBLE-STRUCK", r"\mathcal": "SCRIPT", r"\mathscr": "SCRIPT",
    r"\mathfrak": "FRAKTUR", r"\mathsf": "SANS-SERIF", r"\mathtt": "MONOSPACE",
}  # fmt: skip
_PLAIN = str.maketrans({"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"})
_ACCENTS = {
    r"\.": "\u0307", r"\'": "\u0301", r"\`": "\u0300", r"\^": "\u0302", r"\"": "\u0308", r"\~": "\u0303",
    r"\=": "\u0304", r"\c": "\u0327", r"\v": "\u030c", r"\not": "\u0338", r"\hat": "\u0302", r"\bar": "\u0305",
    r"\vec": "\u20d7", r"\tilde": "\u0303", r"\dot": "\u0307", r"\ddot": "\u0308",
}  # fmt: skip
_DROP_AN_ARGUMENT = (r"\mbox", r"\hspace", r"\vspace", r"\color", r"\textcolor", r"\label", r"\ref")
_IN_BRACKETS = ("array", "pmatrix", "bmatrix", "smallmatrix")


class NotConvertible(ValueError):
    """The course grader's converter fails on the text, or the text is nested too deeply."""


def latex_to_text(text: str) -> str:
    """The text that the LaTeX source stands for, or `NotConvertible`."""
    text = re.sub(r"\\[td]frac", r"\\frac", text).replace("\\frac", " \\frac")
    for source, character in _TYPOGRAPHY:
        text = text.replace(source, character)
    return _Converter(_TOKEN.findall(text)).until(lambda token: False).translate(_PLAIN).strip()


class _Converter(Cursor):
    """One pass over the tokens, from the left."""

    error = NotConvertible

    def until(self, is_end: Callable[[str], bool]) -> str:
        """Text up to the token that ends it, which is consumed, or to the end."""
        return self.nested(lambda: "".join(self._pieces(is_end)))

    def _pieces(self, is_end: Callable[[str], bool]) -> Iterator[str]:
        tokens = self.tokens  # not by `token` and `take`, which cost more than converting a character does
        while self.at < len(tokens):
            token = tokens[self.at]
            self.at += 1
            if is_end(token):
                return
            yield _symbol(token) if token[0] not in "\\{" else self._convert(token)

    def _convert(self, token: str) -> str:
        macro = token.rstrip()
        if token == "{":
            return self.until("}".__eq__)
        if token.startswith("\\begin"):
            return self._environment(_name(token))
        if macro in _DROP_AN_ARGUMENT:
            self._argument()
            return ""
        if macro == "\\frac":
            return self._fraction()
        if macro == "\\sqrt":
            return self._root()
        if macro in _ALPHABETS:
            return "".join(_styled(character, _ALPHABETS[macro]) for character in self._argument() or "")
        if macro in _ACCENTS:
            return unicodedata.normalize("NFC", (self._argument() or "") + _ACCENTS[macro])
        return _symbol(token)

    def _fraction(self) -> str:
        top, bottom = self._argument(), self._argument()
        return f"%s/%s{top or ''}" if bottom is None else f"{top}/{bottom}"

    def _root(self) -> str:
        self._skip_spaces()
        if self.token == "[":
            self.until("]".__eq__)  # the index is lost
        radicand = self._argument()
        if radicand is None and self.token:
            return "√()"
        if radicand is None:
            raise NotConvertible("a root of nothing")
        return f"√({radicand})"

    def _argument(self) -> str | None:
        """The next group, or the next token without arguments of its own, as text; None at the end."""
        self._skip_spaces()
        if self.token in ("", "}"):
            return None
        token = self.take()
        if token == "{":
            return self._convert(token)
        if token.rstrip() == "\\sqrt":
            raise NotConvertible("a root of nothing")
        return "%s/%s" if token.rstrip() == "\\frac" else _symbol(token)

    def _skip_spaces(self) -> None:
        while self.token.isspace():
            self.take()

    def _environment(self, name: str) -> str:
        if name == "array":
            self._argument()  # the columns
        content = self.until(lambda token: token.startswith("\\end") and _name(token) == name)
        if name not in _IN_BRACKETS:
            return content
        rows = [" ".join(map(str.strip, row.split("   "))) for row in content.split("\n") if row.strip()]
        return f"[ {'; '.join(rows)} ]"


def _symbol(token: str) -> str:
    """A character as it is, a macro's symbol, or nothing; the spaces after a macro go with it."""
    if symbol := _SYMBOLS.get(token) or _SYMBOLS.get(token.rstrip()):
        return symbol
    if not token.startswith("\\"):
        return "" if token == "}" else token
    return _greek(token[1:].rstrip())


def _name(token: str) -> str:
    return token.partition("{")[2].rstrip("}")


def _greek(macro: str) -> str:
    """The letter, or nothing for any other macro."""
    if not (macro.isascii() and macro.isalpha()):
        return ""
    case = "CAPITAL" if macro[:1].isupper() else "SMALL"
    return _character(f"GREEK {case} LETTER {'LAMDA' if macro.lower() == 'lambda' else macro.upper()}") or ""


def _styled(letter: str, style: str) -> str:
    """The mathematical letter; digits and everything else stay plain."""
    if not (letter.isascii() and letter.isalpha()):
        return letter
    name = f"{style} {'CAPITAL' if letter.isupper() else 'SMALL'} {letter.upper()}"
    return _character(f"MATHEMATICAL {name}") or _character(name) or letter


def _character(name: str) -> str | None:
    """The character with a Unicode name."""
    try:
        return unicodedata.lookup(name)
    except KeyError:
        return None
