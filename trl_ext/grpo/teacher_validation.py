"""The teachers on a run's own validation problems: the accuracy that its policy cannot be expected to pass by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate import PartialState

from trl_ext.evaluation.evaluator import Report, grade_rows
from trl_ext.evaluation.statistics import wilson_interval
from trl_ext.generation.completion import Completion, Sampling
from trl_ext.generation.model_files import not_sharded
from trl_ext.generation.progress import reporting
from trl_ext.generation.samplers import HFSampler
from trl_ext.grpo.local_teacher import load_teacher
from trl_ext.grpo.served_teacher import TeacherServer
from trl_ext.ranks import gather_on_main, run_on_main_and_broadcast
from trl_ext.rewards.hooks import Grader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trl_ext.grpo.config import ExtGRPOConfig

Sampled = Callable[[Sequence[str], Sequence[int]], list[Completion]]


@dataclass(frozen=True)
class TeacherValidation:
    """How teachers are validated: one sample of each problem, by HF generate or their server.

    Args:
        problems: rows with `prompt` and `answer`.
        tokenizer: the policy's, which is the teachers' too.
        batch_size: of HF generate.
    """

    problems: Sequence[Mapping[str, Any]]
    grader: Grader
    sampling: Sampling
    tokenizer: PreTrainedTokenizerBase
    batch_size: int

    def of(self, config: ExtGRPOConfig) -> dict[str, dict[str, Any]]:
        """By each teacher's name: accuracy, its 95 % interval, and what the policy's validations have too.

        Each is loaded, asked and dropped, before the next one is; ranks share the problems. A collective operation.
        """
        found = {}
        for name, model in config.teacher_models.items():
            with not_sharded():  # by ZeRO-3, which could generate nothing with it
                loaded = load_teacher(model, config).to(PartialState().device)
            found[name] = self._measured(name, HFSampler(model, self.sampling, self.batch_size, loaded=loaded))
        for name, url in config.teacher_urls.items():
            known = {"sampling": self.sampling, "tokenizer": self.tokenizer}
            found[name] = self._measured(name, functools.partial(TeacherServer(url).sample, **known))
        return found

    def _measured(self, name: str, sample: Sampled) -> dict[str, Any]:
        state, prompts = PartialState(), [row["prompt"] for row in self.problems]
        mine = range(state.process_index, len(prompts), state.num_processes)
        with reporting(f"validation of teacher {name}", len(mine), self.sampling.max_tokens):
            completions = sample([prompts[number] for number in mine], list(mine)) if len(mine) else []
        of_ranks = gather_on_main([completions])

        def graded() -> dict[str, Any]:
            ranks = len(of_ranks)
            answers = [of_ranks[number % ranks][number // ranks] for number in range(len(prompts))]
            report = Report(grade_rows(list(self.problems), answers, self.grader))
            right = round(report.accuracy * len(prompts))
            return {**report.summary(), "accuracy_interval": list(wilson_interval(right, len(prompts)))}

        return run_on_main_and_broadcast(graded)
