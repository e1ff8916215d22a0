"""Answers graded per second: ours, math-verify's `parse` and `verify`, and TRL's `accuracy_reward`, on the same pairs.

Two sets: `realistic`, drawn like the answers of a MATH validation (mostly short, half of them correct), and `hard`,
the rows of tests/data/grader_parity.jsonl. Ours runs with its workers and an empty cache; math-verify runs in this
process, one pair after the other. Each set is timed `--rounds` times in alternation and the medians are compared.

    python scripts/bench_grader.py
    python scripts/bench_grader.py --json docs/results/grader_speed.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from trl_ext.rewards import GRADERS
from trl_ext.rewards.graders import forget_verdicts
from trl_ext.rewards.ground_truth import accepted_answers
from trl_ext.runs.provenance import provenance

PARITY = Path(__file__).parents[2] / "tests" / "data" / "grader_parity.jsonl"
RESPONSE = "Some reasoning that leads there. </think> <answer> {} </answer>"

Pair = tuple[str, str]


def realistic_pairs(n: int, seed: int) -> list[Pair]:
    """Answers with references: two thirds integers, the rest fractions, decimals, radicals, polynomials, words, ..."""
    draw = random.Random(seed)
    return [_pair(draw) for _ in range(n)]


def _pair(draw: random.Random) -> Pair:
    kind = draw.choices(range(len(KINDS)), WEIGHTS)[0]
    reference, respelled = KINDS[kind](draw)
    fate = draw.random()
    if fate < 0.45:
        return reference, reference
    if fate < 0.55:
        return respelled, reference
    return KINDS[kind](draw)[draw.random() < 0.2], reference


def _integer(draw: random.Random) -> Pair:
    n = draw.choice([draw.randint(-20, 100), draw.randint(0, 10_000)])
    return str(n), f"{n}."


def _fraction(draw: random.Random) -> Pair:
    a, b = draw.randint(1, 60), draw.randint(2, 40)
    return rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}"


def _decimal(draw: random.Random) -> Pair:
    n = draw.randint(1, 9999) / 100
    return f"{n}", f"{n:.3f}"


def _radical(draw: random.Random) -> Pair:
    a, b = draw.randint(2, 12), draw.choice([2, 3, 5, 6, 7, 11])
    return rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"


def _polynomial(draw: random.Random) -> Pair:
    a, b, c = (draw.randint(1, 9) for _ in range(3))
    return f"{a}x^2+{b}x+{c}", f"{c} + {b}x + {a}x^2"


def _tuple(draw: random.Random) -> Pair:
    a, b = draw.randint(-9, 9), draw.randint(-9, 9)
    return f"({a},{b})", rf"\left({a}, {b}\right)"


def _word(draw: random.Random) -> Pair:
    word = draw.choice(["Evelyn", "Tuesday", "even", "A", "B", "C", "ellipse"])
    return rf"\text{{{word}}}", word


def _interval(draw: random.Random) -> Pair:
    a = draw.randint(-9, 9)
    return rf"[{a},\infty)", rf"\left[{a}, \infty\right)"


KINDS: Sequence[Callable[[random.Random], Pair]] = (
    _integer, _fraction, _decimal, _radical, _polynomial, _tuple, _word, _interval,
)  # fmt: skip
WEIGHTS = (66, 12, 4, 5, 5, 3, 3, 2)


def hard_pairs() -> list[Pair]:
    """The answers in the parity rows, with their reference answers."""
    rows = [json.loads(line) for line in PARITY.read_text(encoding="utf-8").splitlines()]
    pairs = []
    for row in rows:
        extracted = GRADERS["compatible"]([row["response"]], [""], answer_format=_format(row["fn"]))[0].answer
        if extracted is not None and accepted_answers(row["ground_truth"]):
            pairs.append((extracted, accepted_answers(row["ground_truth"])[0]))
    return pairs


def _format(function: str) -> str:
    return "boxed" if function == "question_only" else function


def ours(name: str) -> Callable[[Sequence[Pair]], list[bool]]:
    """A grader of ours on whole responses, with an empty cache."""

    def grade(pairs: Sequence[Pair]) -> list[bool]:
        forget_verdicts()
        responses = [RESPONSE.format(answer) for answer, _ in pairs]
        return [verdict.correct for verdict in GRADERS[name](responses, [reference for _, reference in pairs])]

    return grade


def math_verify(pairs: Sequence[Pair]) -> list[bool]:
    """Its `parse` of both sides and its `verify`, with its own time limits."""
    from math_verify import parse, verify

    return [bool(verify(parse(f"${reference}$"), parse(f"${answer}$"))) for answer, reference in pairs]


def trl_accuracy(pairs: Sequence[Pair]) -> list[bool]:
    r"""TRL's reward, which wants a `\boxed`; None (it cannot parse the reference answer) counts as incorrect."""
    from trl.rewards import accuracy_reward

    completions = [[{"role": "assistant", "content": rf"$\boxed{{{answer}}}$"}] for answer, _ in pairs]
    rewards = accuracy_reward(completions=completions, solution=[f"${reference}$" for _, reference in pairs])
    return [reward == 1.0 for reward in rewards]


GRADES = {
    "strict": ours("strict"),
    "compatible": ours("compatible"),
    "math-verify": math_verify,
    "TRL accuracy_reward": trl_accuracy,
}


def measure(pairs: Sequence[Pair], rounds: int, label: str) -> dict[str, dict[str, float]]:
    """Answers per second (median over rounds) and agreement with the strict grader, by grader."""
    seconds: dict[str, list[float]] = {name: [] for name in GRADES}
    verdicts: dict[str, list[bool]] = {}
    others = realistic_pairs(10_000, seed=-1)
    for grade in GRADES.values():
        grade(pairs[:20])  # imports, workers
    with tqdm(total=rounds * len(GRADES), desc=label) as bar:
        for _ in range(rounds):
            for name, grade in GRADES.items():
                if name in GRADERS:
                    grade(others)  # so that the workers have none of these pairs in their cache
                began = time.perf_counter()
                verdicts[name] = grade(pairs)
                seconds[name].append(time.perf_counter() - began)
                bar.update()
    reference = median(seconds["math-verify"])
    return {
        name: {
            "answers_per_second": len(pairs) / median(seconds[name]),
            "ratio_to_math_verify": reference / median(seconds[name]),
            "agreement_with_strict": sum(map(bool.__eq__, verdicts[name], verdicts["strict"])) / len(pairs),
        }
        for name in GRADES
    }


def main() -> None:
    """Measure both sets, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=5000, help="size of the realistic set (default: 5000)")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each grader (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the realistic set (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, with versions and hardware")
    args = parser.parse_args()
    if args.answers < 20 or args.rounds < 1:
        parser.error("at least 20 answers and 1 round")
    sets = {"realistic": realistic_pairs(args.answers, args.seed), "hard": hard_pairs()}
    results: dict[str, Any] = {name: measure(pairs, args.rounds, name) for name, pairs in sets.items()}
    print("| set | grader | answers per second | times math-verify | agrees with strict |")
    print("| --- | --- | --- | --- | --- |")
    for set_name, by_grader in results.items():
        for grader, figures in by_grader.items():
            print(
                f"| {set_name} ({len(sets[set_name])}) | {grader} | {figures['answers_per_second']:,.0f} "
                f"| {figures['ratio_to_math_verify']:.1f} | {figures['agreement_with_strict']:.3f} |"
            )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**results, **provenance()}, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
