r"""Clean text -> tokens: `2\sin x` is `2`, `\sin`, `x`. Their number is bounded."""

from __future__ import annotations

import re

from trl_ext.rewards.strict.answers import Unreadable

MAX_TOKENS = 400
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
    "pi": r"\pi", "sqrt": r"\sqrt", "infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "log": r"\log",
}  # fmt: skip


def tokens_of(text: str) -> list[str]:
    """Numbers, macros, signs, the names of functions, and every other letter by itself; `MAX_TOKENS` at most."""
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
