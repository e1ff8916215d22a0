"""Problems -> rollout -> grade -> Report: the one evaluator, with the same extraction and grading as the reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any

import numpy as np

from trl_ext.evaluation.pass_at_n import pass_at_n
from trl_ext.generation.completion import Completion, mean_over_tokens
from trl_ext.rewards.hooks import Grader, takes

# The handout's three categories: format 1 and answer 1; format 1 and answer 0; format 0.
SAMPLES = "samples.jsonl"  # in an evaluation's folder
OUTCOMES = {"correct": "format and answer correct", "format_only": "format only", "neither": "neither"}
HANDOUT_NAMES = {"format1_answer1": "correct", "format1_answer0": "format_only", "format0": "neither"}


@dataclass(frozen=True)
class Report:
    """Graded responses, one row each: the problem's fields, `response`, rewards, `tokens`, `logp`, `outcome`, ..."""

    rows: list[dict[str, Any]]
    samples: int = 1  # of each problem, one row after the other

    @property
    def accuracy(self) -> float:
        """Fraction of correct responses."""
        return mean(map(is_correct, self.rows))

    @property
    def without_verdict(self) -> int:
        """Responses that a judge gave no verdict on, which count as incorrect."""
        return sum(row.get("reward", 0.0) is None for row in self.rows)

    def outcomes(self) -> dict[str, float]:
        """Fraction of each of `OUTCOMES`."""
        counts = Counter(row["outcome"] for row in self.rows)
        return {name: counts[name] / max(len(self.rows), 1) for name in OUTCOMES}

    def per_problem(self) -> dict[Any, float]:
        """Fraction of correct samples by `problem_id`."""
        samples: dict[Any, list[bool]] = {}
        for i, row in enumerate(self.rows):
            samples.setdefault(row.get("problem_id", i), []).append(is_correct(row))
        return {problem: mean(flags) for problem, flags in samples.items()}

    def by(self, field: str) -> dict[Any, float]:
        """Accuracy per value of a field such as `level` or `subject`; empty if the problems have no such field."""
        values = sorted({row[field] for row in self.rows if field in row})
        return {v: mean(is_correct(r) for r in self.rows if r.get(field) == v) for v in values}

    def pass_at(self) -> dict[str, float]:
        """`pass@k` for k = 2, 4, 8, ... up to the samples of a problem; of a single sample nothing but the accuracy."""
        correct = np.array([is_correct(row) for row in self.rows], np.bool_).reshape(-1, self.samples)
        powers = [2**i for i in range(1, self.samples.bit_length())]
        return {f"pass@{k}": float(pass_at_n(correct, k).mean()) for k in powers}

    def summary(self) -> dict[str, Any]:
        """Figures for a log or a JSON file."""
        return {
            "problems": len(self.rows) // self.samples,
            "accuracy": self.accuracy,
            **self.pass_at(),
            "outcomes": self.outcomes(),
            "by_level": {str(k): v for k, v in self.by("level").items()},
            "by_subject": self.by("subject"),
            **({"without_verdict": missing} if (missing := self.without_verdict) else {}),
            "mean_tokens": mean_known(row["tokens"] for row in self.rows),
            "mean_tokens_correct": mean_length(filter(is_correct, self.rows)),
            "mean_tokens_incorrect": mean_length(filterfalse(is_correct, self.rows)),
            "entropy_estimate": mean_over_tokens(self.rows),
            **({"tools": tools} if (tools := tool_figures(self.rows)) else {}),
            "truncated": mean_known(row["finish_reason"] and row["finish_reason"] == "length" for row in self.rows),
        }


def evaluate(
    problems: Iterable[Mapping[str, Any]], rollout: Callable[[Sequence[str]], Sequence[Completion]], grader: Grader
) -> Report:
    """Sample one response per problem and grade it.

    Args:
        problems: rows with `prompt` and `answer`; `level` and `subject`, if there, for the breakdown.
        rollout: prompts -> one completion each, in order.
        grader: (responses, answers) -> grades, such as `GRADERS.build("compatible", answer_format="r1_zero")`.
    """
    listed = list(problems)
    return Report(grade_rows(listed, rollout([problem["prompt"] for problem in listed]), grader))


def grade_rows(
    problems: Sequence[Mapping[str, Any]], completions: Sequence[Completion], grader: Grader
) -> list[dict[str, Any]]:
    """A report's row for each problem and its completion."""
    asked: dict[str, Any] = {"problems": list(map(_problem, problems))} if takes(grader, "problems") else {}
    if takes(grader, "tolerances") and any(row.get("tolerance") for row in problems):
        asked["tolerances"] = [row.get("tolerance") or 0.0 for row in problems]
    texts, answers = [completion.text for completion in completions], [row["answer"] for row in problems]
    grades = grader(texts, answers, **asked)
    return [
        {
            **problem,
            **grade.rewards(),
            "extracted": grade.answer,
            "reason": grade.reason,
            **({"reward": None} if grade.score is not None and math.isnan(grade.score) else {}),
            **grade.columns,
            "response": completion.text,
            "tokens": completion.tokens,
            "finish_reason": "stop" if completion.finished else "length",
            "logp": completion.logp,
            "entropy_estimate": completion.entropy_estimate,
            "outcome": "correct" if grade.correct else "format_only" if grade.well_formed else "neither",
            **({} if completion.turns is None else {"turns": completion.turns, "calls": calls_in(completion.turns)}),
        }
        for problem, completion, grade in zip(problems, completions, grades, strict=True)
    ]


def calls_in(turns: Sequence[Mapping[str, Any]]) -> int:
    """The number of calls that tools have answered."""
    return sum(len(turn.get("tool", ())) for turn in turns)


def tool_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What responses that may call tools did with them; empty where they may not."""
    told = [row for row in rows if row.get("turns") is not None]
    if not told:
        return {}
    kinds = [kind for row in told for turn in row["turns"] for kind in turn.get("outcome", ())]
    figures: dict[str, float] = {
        "calls_per_response": len(kinds) / len(told),
        "calls_failed": sum(kind == "failed" for kind in kinds) / max(len(kinds), 1),
        "calls_timed_out": sum(kind == "timeout" for kind in kinds) / max(len(kinds), 1),
        "responses_with_call": sum(row["calls"] > 0 for row in told) / len(told),
    }
    for name, chosen in {
        "with": [row for row in told if row["calls"]],
        "without": [row for row in told if not row["calls"]],
    }.items():
        if chosen:
            figures[f"accuracy_{name}_call"] = sum(map(is_correct, chosen)) / len(chosen)
    return figures


def _problem(row: Mapping[str, Any]) -> str:
    return str(row.get("problem") or row.get("prompt") or "")


def is_correct(row: Mapping[str, Any]) -> bool:
    """Whether the row's response has a correct format and answer."""
    return bool(row["outcome"] == "correct")


def mean_length(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean length in tokens; None of no rows, and where it is not known."""
    lengths = [row["tokens"] for row in rows if row["tokens"] is not None]
    return mean(lengths) if lengths else None


def mean_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; None if none of them is, 0 of nothing."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return mean(known) if known or not listed else None


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean, of flags the fraction that is true; 0 of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
