r"""mini-MATH: endless seeded problems in the shape of MATH, small enough for a two-million-parameter policy.

A subject is one function `(rng, level) -> (problem, solution, answer)`, registered under MATH's name for it. The
solution is one line in which every step is a fact about small numbers; answers are LaTeX where MATH has LaTeX.
A hash of the problem's text decides its split, so train and validation cannot share a problem, whatever the seed.
"""

import hashlib
from collections.abc import Callable, Iterator
from math import gcd
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from trl_ext.io import write_jsonl as write_rows
from trl_ext.mini.task import first_rows

if TYPE_CHECKING:
    from datasets import Dataset

Draw = tuple[str, str, str]  # problem, solution, answer
Generator = Callable[[Random, int], Draw]  # of the level, 1 to 5
SUBJECTS: dict[str, Generator] = {}
SPLITS = ("train", "validation")
LEVELS = (1, 2, 3, 4, 5)
VALIDATION_SHARE = 0.2

# Words that a problem can be put in; enough of them for 5,000 distinct problems of validation.
ASKS = (
    "What is ${}$?", "Compute ${}$.", "Find ${}$.", "Evaluate ${}$.", "Calculate ${}$.", "Simplify ${}$.",
    "Work out ${}$.", "Determine ${}$.", "Find the value of ${}$.", "What is the value of ${}$?", "How much is ${}$?",
    "Give the value of ${}$.",
)  # fmt: skip
UNKNOWNS = "abcdhkmnpqrstvwxyz"
VERBS = ("Find", "Determine", "Compute", "Calculate", "State", "Give", "Work out", "Write down")
COLORS = ("red", "blue", "green", "black", "white", "brown", "pink", "gray", "orange")
CLOTHES = ("shirts", "hats", "coats", "shoes", "scarves", "belts")
UNITS = ("", " cm", " m", " km", " feet", " mm", " inches", " miles", " yards", " units", " steps", " meters")


def subject(name: str) -> Callable[[Generator], Generator]:
    """Register a generator as the subject `name`."""

    def register(generator: Generator) -> Generator:
        if name in SUBJECTS:
            raise ValueError(f"subject {name!r} is taken. Known: {', '.join(sorted(SUBJECTS))}")
        SUBJECTS[name] = generator
        return generator

    return register


def split_of(problem: str, validation_share: float = VALIDATION_SHARE) -> str:
    """The split a problem belongs to: a function of its text alone."""
    digest = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:4], "big")
    return "validation" if digest < validation_share * 2**32 else "train"


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
        for _ in range(1000):
            problem, solution, answer = SUBJECTS[name](rng, level)
            if split_of(problem) == split:
                break
        else:
            raise ValueError(f"subject {name!r}, level {level}: no problem of the split {split!r} in 1000 draws")
        if not solution.endswith(answer):
            solution = f"{solution}, {answer}"
        yield {"problem": problem, "solution": solution, "answer": answer, "level": level, "subject": name}


def mini_math(split: str, n: int, seed: int = 0) -> "Dataset":
    """The first `n` rows as a `datasets.Dataset`, distinct ones in validation; a ValueError if there are fewer."""
    from datasets import Dataset

    return Dataset.from_list(first_rows(problems(split, seed), split, n))


