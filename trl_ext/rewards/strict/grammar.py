r"""Clean text -> a tree, by recursive descent. Lengths and nesting are bounded; nothing is evaluated here.

list       relation (("," | ";" | and | or) relation)*
relation   union (("=" | "<" | \le | \in | ...) union)*
union      difference (\cup difference)*
difference ratio (\setminus ratio)*
ratio      sum (":" sum)*
sum        product (("+" | "-") product)*
product    power (["*" | "/" | \cdot] power)*
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from trl_ext.rewards.cursor import Cursor
from trl_ext.rewards.expression import Apply, Constant, Expression, Number, Variable, exact_value
from trl_ext.rewards.strict.answers import Answer, Based, Ordered, Relation, Several, Text, Union, Unreadable
from trl_ext.rewards.strict.sets import REALS, without

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
DEGREES = r"\degrees"  # of an angle in a function
_WORD_MACROS = {
    "pi": r"\pi", "sqrt": r"\sqrt", "infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "log": r"\log",
    "Infinity": r"\infty", "Inf": r"\infty", "INF": r"\infty", "infty": r"\infty", "degrees": DEGREES,
}  # fmt: skip
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\lt": "<", r"\gt": ">", r"\ne": "!=", r"\in": "in",
    "<=": "<=", ">=": ">=", "!=": "!=",
}  # fmt: skip
_CLOSING = {"(": ")]", "[": ")]", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", "{": "}"}
_ROUNDED = {r"\lfloor": "floor", r"\lceil": "ceiling"}
_ENDS = {")", "]", "}", r"\}", ",", ";", "&", r"\\", r"\rfloor", r"\rceil", r"\cup", r"\setminus", ":", r"\end", ""}
_SIGNS = ("+", "-")
_POSTFIX = ("!", "_", "^", "**")
_POSTFIX_OF_ANGLES = (*_POSTFIX, DEGREES)
MAX_DEPTH = 40


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


def parse(text: str) -> Answer:
    """The tree of a clean text; `Unreadable` if it is not in the grammar or beyond its bounds."""
    tokens = tokens_of(text)
    if r"\pm" not in tokens:
        return _parse(tokens)
    plus, minus = (_parse([sign if token == r"\pm" else token for token in tokens]) for sign in "+-")
    if isinstance(plus, Several) and isinstance(minus, Several):  # of `1, 1 \pm 2` only the second is two
        pairs = zip(plus.items, minus.items, strict=True)
        return Several(tuple(item for a, b in pairs for item in ((a,) if a == b else (a, b))))
    return Several(_spread([plus, minus]))


def _parse(tokens: list[str]) -> Answer:
    parser = _Parser(tokens)
    tree = parser.answer()
    parser.take("")
    return tree


def _expression(answer: Answer) -> Expression:
    if not isinstance(answer, (Number, Constant, Variable, Apply)):
        raise Unreadable(f"a {type(answer).__name__.lower()} in an expression")
    return answer


class _Parser(Cursor):
    """One method per rule."""

    max_depth, error = MAX_DEPTH, Unreadable
    in_bars = False  # whether a bar closes
    in_function = False  # whether 30 degrees are an angle

    # Answers.

    def answer(self) -> Answer:
        items = self.items()
        return items[0] if len(items) == 1 else Several(_spread(items))

    def items(self) -> list[Answer]:
        items = [self.relation()]
        while self.accept(",", ";", "and", "or"):
            self.accept("and", "or")  # 1, 2, and 3
            items.append(self.relation())
        return items

    def relation(self) -> Answer:
        sides, operators = [self.union()], []
        while self.token in _RELATIONS:
            operators.append(_RELATIONS[self.take()])
            sides.append(self.union())
        return Relation(tuple(sides), tuple(operators)) if operators else sides[0]

    def union(self) -> Answer:
        items = self.separated(r"\cup", self.difference)
        return items[0] if len(items) == 1 else Union(tuple(items))

    def difference(self) -> Answer:
        values = self.ratio()
        while self.accept(r"\setminus"):
            values = without(values, self.ratio())
        return values

    def ratio(self) -> Answer:
        items = self.separated(":", self.sum)
        return items[0] if len(items) == 1 else Ordered(":", tuple(items))

    # Expressions.

    def sum(self) -> Answer:
        self.accept("+")
        is_negative = self.accept("-")
        first = self.product()
        if is_negative:
            first = Apply("negate", (_expression(first),))
        if self.token not in _SIGNS:
            return first
        terms = [_expression(first)]
        while sign := self.accept(*_SIGNS):
            term = _expression(self.product())
            terms.append(term if sign == "+" else Apply("negate", (term,)))
        return Apply("add", tuple(terms))

    def product(self) -> Answer:
        first = self.power()
        if self._product_ends():
            return first
        factors = [_expression(first)]
        while not self._product_ends():
            operator = self.accept("*", "/", r"\cdot", r"\times", r"\div")
            signed = operator and self.accept("-")
            is_bracketed = self.token in ("(", "[")
            factor = _expression(self.power())
            factor = Apply("negate", (factor,)) if signed else factor
            if operator == r"\div":
                factors = [Apply("quotient", (_product_of(factors), factor))]
                continue
            if operator == "/":
                factor = Apply("divide", (factors.pop(), factor))
            elif not operator and not is_bracketed:
                factor = self._mixed_number(factors, factor)
            factors.append(factor)
        return _product_of(factors)

    def _product_ends(self) -> bool:
        token = self.token
        if token == "|":
            return self.in_bars
        return token in _ENDS or token in _SIGNS or token in _RELATIONS or token in ("and", "or")

    def _mixed_number(self, factors: list[Expression], factor: Expression) -> Expression:
        """`3` before `1/2` or a fraction of numbers is a sum; a number before any other number is refused."""
        if isinstance(factor, Number) and isinstance(factors[-1], Number):
            if len(factors) != 1 or not _is_whole(factors[0]) or not _is_whole(factor) or self.token != "/":
                raise Unreadable("a number after a number")
            self.take()
            factor = Apply("divide", (factor, _expression(self.power())))
        if len(factors) == 1 and _is_whole(factors[0]) and _is_fraction(factor):
            return Apply("mixed", (factors.pop(), factor))
        return factor

    def power(self) -> Answer:
        base = self.nested(self.atom)
        while operator := self.accept(*(_POSTFIX_OF_ANGLES if self.in_function else _POSTFIX)):
            if operator == DEGREES:
                base = _of_degrees(_expression(base))
            elif operator == "!":
                base = Apply("factorial", (_expression(base),))
            elif operator == "_":
                base = self._subscript(base)
            else:
                base = Apply("power", (_expression(base), _expression(self.nested(self._exponent))))
        return base

    def _exponent(self) -> Answer:
        if sign := self.accept("-", "+"):
            return Apply("negate", (_expression(self._exponent()),)) if sign == "-" else self._exponent()
        exponent = self.argument()
        if self.accept("^", "**"):
            exponent = Apply("power", (_expression(exponent), _expression(self.nested(self._exponent))))
        return exponent

    def _subscript(self, base: Answer) -> Answer:
        label = self.label()
        if isinstance(base, Variable):
            return Variable(f"{base.name}_{label}")
        if isinstance(base, Number) and base.value.denominator == 1 and label.isdecimal():
            return Based(str(base.value), label)
        raise Unreadable("an index")

    def argument(self) -> Answer:
        r"""What follows a macro or a caret: a group, or one digit or token (`\frac12`, `x^10` being x^1 0 in LaTeX)."""
        return self.nested(self.atom)

    def digit(self) -> Answer:
        """An argument of a fraction or root; without braces it is one digit, as in LaTeX."""
        token = self.token
        if token.isdecimal() and len(token) > 1:
            self.tokens[self.at] = token[1:]
            return Number(Fraction(token[0]))
        return self.argument()

    def atom(self) -> Answer:
        token = self.take()
        if token[:1].isdecimal() or (token[:1] == "." and token[1:].isdecimal()):
            return self._number(token)
        if token in _CLOSING:
            return self._bracketed(token)
        if token == "|":
            return self._bars()
        if token[1:] in FUNCTIONS or token in FUNCTIONS:
            return self._function(FUNCTIONS[token.removeprefix("\\")])
        if token in _MACROS:
            return _MACROS[token](self)
        if token in GREEK or (len(token) == 1 and token.isalpha()):
            return {"e": Constant("e"), "i": Constant("i")}.get(token) or Variable(token.removeprefix("\\"))
        raise Unreadable(f"unexpected {token or 'end'!r}")

    def _number(self, token: str) -> Answer:
        value = Fraction(token.replace(",", "").rstrip("."))
        if "." in token and self.accept(r"\overline"):  # 0.1\overline{6}
            digits = self.label()
            if not digits.isdecimal() or len(digits) > 30:
                raise Unreadable("an overline")
            places = len(token.partition(".")[2])
            value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
        return Number(value)

    def _bracketed(self, opening: str) -> Answer:
        if opening == r"\{" and self.accept(r"\}"):
            return Several(())
        self._split_thousands()
        items = self.nested(self.items)
        closing = self.take(*(_CLOSING[opening] if opening in "([" else [_CLOSING[opening]]))
        if opening == r"\{":
            return Several(_spread(items))
        if opening in _ROUNDED:
            return Apply(_ROUNDED[opening], (_expression(items[0]),))
        if opening == "{" or (len(items) == 1 and opening + closing in ("()", "[]")):
            return items[0] if len(items) == 1 else Several(_spread(items))
        return Ordered(opening + closing, tuple(items))

    def _split_thousands(self) -> None:
        """`(100,200)` is a point, not a number in brackets."""
        if "," in self.token and self.tokens[self.at + 1 : self.at + 2] in ([")"], ["]"], [r"\}"]):
            parts = self.token.split(",")
            self.tokens[self.at : self.at + 1] = [token for part in parts for token in (part, ",")][:-1]

    def _bars(self) -> Answer:
        outside, self.in_bars = self.in_bars, True
        inside = _expression(self.nested(self.sum))
        self.in_bars = outside
        self.take("|")
        return Apply("absolute", (inside,))

    def _function(self, name: str) -> Answer:
        exponent = None
        if self.accept("^"):
            exponent = _expression(self.nested(self._exponent))
        outside, self.in_function = self.in_function, True
        argument = _expression(self._function_argument())
        self.in_function = outside
        if exponent is not None and exact_value(exponent) == -1 and f"a{name}" in FUNCTIONS.values():
            return Apply(f"a{name}", (argument,))
        applied = Apply("power", (Constant("e"), argument)) if name == "exp" else Apply(name, (argument,))
        return applied if exponent is None else Apply("power", (applied, exponent))

    def _function_argument(self) -> Answer:
        r"""A bracket, or the factors up to the next sign: `\sin 2x`."""
        if self.token in ("(", "{", "["):
            return self.nested(self.atom)
        factors = [_expression(self.power())]
        while not self._product_ends() and self.token not in ("*", "/", r"\cdot", r"\times", "(") and self._plain():
            factors.append(_expression(self.power()))
        return factors[0] if len(factors) == 1 else Apply("multiply", tuple(factors))

    def _plain(self) -> bool:
        token = self.token
        return (len(token) == 1 and token.isalnum()) or token in GREEK or token in (r"\pi", r"\frac")

    # Macros with arguments.

    def of_two(self, function: str) -> Answer:
        return Apply(function, (_expression(self.digit()), _expression(self.digit())))

    def root(self) -> Answer:
        index: Expression = Number(Fraction(2))
        if self.accept("["):
            index = _expression(self.nested(self.sum))
            self.take("]")
        return Apply("root", (_expression(self.digit()), index))

    def logarithm(self) -> Answer:
        base: Expression = Number(Fraction(10))
        if self.accept("_"):
            base = _expression(self.digit())
        return Apply("log", (_expression(self._function_argument()), base))

    def environment(self) -> Answer:
        name = self.label()
        if name not in ("pmatrix", "bmatrix", "matrix", "array", "Bmatrix", "vmatrix", "smallmatrix"):
            raise Unreadable(f"environment {name}")
        if name == "array":
            self.label()
        rows = [self._row()]
        while self.accept(r"\\"):
            if self.token != r"\end":
                rows.append(self._row())
        self.take(r"\end")
        if self.label() != name or len({len(row) for row in rows}) != 1:
            raise Unreadable("a matrix")
        brackets = "det" if name == "vmatrix" else "|"
        return Ordered(brackets, tuple(Ordered("|", tuple(row)) for row in rows))

    def numbers(self) -> Answer:
        """The real numbers, or another set by its name."""
        name = self.label()
        return REALS if name == "R" else Text(rf"\mathbb{{{name}}}")

    def label(self) -> str:
        """The text of a group in braces, or one token."""
        if self.token.isalnum():
            return self.take()
        self.take("{")
        label = ""
        while not self.accept("}"):
            if not self.token:
                raise Unreadable("an open brace")
            label += self.take()
        return label

    def _row(self) -> list[Answer]:
        return self.separated("&", lambda: self.nested(self.relation))


_MACROS: dict[str, Callable[[_Parser], Answer]] = {
    r"\frac": lambda parser: parser.of_two("divide"),
    r"\sqrt": _Parser.root,
    r"\binom": lambda parser: parser.of_two("binomial"),
    r"\log": _Parser.logarithm,
    r"\begin": _Parser.environment,
    r"\mathbb": _Parser.numbers,
    r"\pi": lambda _: Constant("pi"),
    r"\infty": lambda _: Constant("inf"),
    r"\emptyset": lambda _: Several(()),
    r"\varnothing": lambda _: Several(()),
}


def _spread(items: list[Answer]) -> tuple[Answer, ...]:
    r"""`3, \pm 2` has three items; `3, \emptyset` has two."""
    return tuple(
        inner for item in items for inner in (item.items if isinstance(item, Several) and item.items else (item,))
    )


def _of_degrees(angle: Expression) -> Expression:
    half_turn = Constant("pi")
    if not isinstance(angle, Number):
        return Apply("multiply", (angle, Apply("divide", (half_turn, Number(Fraction(180))))))
    return half_turn if angle.value == 180 else Apply("multiply", (Number(angle.value / 180), half_turn))


def _product_of(factors: list[Expression]) -> Expression:
    return factors[0] if len(factors) == 1 else Apply("multiply", tuple(factors))


def _is_whole(node: Expression) -> bool:
    return isinstance(node, Number) and node.value.denominator == 1


def _is_fraction(node: Expression) -> bool:
    return isinstance(node, Apply) and node.function == "divide" and all(map(_is_whole, node.arguments))
