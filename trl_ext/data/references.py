"""Can the run's grader accept anything for a reference answer? Graded before a model loads, against itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from trl_ext.data.load import ANSWER_SOURCES
from trl_ext.data.source import Source
from trl_ext.ranks import run_on_main_and_broadcast
from trl_ext.rewards.graders import GRADERS, Comparison, Grade, compare_pairs
from trl_ext.rewards.ground_truth import accepted_answers
from trl_ext.rewards.workers.pool import PoolError

if TYPE_CHECKING:
    from datasets import Dataset

COMPARING = ("strict", "compatible")  # graders for which a reference answer is itself a correct answer
_RESPONSES = {"r1_zero": "</think> <answer> {} </answer>", "boxed": r"\boxed{{{}}}"}
_READABLE = Comparison("trl_ext.rewards.strict:is_readable")
_CHUNK = 1024  # answers graded between two moves of the progress bar
_PROSE = 200  # characters; no answer of MATH is as long
_SHOWN = 60  # characters of an answer in a message


@dataclass(frozen=True)
class Checker:
    """A run's grader, to be tried on its own reference answers."""

    grader: str  # one of `COMPARING`
    answer_format: str  # of the responses
    answer_source: str  # where the answers were taken from in their column

    def unusable(self, answers: Sequence[Any], quiet: bool = True) -> dict[int, str]:
        """By their places, the answers that no response, or none that a model would write, can match; and why."""
        reasons: dict[int, str] = {}
        starts = range(0, len(answers), _CHUNK)
        for start in tqdm(starts, desc="reference answers", delay=2, disable=quiet, leave=False):
            part = self._unusable(answers[start : start + _CHUNK])
            reasons |= {start + place: reason for place, reason in part.items()}
        return reasons

    def _unusable(self, answers: Sequence[Any]) -> dict[int, str]:
        texts = [accepted_answers(answer) for answer in answers]
        verdicts = self._grade([accepted[0] for accepted in texts], answers)
        reasons = {
            place: f"{self.grader} does not accept it for itself: {verdict.reason}"
            for place, verdict in enumerate(verdicts)
            if not verdict.correct
        }
        for source in sorted(set(ANSWER_SOURCES) - {self.answer_source, "as_is"}):
            reasons = {**self._solutions(source, texts), **reasons}
        return {**self._unreadable(texts), **reasons}

    def _grade(self, given: Sequence[str], answers: Sequence[Any]) -> Sequence[Grade]:
        grade = GRADERS.build(self.grader, answer_format=self.answer_format)
        return list(grade([_RESPONSES[self.answer_format].format(text) for text in given], answers))

    def _solutions(self, source: str, texts: Sequence[Sequence[str]]) -> dict[int, str]:
        """Texts that are a whole solution: the answer in it is not accepted."""
        extract = ANSWER_SOURCES[source]
        held = {place: extract(accepted[0]) for place, accepted in enumerate(texts) if len(accepted) == 1}
        inner = {place: answer for place, answer in held.items() if answer not in (None, texts[place][0])}
        verdicts = self._grade(list(inner.values()), [texts[place][0] for place in inner])
        return {
            place: f"a solution, in which {source} finds {_shortened(answer)}"
            for (place, answer), verdict in zip(inner.items(), verdicts, strict=True)
            if not verdict.correct
        }

    def _unreadable(self, texts: Sequence[Sequence[str]]) -> dict[int, str]:
        """Texts that only the very same text matches: the strict grader cannot read them, or they are prose."""
        shortest = 0 if self.grader == "strict" else _PROSE
        hard = {text for accepted in texts for text in accepted if not text.removeprefix("-").isdigit()}
        asked = sorted(text for text in hard if len(text) > shortest)
        read = compare_pairs(_READABLE, [("", text) for text in asked])
        bad = {text for (_, text), outcome in read.items() if isinstance(outcome, tuple) and not outcome[0]}
        return {
            place: "it cannot be read as an answer, so that only the same text matches it"
            for place, accepted in enumerate(texts)
            if all(text in bad for text in accepted)
        }


def check_references(
    rows: Dataset | Mapping[str, Sequence[Any]], role: str, source: Source, checker: Checker, quiet: bool
) -> None:
    """Refuse rows, with columns `answer` and `row`, most of whose answers match nothing; note a few in `source`.

    Raises:
        ValueError: with the first such row, and the `answer_source` that would do.
    """
    if source.available is None or checker.grader not in COMPARING or checker.answer_format not in _RESPONSES:
        return
    answers, numbers = list(rows["answer"]), list(rows["row"])
    reasons = checker.unusable(answers, quiet)
    lines = {
        numbers[place]: f"{source.place(numbers[place])}: {_shortened(answers[place])} ({reason})"
        for place, reason in reasons.items()
    }
    if len(reasons) * 2 > len(answers):
        raise ValueError(
            f"{role}: {len(reasons)} of {len(answers)} reference answers of {source.file()!r} cannot be matched by "
            f"the {checker.grader} grader, such as {lines[min(lines)]}. "
            + _advice([answers[place] for place in reasons], checker)
        )
    source.unusable = [lines[number] for number in sorted(lines)]


def first_rank(check: Callable[[], None]) -> None:
    """Run a check on the first rank, whose refusal every rank raises: a worker's timeout may come on one only."""

    def checked() -> None:
        try:
            check()
        except PoolError as error:
            raise ValueError(str(error)) from error

    run_on_main_and_broadcast(checked, ValueError)


def _advice(answers: Sequence[Any], checker: Checker) -> str:
    """Which `answer_source` would make the most of these answers usable."""
    others = sorted(set(ANSWER_SOURCES) - {checker.answer_source})
    usable = {name: _usable_with(name, answers, checker) for name in others}
    best = max(others, key=usable.__getitem__)
    if not usable[best]:
        return "No answer_source makes them usable: look at --answer_column, or choose another grader"
    return f"With --answer_source {best} {usable[best]} of them can be"


def _usable_with(source: str, answers: Sequence[Any], checker: Checker) -> int:
    texts = [ANSWER_SOURCES[source](accepted[0]) for accepted in map(accepted_answers, answers)]
    extracted = [text for text in texts if text is not None]
    return len(extracted) - len(replace(checker, answer_source=source).unusable(extracted))


def _shortened(answer: object) -> str:
    text = repr(answer)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"
