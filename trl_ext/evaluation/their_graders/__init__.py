"""Graders of lm-eval, lighteval and inspect, as they are installed, on our samples; in workers, as ours.

Each module imports its library when a worker loads it, so that neither is needed here; each function takes a whole
response and a reference answer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.errors import InputError
from trl_ext.registry import unknown
from trl_ext.rewards.ground_truth import accepted_answers
from trl_ext.rewards.workers.pool import Failure, Pool, WorkerLimits


@dataclass(frozen=True)
class TheirGrader:
    """Where a grader of another library is called."""

    library: str  # the module that has to be there
    install: str
    function: str  # in a module of this package


_PLACE = "trl_ext.evaluation.their_graders"
THEIR_GRADERS = {
    "lm_eval_gsm8k_strict": TheirGrader("lm_eval", "lm_eval", f"{_PLACE}.lm_eval_gsm8k:strict"),
    "lm_eval_gsm8k_flexible": TheirGrader("lm_eval", "lm_eval", f"{_PLACE}.lm_eval_gsm8k:flexible"),
    "lm_eval_hendrycks_math": TheirGrader("lm_eval", "lm_eval", f"{_PLACE}.lm_eval_math:hendrycks_math"),
    "lm_eval_minerva_math": TheirGrader("lm_eval", "lm_eval[math]", f"{_PLACE}.lm_eval_minerva:exact"),
    "lm_eval_minerva_verify": TheirGrader("lm_eval", "lm_eval[math]", f"{_PLACE}.lm_eval_minerva:verify"),
    "lighteval_gsm8k": TheirGrader("lighteval", "lighteval", f"{_PLACE}.lighteval_math:gsm8k"),
    "lighteval_math_500": TheirGrader("lighteval", "lighteval", f"{_PLACE}.lighteval_math:math_500"),
    "inspect_match_numeric": TheirGrader("inspect_ai", "inspect_ai", f"{_PLACE}.inspect_match:numeric"),
}
_LIMITS = WorkerLimits(seconds=10, workers=1)  # theirs give up by themselves after 5 s, where they do


def verdicts_of(name: str, pairs: Sequence[tuple[str, Any]]) -> list[tuple[bool | None, str]]:
    """Verdict and reason of each response and reference answer; of several answers, any; None where none was reached.

    Raises:
        UnknownName: no such grader.
        InputError: its library is not installed.
        PoolError: the workers cannot start.
    """
    if name not in THEIR_GRADERS:
        raise unknown("grader of another library", name, THEIR_GRADERS)
    grader = THEIR_GRADERS[name]
    if importlib.util.find_spec(grader.library) is None:
        raise InputError(
            f"{name} needs {grader.library}: pip install {grader.install}, in an environment of its own if need be"
        )
    jobs = [
        (place, (response, truth)) for place, (response, given) in enumerate(pairs) for truth in accepted_answers(given)
    ]
    with Pool(grader.function, _LIMITS) as pool:
        outcomes = pool.map([job for _, job in jobs])
    verdicts: list[tuple[bool | None, str]] = [(None, "")] * len(pairs)
    for (place, _), outcome in zip(jobs, outcomes, strict=True):
        if verdicts[place][0] is not True:
            verdicts[place] = (
                (None, outcome.kind) if isinstance(outcome, Failure) else (bool(outcome[0]), str(outcome[1]))
            )
    return verdicts
