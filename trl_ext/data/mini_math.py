r"""mini-MATH: endless seeded problems in the shape of MATH, small enough for a two-million-parameter policy.

A subject is one function `(rng, level) -> (problem, solution, answer)`, registered under MATH's name for it. The
solution is one line in which every step is a fact about small numbers; answers are LaTeX where MATH has LaTeX.
A hash of the problem's text decides its split, so train and validation cannot share a problem, whatever the seed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from math import gcd, isqrt
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

Draw = tuple[str, str, str]  # problem, solution, answer
SUBJECTS: dict[str, Callable[[Random, int], Draw]] = {}
SPLITS = ("train", "validation")
LEVELS = (1, 2, 3, 4, 5)
VALIDATION_SHARE = 0.2


def subject(name: str) -> Callable[[Callable[[Random, int], Draw]], Callable[[Random, int], Draw]]:
    """Register a generator `(rng, level 1..5) -> (problem, solution, answer)` as the subject `name`."""

    def register(generator: Callable[[Random, int], Draw]) -> Callable[[Random, int], Draw]:
        if name in SUBJECTS:
            raise ValueError(f"subject {name!r} is taken. Known: {', '.join(sorted(SUBJECTS))}")
        SUBJECTS[name] = generator
        return generator

    return register


def split_of(problem: str) -> str:
    """The split a problem belongs to: a function of its text alone."""
    digest = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:4], "big")
    return "validation" if digest < VALIDATION_SHARE * 2**32 else "train"


def problems(split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Endless rows `problem, solution, answer, level, subject`, uniform over subjects and levels; rows may recur.

    Raises:
        ValueError: `split` is not one of SPLITS.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}. Known: {', '.join(SPLITS)}")
    return _draw(split, Random(f"mini-MATH {split} {seed}"))


def _draw(split: str, rng: Random) -> Iterator[dict[str, Any]]:
    names = sorted(SUBJECTS)
    while True:
        name, level = rng.choice(names), rng.choice(LEVELS)
        problem, solution, answer = SUBJECTS[name](rng, level)
        while split_of(problem) != split:
            problem, solution, answer = SUBJECTS[name](rng, level)
        if not solution.endswith(answer):
            solution = f"{solution}, {answer}"
        yield {"problem": problem, "solution": solution, "answer": answer, "level": level, "subject": name}


def _rows(split: str, n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; those of validation are distinct, because a repeated problem would be counted twice."""
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    stream = problems(split, seed)
    for _ in range(100 * n):
        if len(rows) == n:
            break
        row = next(stream)
        if split == "train" or row["problem"] not in seen:
            seen.add(row["problem"])
            rows.append(row)
    if len(rows) < n:
        raise ValueError(f"n={n} is more than the distinct problems of {split!r}: {len(rows)} after {100 * n} draws")
    return rows


def mini_math(split: str, n: int, seed: int = 0) -> "Dataset":
    """The first `n` rows as a `datasets.Dataset` (distinct ones in validation).

    Raises:
        ValueError: unknown split, or more distinct validation problems than there are.
    """
    from datasets import Dataset

    return Dataset.from_list(_rows(split, n, seed))


