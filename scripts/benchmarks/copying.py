"""What policies earn that copy a part of the problem into their answer and think nothing, by grader.

    python -m scripts.benchmarks.copying                            mini-MATH, 2,000 problems
    python -m scripts.benchmarks.copying --rows math_test.jsonl --show 50
    python -m scripts.benchmarks.copying --train                    whether training rewards a policy that copies

A row of a file has `problem` and `answer`, or `solution` with a box. Prints Markdown; `--show` lists rows that `strict`
pays although it knows the problem, which are those whose text holds the answer itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trl_ext.io import markdown_table, read_jsonl
from trl_ext.mini.problems import problems
from trl_ext.rewards import GRADERS, REWARDS
from trl_ext.rewards.extract import boxed_content
from trl_ext.rewards.graders import Grade

_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
RESPONSE = "</think> <answer> {} </answer>"
Row = tuple[str, str]  # problem, reference answer


def formulas(problem: str) -> list[str]:
    """What stands between dollars or TeX's brackets; the whole problem if nothing does."""
    return [next(filter(None, match.groups())).strip() for match in _FORMULA.finditer(problem)] or [problem]


POLICIES: dict[str, Callable[[str], str]] = {
    "the first formula": lambda problem: formulas(problem)[0],
    "the last formula": lambda problem: formulas(problem)[-1],
    "the longest formula": lambda problem: max(formulas(problem), key=len),
    "all formulas, joined by commas": lambda problem: ", ".join(formulas(problem)),
    "all formulas, joined by signs of equality": lambda problem: " = ".join(formulas(problem)),
    "the whole problem": lambda problem: problem,
}


def rows_of(path: Path) -> list[Row]:
    """The rows of a file with a reference answer."""
    pairs = [(row["problem"], row.get("answer") or boxed_content(row["solution"])) for row in read_jsonl(path)]
    return [(problem, answer) for problem, answer in pairs if answer]


def mini_math(n: int, seed: int = 0) -> list[Row]:
    """Rows of mini-MATH's training split."""
    return [(row["problem"], row["answer"]) for row in islice(problems("train", seed), n)]


def graded(rows: Sequence[Row], policy: str, grader: str) -> Sequence[Grade]:
    """The grades of a policy's answers, by a grader with a name in `GRADES`."""
    name, options, knows_problem = GRADES[grader]
    known = {"problems": [problem for problem, _ in rows]} if knows_problem else {}
    responses = [RESPONSE.format(POLICIES[policy](problem)) for problem, _ in rows]
    grades: Sequence[Grade] = GRADERS[name](responses, [answer for _, answer in rows], **options, **known)
    return grades


GRADES: dict[str, tuple[str, dict[str, bool], bool]] = {  # name: the grader, its options, whether it knows the problem
    "strict": ("strict", {}, True),
    "strict, problem not known": ("strict", {}, False),
    "strict, worked_out=False": ("strict", {"worked_out": False}, False),
    "compatible": ("compatible", {}, False),
}


KINDS = ("copied", "right", "wrong")  # of the answers of the policy that is trained


def trained_shares(worked_out: bool, steps: int = 60, rate: float = 0.5, seed: int = 0) -> dict[str, float]:
    """The shares of copied, correct and incorrect answers after GRPO on Prealgebra, which begins at 30, 10 and 60 %.

    The policy has a logit for each kind of answer, and nothing else. A step has 16 problems with 8 responses each, paid
    by the reward of training, which knows the prompts; the advantages are those of the group's mean and deviation.
    """
    draw = np.random.default_rng(seed)
    sums = [row for row in islice(problems("train", seed), 2000) if row["subject"] == "Prealgebra"]
    logits = np.log(np.array([0.3, 0.1, 0.6]))
    for _ in range(steps):
        shares = np.exp(logits) / np.exp(logits).sum()
        chosen = draw.choice(len(sums), 16)
        kinds = draw.choice(len(KINDS), (16, 8), p=shares)
        texts = [_answer(sums[place], KINDS[kind]) for place, row in zip(chosen, kinds, strict=True) for kind in row]
        rewards = REWARDS["strict"](
            prompts=[sums[place]["problem"] for place in chosen for _ in range(8)],
            completions=[RESPONSE.format(text) for text in texts],
            answer=[sums[place]["answer"] for place in chosen for _ in range(8)],
            worked_out=worked_out,
        )
        paid = np.array(rewards).reshape(16, 8)
        advantages = (paid - paid.mean(1, keepdims=True)) / (paid.std(1, keepdims=True) + 1e-4)
        gradient = np.stack([(advantages * ((kinds == kind) - shares[kind])).mean() for kind in range(len(KINDS))])
        logits = logits + rate * gradient
    shares = np.exp(logits) / np.exp(logits).sum()
    return dict(zip(KINDS, shares.tolist(), strict=True))


def _answer(row: dict[str, Any], kind: str) -> str:
    return formulas(row["problem"])[0] if kind == "copied" else row["answer"] + "1" * (kind == "wrong")


def holds_answer(answer: str, copied: str) -> bool:
    """Whether a copied text is the reference answer itself, without signs that mean nothing."""
    bare = [re.sub(r"[\s$.]", "", text) for text in (answer, copied)]
    return bare[0] == bare[1]


def main() -> None:
    """Grade every policy by every grader and print the shares that are paid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, metavar="FILE", help="JSONL with problem and answer or solution")
    parser.add_argument("--problems", type=int, default=2000, help="problems of mini-MATH (default: 2000)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="list N rows that strict pays, by their line")
    parser.add_argument("--train", action="store_true", help="train a policy of three kinds of answers")
    args = parser.parse_args()
    if args.train:
        print("begins with 30 % copied, 10 % correct and 60 % incorrect answers; after 60 steps:")
        for worked_out in (True, False):
            after = trained_shares(worked_out).items()
            print(f"worked_out={worked_out}: " + ", ".join(f"{100 * share:.0f} % {kind}" for kind, share in after))
        return
    rows = rows_of(args.rows) if args.rows else mini_math(args.problems)
    table, paid = [], dict[int, tuple[str, str]]()
    for policy, copy in POLICIES.items():
        grades = {name: graded(rows, policy, name) for name in GRADES}
        shares = [sum(grade.correct for grade in of) for of in grades.values()]
        table.append((policy, *(f"{share} ({100 * share / len(rows):.1f} %)" for share in shares)))
        for line, (grade, (problem, answer)) in enumerate(zip(grades["strict"], rows, strict=True), start=1):
            if grade.correct:
                paid.setdefault(line, (copy(problem), answer))
    print("\n".join(markdown_table((f"copies, of {len(rows)}", *GRADES), table)))
    for line, (copied, answer) in sorted(paid.items())[: args.show]:
        print(f"- {line}: `{copied}` for `{answer}`")


if __name__ == "__main__":
    main()
