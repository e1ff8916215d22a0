"""Problems -> rollout -> grade -> Report: the one evaluator, with the same extraction and grading as the reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.rewards.grade import Verdict

# The handout's three categories.
OUTCOMES = {"correct": "format and answer right", "format_only": "format only", "neither": "neither"}


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    text: str
    tokens: int
    finished: bool  # ended by itself, not cut by the length limit


@dataclass(frozen=True)
class Report:
    """Graded responses, one row each: the problem's fields, `response`, rewards, `tokens`, `finished`, `outcome`."""

    rows: list[dict[str, Any]]

    @property
    def accuracy(self) -> float:
        """Share of responses with format and answer right."""
        return share(row["outcome"] == "correct" for row in self.rows)

    def outcomes(self) -> dict[str, float]:
        """Share of each of `OUTCOMES`."""
        counts = Counter(row["outcome"] for row in self.rows)
        return {name: counts[name] / max(len(self.rows), 1) for name in OUTCOMES}

    def by(self, field: str) -> dict[Any, float]:
        """Accuracy per value of a field such as `level` or `subject`."""
        values = sorted({row[field] for row in self.rows})
        return {v: share(r["outcome"] == "correct" for r in self.rows if r[field] == v) for v in values}

    def summary(self) -> dict[str, Any]:
        """Figures for a log or a JSON file."""
        return {
            "problems": len(self.rows),
            "accuracy": self.accuracy,
            "outcomes": self.outcomes(),
            "by_level": {str(k): v for k, v in self.by("level").items()},
            "by_subject": self.by("subject"),
            "mean_tokens": mean(row["tokens"] for row in self.rows),
            "truncated": share(not row["finished"] for row in self.rows),
        }


def evaluate(
    problems: Iterable[Mapping[str, Any]],
    rollout: Callable[[Sequence[str]], Sequence[Completion]],
    grader: Callable[[Sequence[str], Sequence[Any]], Sequence[Verdict]],
) -> Report:
    """Sample one response per problem and grade it.

    Args:
        problems: rows with `prompt` and `answer`, and `level` and `subject` for the breakdown.
        rollout: prompts -> one completion each, in order.
        grader: responses and truths -> verdicts, such as `GRADERS.build("compatible", answer_format="r1_zero")`.
    """
    rows = [dict(problem) for problem in problems]
    completions = rollout([row["prompt"] for row in rows])
    verdicts = grader([completion.text for completion in completions], [row["answer"] for row in rows])
    for row, completion, verdict in zip(rows, completions, verdicts, strict=True):
        row.update(verdict.rewards(), extracted=verdict.answer, reason=verdict.reason)
        row.update(response=completion.text, tokens=completion.tokens, finished=completion.finished)
        row["outcome"] = "correct" if verdict.right else "format_only" if verdict.in_format else "neither"
    return Report(rows)


def share(flags: Iterable[bool]) -> float:
    """Fraction that is true; 0 of nothing."""
    return mean(float(flag) for flag in flags)


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
