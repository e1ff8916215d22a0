r"""Clean text -> tokens: `2\sin x` is `2`, `\sin`, `x`. Their number and how deeply they nest are bounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from trl_ext.rewards.strict.answers import Answer, Unreadable

MAX_TOKENS = 400
MAX_DEPTH = 40

Read = TypeVar("Read")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d])|\d+\.?\d*|\.\d+)|(?P<macro>\\(?:[a-zA-Z]+|.))"
    r"|(?P<word>[a-zA-Z]+)|(?P<sign>\*\*|[<>!]=|.))",
    re.DOTALL,
)
FUNCTIONS = {
    "sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc", "ln": "ln", "exp": "exp",
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh",
}  # fmt: skip
GREEK = frozenset(
    "\\" + name
    for name in """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho
    sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell""".split()
)
_WORD_MACROS = {
    "pi": r"\pi",
    "sqrt": r"\sqrt",
    "infinity": r"\infty",
    "inf": r"\infty",
    "oo": r"\infty",
    "log": r"\log",
}


def tokens_of(text: str) -> list[str]:
    """Numbers, macros, signs, the names of functions, and every other letter for itself.

    Raises:
        Unreadable: there are more than `MAX_TOKENS`.
    """
    tokens: list[str] = []
    for match in _TOKEN.finditer(text):
        token = match[match.lastgroup or 0]
        if match.lastgroup == "word" and token not in ("and", "or") and token not in FUNCTIONS:
            tokens += [_WORD_MACROS[token]] if token in _WORD_MACROS else list(token)
        elif not token.isspace():
            tokens.append(token)
        if len(tokens) > MAX_TOKENS:
            raise Unreadable("too long")
    return tokens


class Cursor:
    """The tokens and how far they are read."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = self.depth = 0

    @property
    def token(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        """The next token, which is one of those expected if any are, and go on."""
        token = self.token
        if expected and token not in expected:
            self.refuse()
        self.at += 1
        return token

    def refuse(self) -> NoReturn:
        """Raise `Unreadable` for the next token."""
        raise Unreadable(f"unexpected {self.token or 'end'!r}")

    def nested(self, rule: Callable[[], Read]) -> Read:
        """What a rule reads one level deeper."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        result = rule()
        self.depth -= 1
        return result

    def separated(self, sign: str, rule: Callable[[], Answer]) -> list[Answer]:
        """What a rule reads, once and after each `sign`."""
        items = [rule()]
        while self.token == sign:
            self.take()
            items.append(rule())
        return items

    def label(self) -> str:
        """The text of a group in braces, or one token."""
        if self.token.isalnum():
            return self.take()
        self.take("{")
        label = ""
        while self.token != "}":
            if not self.token:
                self.refuse()
            label += self.take()
        self.take()
        return label