def write_jsonl(path: str | Path, split: str, n: int, seed: int = 0) -> Path:
    """Write the rows of `mini_math(split, n, seed)`, one JSON object per line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows(split, n, seed)), encoding="utf-8")
    return path


def _plus(a: int, b: int) -> str:
    """37, 48 -> '37+40+8=77+8=85': tens first, then ones."""
    tens, ones = b - b % 10, b % 10
    return f"{a}+{b}={a + b}" if not tens or not ones else f"{a}+{tens}+{ones}={a + tens}+{ones}={a + b}"


def _minus(a: int, b: int) -> str:
    tens, ones = b - b % 10, b % 10
    return f"{a}-{b}={a - b}" if not tens or not ones else f"{a}-{tens}-{ones}={a - tens}-{ones}={a - b}"


def _times(a: int, b: int) -> str:
    """23, 4 -> '23*4=80+12=92', for a one-digit b."""
    tens, ones = a - a % 10, a % 10
    return f"{a}*{b}={a * b}" if not tens or not ones else f"{a}*{b}={tens * b}+{ones * b}={a * b}"


def _frac(a: int, b: int) -> str:
    return rf"\frac{{{a}}}{{{b}}}"


def _reduce(a: int, b: int) -> tuple[str, str]:
    r"""4, 12 -> (' \frac{4}{12}=\frac{1}{3}', '\frac{1}{3}')."""
    g = gcd(a, b)
    answer = _frac(a // g, b // g)
    return (f"{_frac(a, b)}={answer}" if g > 1 else answer), answer


@subject("Prealgebra")
def prealgebra(rng: Random, level: int) -> Draw:
    """Sums, differences and products of numbers below 100."""
    a, b, c, d = rng.randint(11, 99), rng.randint(11, 99), rng.randint(11, 99), rng.randint(2, 9)
    if level == 1:
        term, solution, answer = f"{a} + {d}", _plus(a, d), a + d
    elif level == 2:
        term, solution, answer = f"{a} + {b}", _plus(a, b), a + b
    elif level == 3:
        a, b = max(a, b), min(a, b)
        term, solution, answer = f"{a} - {b}", _minus(a, b), a - b
    elif level == 4:
        term, solution, answer = rf"{a} \cdot {d}", _times(a, d), a * d
    else:
        a, c = a // 3 + 11, min(c, a + b - 11)
        term, answer = f"{a} + {b} - {c}", a + b - c
        solution = f"{_plus(a, b)}, {_minus(a + b, c)}"
    return rng.choice((f"What is ${term}$?", f"Compute ${term}$.")), solution, str(answer)


@subject("Algebra")
def algebra(rng: Random, level: int) -> Draw:
    """Linear equations and linear expressions in one unknown."""
    x, a, b, c, d = rng.choice("xynt"), *(rng.randint(2, 9) for _ in range(4))
    value = rng.randint(2, 9)
    if level == 1:
        b = rng.randint(11, 60)
        return f"Solve ${x} + {d} = {b + d}$ for ${x}$.", f"{x}={b + d}-{d}={b}", str(b)
    if level == 2:
        right = a * value + b
        return f"Solve ${a}{x} + {b} = {right}$ for ${x}$.", f"{a}{x}={right}-{b}={a * value}, {x}={value}", str(value)
    if level == 3:
        solution = f"{a}{x}+{a * b}+{c}{x}={a + c}{x}+{a * b}"
        return f"Simplify ${a}({x} + {b}) + {c}{x}$.", solution, f"{a + c}{x}+{a * b}"
    if level == 4:
        solution = f"{a}{x}+{a * b}+{c}{x}+{c * d}={a + c}{x}+{a * b + c * d}"
        return f"Simplify ${a}({x} + {b}) + {c}({x} + {d})$.", solution, f"{a + c}{x}+{a * b + c * d}"
    slope, top = rng.randint(2, 9), rng.randint(1, 19)
    while gcd(slope, top) > 1:
        slope, top = rng.randint(2, 9), rng.randint(1, 19)
    problem = f"Solve ${c + slope}{x} + {b} = {c}{x} + {b + top}$ for ${x}$."
    solution = f"{c + slope}-{c}={slope}, {b + top}-{b}={top}, {slope}{x}={top}"
    return problem, solution, _frac(top, slope)


@subject("Number Theory")
def number_theory(rng: Random, level: int) -> Draw:
    """Units digits, remainders, greatest common divisors."""
    a, b, d = rng.randint(11, 99), rng.randint(11, 99), rng.randint(3, 9)
    if level == 1:
        product = (a % 10) * (b % 10)
        return f"What is the units digit of ${a} \\cdot {b}$?", f"{a % 10}*{b % 10}={product}", str(product % 10)
    if level == 2:
        q, r = divmod(a, d)
        return f"What is the remainder when ${a}$ is divided by ${d}$?", f"{a}={q}*{d}+{r}", str(r)
    if level == 3:
        n, r = a * 10 + b % 10, (a * 10 + b % 10) % d
        q = a // d
        s = (a % d) * 10 + b % 10
        return (
            f"What is the remainder when ${n}$ is divided by ${d}$?",
            f"{a}={q}*{d}+{a % d}, {s}={s // d}*{d}+{r}",
            str(r),
        )
    if level == 4:
        r, s = a % d, b % d
        solution = f"{a}={a // d}*{d}+{r}, {b}={b // d}*{d}+{s}, {r}*{s}={r * s}={r * s // d}*{d}+{r * s % d}"
        return f"What is the remainder when ${a} \\cdot {b}$ is divided by ${d}$?", solution, str(r * s % d)
    g, (p, q) = rng.randint(2, 12), rng.choice([(2, 3), (3, 2), (3, 4), (4, 3), (3, 5), (5, 3), (2, 5), (5, 2), (4, 5)])
    return f"What is the greatest common divisor of ${g * p}$ and ${g * q}$?", f"{g * p}={g}*{p}, {g * q}={g}*{q}", str(g)


@subject("Counting & Probability")
def counting(rng: Random, level: int) -> Draw:
    """Products of choices, and probabilities as reduced fractions."""
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    if level == 1:
        a = rng.randint(2, 30)
        thing = rng.choice(("outfits", "shirts and hats"))
        problem = f"How many {thing} can be made from ${a}$ shirts and ${b}$ hats?"
        return problem, _times(a, b), str(a * b)
    if level == 2:
        problem = f"A menu has ${a}$ soups, ${b}$ mains and ${c}$ cakes. How many meals are there?"
        return problem, f"{_times(a, b)}, {_times(a * b, c)}", str(a * b * c)
    if level in (3, 4):
        a, b = rng.randint(1, 19), rng.randint(1, 19)
        text, answer = _reduce(a, a + b)
        problem = f"A bag has ${a}$ red and ${b}$ blue balls. What is the probability of red?"
        return problem, f"{_plus(a, b)}, {text}", answer
    n = a + b
    text, answer = _reduce(a * a, n * n)
    problem = f"A ball is drawn twice, with replacement, from ${a}$ red and ${b}$ blue. What is the probability of two reds?"
    return problem, f"{a}+{b}={n}, {text}", answer


@subject("Geometry")
def geometry(rng: Random, level: int) -> Draw:
    """Rectangles, angles and right triangles."""
    a, b, m = rng.randint(2, 9), rng.randint(11, 40), rng.choice((2, 3, 5, 6, 7))
    sides = f"sides ${a}$ and ${b}$"
    if level == 1:
        return f"What is the perimeter of a rectangle with {sides}?", f"{_plus(b, a)}, {_times(a + b, 2)}", str(2 * (a + b))
    if level == 2:
        return f"What is the area of a rectangle with {sides}?", _times(b, a), str(a * b)
    if level == 3:
        problem = f"What is the area of a rectangle with sides ${a}\\sqrt{{{m}}}$ and ${b}$?"
        return problem, _times(b, a), rf"{a * b}\sqrt{{{m}}}"
    if level == 4:
        p, q = rng.randint(21, 79), rng.randint(21, 79)
        problem = f"Two angles of a triangle are ${p}$ and ${q}$ degrees. What is the third?"
        return problem, f"{_plus(p, q)}, {_minus(180, p + q)}", str(180 - p - q)
    while True:
        p, q = rng.randint(1, 12), rng.randint(1, 12)
        n = p * p + q * q
        if isqrt(n) ** 2 == n or all(n % (k * k) for k in range(2, 13)):
            break
    answer = str(isqrt(n)) if isqrt(n) ** 2 == n else rf"\sqrt{{{n}}}"
    problem = f"A right triangle has legs ${p}$ and ${q}$. How long is the hypotenuse?"
    return problem, f"{p}*{p}={p * p}, {q}*{q}={q * q}, {_plus(p * p, q * q)}", answer


@subject("Intermediate Algebra")
def intermediate_algebra(rng: Random, level: int) -> Draw:
    """Quadratics, radicals and complex numbers."""
    x, a, b, c, d = rng.choice("xynt"), *(rng.randint(2, 9) for _ in range(4))
    if level == 1:
        b = rng.randint(2, 40)
        return f"What is ${x}^2 + {b}$ when ${x} = {a}$?", f"{a}*{a}={a * a}, {_plus(a * a, b)}", str(a * a + b)
    if level == 2:
        problem = f"Expand $({x} + {a})({x} + {b})$."
        return problem, f"{a}+{b}={a + b}, {a}*{b}={a * b}", f"{x}^2+{a + b}{x}+{a * b}"
    if level == 3:
        problem = f"Expand $({a}{x} + {b})({x} + {c})$."
        solution = f"{a}*{c}={a * c}, {_plus(a * c, b)}, {b}*{c}={b * c}"
        return problem, solution, f"{a}{x}^2+{a * c + b}{x}+{b * c}"
    if level == 4:
        m = rng.choice((2, 3, 5, 6, 7))
        problem = f"Simplify ${c}\\sqrt{{{a * a * m}}}$."
        return problem, f"{a * a * m}={a * a}*{m}, {c}*{a}={c * a}", rf"{c * a}\sqrt{{{m}}}"
    real, imag = a * c - b * d, a * d + b * c
    solution = f"{a}*{c}-{b}*{d}={a * c}-{b * d}={real}, {a}*{d}+{b}*{c}={a * d}+{b * c}={imag}"
    return f"Write $({a} + {b}i)({c} + {d}i)$ in the form $a+bi$.", solution, f"{real}+{imag}i"


@subject("Precalculus")
def precalculus(rng: Random, level: int) -> Draw:
    """Vectors and determinants."""
    a, b, c, d, k = (rng.randint(2, 9) for _ in range(5))
    if level == 1:
        return f"What is ${_vector(a, b)} + {_vector(c, d)}$?", f"{a}+{c}={a + c}, {b}+{d}={b + d}", _vector(a + c, b + d)
    if level == 2:
        problem = f"What is ${_vector(a, b)} \\cdot {_vector(c, d)}$?"
        return problem, f"{a}*{c}={a * c}, {b}*{d}={b * d}, {_plus(a * c, b * d)}", str(a * c + b * d)
    if level == 3:
        solution = f"{k}*{a}+{c}={k * a}+{c}={k * a + c}, {k}*{b}+{d}={k * b}+{d}={k * b + d}"
        return f"What is ${k}{_vector(a, b)} + {_vector(c, d)}$?", solution, _vector(k * a + c, k * b + d)
    if level == 4:
        e = rng.randint(2, 9)
        problem = f"What is ${_vector(a, b, c)} \\cdot {_vector(d, k, e)}$?"
        x, y, z = a * d, b * k, c * e
        return problem, f"{a}*{d}={x}, {b}*{k}={y}, {c}*{e}={z}, {_plus(x, y)}, {_plus(x + y, z)}", str(x + y + z)
    problem = rf"What is $\det \begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}$?"
    return problem, f"{a}*{d}={a * d}, {b}*{c}={b * c}, {a * d}-{b * c}={a * d - b * c}", str(a * d - b * c)


def _vector(*entries: int) -> str:
    return r"\begin{pmatrix} " + r" \\ ".join(map(str, entries)) + r" \end{pmatrix}"
