"""`judge` among the graders: one language model's verdicts as grades."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trl_ext.errors import InputError
from trl_ext.rewards.graders import GRADERS, Grade, read_answer, texts_of
from trl_ext.rewards.ground_truth import accepted_answers
from trl_ext.rewards.judge.judging import Judged, Judgment, judge_of
from trl_ext.rewards.judge.prompt import Case
from trl_ext.rewards.judge.settings import Rubric

NO_VERDICT = "no verdict"
NEEDS_A_FILE = (
    "judge needs a file that says which model judges: --judge judge.yaml with url: http://localhost:8000/v1 and model: "
    "its name there"
)


@GRADERS.register
def judge(
    responses: Sequence[str],
    references: Sequence[object],
    *,
    judge_file: str | None = None,
    problems: Sequence[str] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
) -> list[Grade]:
    """A language model scores each response by the criteria of a rubric; correct from the rubric's threshold on.

    A response without a verdict has the reward NaN, which TRL leaves out, and counts as incorrect in an evaluation.

    Args:
        references: per response a text, a number, a list of accepted answers, or None.
        judge_file: see `JudgeSettings`.
        problems: the problem or the whole prompt of each response, if known.
        log_metric: gets calls, cache hits, failures, seconds and mean scores.

    Raises:
        JudgeError: too many in a row had no verdict.
    """
    texts = texts_of(responses)
    if judge_file is None:
        raise InputError(NEEDS_A_FILE)
    asked = [None] * len(texts) if problems is None else problems
    cases = [
        Case(text, problem, None if reference is None else " or ".join(accepted_answers(reference)))
        for text, problem, reference in zip(texts, asked, references, strict=True)
    ]
    model = judge_of(judge_file)
    judgment = model(cases)
    if log_metric:
        for name, value in metrics(model.rubric, judgment).items():
            log_metric(name, value)
    return [_grade(model.rubric, text, one) for text, one in zip(texts, judgment.judged, strict=True)]


def metrics(rubric: Rubric, judgment: Judgment) -> dict[str, float]:
    """Counts of one rollout, and the mean scores, from 0 to 1, of the responses that have a verdict."""
    verdicts = [one.verdict for one in judgment.judged if one.verdict]
    counts = {name: float(getattr(judgment, name)) for name in ("calls", "cache_hits", "failures", "seconds")}
    means = {
        f"score/{name}": sum(verdict.scores[name] for verdict in verdicts) / (len(verdicts) * rubric.scale)
        for name in rubric.criteria
        if verdicts
    }
    return {f"judge/{name}": value for name, value in {**counts, **means}.items()}


def _grade(rubric: Rubric, response: str, judged: Judged) -> Grade:
    answer, verdict = read_answer(response), judged.verdict
    if verdict is None:
        return Grade(answer is not None, answer, False, judged.why, NO_VERDICT, math.nan, {"judge_scores": None})
    score = rubric.score(verdict.scores)
    is_correct = score >= rubric.threshold
    return Grade(answer is not None, answer, is_correct, verdict.reason, None, score, {"judge_scores": verdict.scores})