def write_jsonl(path: str | Path, split: str, n: int, seed: int = 0) -> Path:
    """Write the rows of `mini_math(split, n, seed)`, one JSON object per line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, first_rows(problems(split, seed), split, n))
    return path


def _frac(a: int, b: int) -> str:
    return rf"\frac{{{a}}}{{{b}}}"


def _coprime(rng: Random, low: int, high: int) -> tuple[int, int]:
    """Two numbers of low..high without a common divisor."""
    while True:
        a, b = rng.randint(low, high), rng.randint(low, high)
        if gcd(a, b) == 1:
            return a, b


@subject("Prealgebra")
def prealgebra(rng: Random, level: int) -> Draw:
    """Sums, differences and products of small numbers."""
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    ask = rng.choice(ASKS)
    if level == 1:
        return ask.format(f"{a} + {b}"), f"{a}+{b}={a + b}", str(a + b)
    if level == 2:
        a = rng.randint(11, 18)
        return ask.format(f"{a} - {b}"), f"{a}-{b}={a - b}", str(a - b)
    if level == 3:
        return ask.format(rf"{a} \cdot {b}"), f"{a}*{b}={a * b}", str(a * b)
    if level == 4:
        a, b, c = rng.randint(2, 5), rng.randint(2, 6), rng.randint(1, 5)
        solution = f"{a}*{b}={a * b}, {a * b}+{c}={a * b + c}"
        return ask.format(rf"{a} \cdot {b} + {c}"), solution, str(a * b + c)
    a, b = rng.randint(2, 5), rng.randint(2, 4)
    solution = f"{a}+{b}={a + b}, {a + b}*{c}={(a + b) * c}"
    return ask.format(rf"({a} + {b}) \cdot {c}"), solution, str((a + b) * c)


@subject("Algebra")
def algebra(rng: Random, level: int) -> Draw:
    """Linear equations and linear expressions in one unknown."""
    x, a, b, c = rng.choice(UNKNOWNS), *(rng.randint(2, 9) for _ in range(3))
    if level == 1:
        return f"Solve ${x} + {a} = {a + b}$ for ${x}$.", f"{a + b}-{a}={b}", str(b)
    if level == 2:
        a = rng.randint(2, 5)
        return f"Solve ${a}{x} = {a * b}$ for ${x}$.", f"{a}*{b}={a * b}", str(b)
    if level == 3:
        return f"Expand ${a}({x} + {b})$.", f"{a}*{b}={a * b}", f"{a}{x}+{a * b}"
    if level == 4:
        a, b, c = rng.randint(2, 4), rng.randint(2, 5), rng.randint(1, 3)
        solution = f"{a * b + c}-{c}={a * b}, {a}*{b}={a * b}"
        return f"Solve ${a}{x} + {c} = {a * b + c}$ for ${x}$.", solution, str(b)
    top, slope, c = *_coprime(rng, 2, 9), rng.randint(1, 3)
    return f"Solve ${slope}{x} + {c} = {top + c}$ for ${x}$.", f"{top + c}-{c}={top}", _frac(top, slope)


@subject("Number Theory")
def number_theory(rng: Random, level: int) -> Draw:
    """Units digits, remainders, greatest common divisors."""
    a, b, d, find = rng.randint(2, 9), rng.randint(2, 9), rng.choice((5, 10)), rng.choice(VERBS)
    if level == 1:
        return f"{find} the units digit of ${a} + {b}$.", f"{a}+{b}={a + b}", str((a + b) % 10)
    if level == 2:
        return f"{find} the units digit of ${a} \\cdot {b}$.", f"{a}*{b}={a * b}", str(a * b % 10)
    if level == 3:
        a, b, c = rng.randint(2, 5), rng.randint(2, 6), rng.randint(1, 5)
        problem = f"{find} the units digit of ${a} \\cdot {b} + {c}$."
        return problem, f"{a}*{b}={a * b}, {a * b}+{c}={a * b + c}", str((a * b + c) % 10)
    if level == 4:
        n = a + b
        problem = f"{find} the remainder when ${a} + {b}$ is divided by ${d}$."
        return problem, f"{a}+{b}={n}, {n}={d}*{n // d}+{n % d}", str(n % d)
    a, (p, q) = rng.randint(2, 5), _coprime(rng, 1, 4)
    problem = f"{find} the greatest common divisor of ${a * p}$ and ${a * q}$."
    return problem, f"{a * p}={a}*{p}, {a * q}={a}*{q}", str(a)


@subject("Counting & Probability")
def counting(rng: Random, level: int) -> Draw:
    """Products of choices, and probabilities as reduced fractions."""
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    x, y, z = rng.sample(COLORS, 3)
    if level == 1:
        first, second = rng.sample(CLOTHES, 2)
        problem = f"How many pairs can be made of ${a}$ {first} and ${b}$ {second}?"
        return problem, f"{a}*{b}={a * b}", str(a * b)
    if level == 2:
        a, b, c = (rng.randint(1, 5) for _ in range(3))
        problem = f"A bag has ${a}$ {x}, ${b}$ {y} and ${c}$ {z} balls. How many balls are there?"
        return problem, f"{a}+{b}={a + b}, {a + b}+{c}={a + b + c}", str(a + b + c)
    if level == 3:
        a, b = _coprime(rng, 1, 9)
        problem = f"A bag has ${a}$ {x} and ${b}$ {y} balls. What is the probability of {x}?"
        return problem, f"{a}+{b}={a + b}", _frac(a, a + b)
    if level == 4:
        a, b = _coprime(rng, 1, 4)
        k = rng.randint(2, 3)
        n, answer = k * (a + b), _frac(a, a + b)
        problem = f"A bag has ${k * a}$ {x} and ${k * b}$ {y} balls. What is the probability of {x}?"
        return problem, f"{k * a}+{k * b}={n}, {_frac(k * a, n)}", answer
    a, b = _coprime(rng, 1, 5)
    n = a + b
    bag = f"${a}$ {x} and ${b}$ {y} balls"
    problem = f"A ball is drawn twice, with replacement, from {bag}. What is the probability of {x} twice?"
    return problem, f"{a}+{b}={n}, {a}*{a}={a * a}, {n}*{n}={n * n}", _frac(a * a, n * n)


@subject("Geometry")
def geometry(rng: Random, level: int) -> Draw:
    """Rectangles, angles and right triangles."""
    a, b, root = rng.randint(2, 9), rng.randint(2, 9), rng.choice((2, 3, 5, 7))
    unit = rng.choice(UNITS)
    if level == 1:
        shape, sides = rng.choice((("triangle", 3), ("square", 4), ("pentagon", 5), ("hexagon", 6)))
        problem = f"What is the perimeter of a regular {shape} with side ${a}${unit}?"
        return problem.replace("regular square", "square"), f"{sides}*{a}={sides * a}", str(sides * a)
    if level == 2:
        problem = f"What is the area of a rectangle with sides ${a}${unit} and ${b}${unit}?"
        return problem, f"{a}*{b}={a * b}", str(a * b)
    if level == 3:
        problem = f"What is the area of a rectangle with sides ${a}\\sqrt{{{root}}}${unit} and ${b}${unit}?"
        return problem, f"{a}*{b}={a * b}", rf"{a * b}\sqrt{{{root}}}"
    if level == 4:
        problem = f"What is the perimeter of a rectangle with sides ${a}${unit} and ${b}${unit}?"
        return problem, f"{a}+{b}={a + b}, 2*{a + b}={2 * (a + b)}", str(2 * (a + b))
    a, b = rng.randint(2, 6), rng.randint(1, 5)
    while any((a * a + b * b) % (k * k) == 0 for k in range(2, 12)):  # the answer must not simplify
        a, b = rng.randint(2, 6), rng.randint(1, 5)
    n = a * a + b * b
    problem = f"A right triangle has legs ${a}${unit} and ${b}${unit}. How long is the hypotenuse?"
    return problem, f"{a}*{a}={a * a}, {b}*{b}={b * b}, {a * a}+{b * b}={n}", rf"\sqrt{{{n}}}"
