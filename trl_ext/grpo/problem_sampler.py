"""`ProblemSampler`: which problems a rollout is of, and which of its completions are trained on.

Letters: P prompts, G completions per prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_ext.algorithms.selection import rewards_differ
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.curriculum import Curriculum
from trl_ext.grpo.dynamic_sampling import sample_until_full
from trl_ext.grpo.rollout import Rollout, SampledBatch
from trl_ext.step import Rows, TRLBatch
from trl_ext.training.stopping import TimeBudget

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainerCallback


class ProblemSampler:
    """The curriculum, the selection of rollouts, and dynamic sampling, as far as the config asks for them.

    Args:
        dataset: the rows to train on.
        accelerator: of the ranks, which choose alike.
        ignores_zero: rows with advantage 0 have no gradient.
        log: takes the name and a value of a metric.
    """

    def __init__(
        self,
        config: ExtGRPOConfig,
        dataset: object,
        accelerator: Accelerator,
        ignores_zero: bool,
        log: Callable[[str, float], None],
    ) -> None:
        self.config, self.accelerator = config, accelerator
        self.dataset: Any = dataset
        self.ignores_zero, self.log = ignores_zero, log
        self.select = config.selection_fn() if config.uses_axes else None
        self.curriculum: Curriculum | None = None
        if config.uninformative_keep_prob < 1 or config.dynamic_sampling_tries > 1:
            self.curriculum = Curriculum.of_dataset(dataset, config.uninformative_keep_prob, config.seed)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {} if self.curriculum is None else {"curriculum": self.curriculum.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a checkpoint, which may be of a run without a curriculum."""
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.load_state_dict(state["curriculum"])

    def selected(
        self, rows: list[dict[str, Any]], call: int, attempt: int = 0
    ) -> tuple[list[dict[str, Any]], list[int] | None]:
        """This rank's rows, or others in their place, and by number the problem of each; None without a curriculum.

        Args:
            call: number of the `training_step` call in the run; micro-steps depend on the ranks, rollouts do not.
            attempt: the number of tries at this rollout before.
        """
        if self.curriculum is None:
            return rows, None
        rollout = call // (self.config.steps_per_generation * self.config.num_iterations)
        first_row = self.accelerator.process_index * len(rows)
        prompts = [row["prompt"] for row in rows]
        problems = self.curriculum.select(prompts, first_row, self._group_size, rollout, attempt)
        return [self.dataset[problem] for problem in problems], problems

    def kept(self, rollout: Rollout) -> Tensor:
        """(P, G) bool: the completions of all ranks that are trained on."""
        assert self.select is not None
        return rollout.kept(self.select, self._group_size, self.accelerator.gather)

    def left_out(self, rollout: Rollout) -> Tensor | None:
        """(P, G) bool: the completions of all ranks that are not trained on; None without a selection."""
        if self.select is None:
            return None
        is_left_out = ~self.kept(rollout) & ~rollout.reward.view(-1, self._group_size).isinf()
        self.log("rollout_selection/kept_frac", 1 - is_left_out.sum().item() / is_left_out.numel())
        return is_left_out

    def resampled(
        self,
        first: SampledBatch,
        sample: Callable[[int], SampledBatch],
        began: float,
        callbacks: Sequence[TrainerCallback],
    ) -> SampledBatch:
        """A rollout with other problems in place of uninformative ones, as far as tries and time allow.

        Args:
            sample: gives a further try, given the number of tries before it.
            began: when the first try did, by `time.perf_counter`.
            callbacks: the trainer's, of which a time budget is kept.
        """

        def judge(attempt: SampledBatch) -> list[bool]:
            informative: list[bool] = self.kept(attempt.rollout).any(dim=1).tolist()
            assert attempt.problems is not None
            self._update(attempt.problems, informative)
            return informative

        def may_retry(tries: int) -> bool:
            """Whether a time budget leaves twice what one of this rollout's tries took; collective with a budget."""
            budgets = [callback for callback in callbacks if isinstance(callback, TimeBudget)]
            ahead = 2 * (time.perf_counter() - began) / tries
            return tries < self.config.dynamic_sampling_tries and not any(budget.is_spent(ahead) for budget in budgets)

        ranks = self._group_size, self.accelerator.gather, gather_object
        sampled, metrics = sample_until_full(first, sample, judge, may_retry, *ranks)
        for name, value in metrics.items():
            self.log(name, value)
        return sampled

    def learn(self, sampled: SampledBatch) -> None:
        """Tell the curriculum, where there is one, which groups had a gradient; `resampled` has done so."""
        if sampled.problems is not None and self.config.dynamic_sampling_tries == 1:
            self._update(sampled.problems, self._informative(sampled.batch, sampled.rollout))

    def _update(self, problems: Sequence[int], informative: Sequence[bool]) -> None:
        """Tell the curriculum which groups of all ranks were informative, given the problems of this rank's rows."""
        assert self.curriculum is not None
        numbers = self.accelerator.gather(torch.tensor(problems, device=self.accelerator.device))
        self.curriculum.update(numbers[:: self._group_size].tolist(), informative)
        self.log("curriculum/settled_problems", float(len(self.curriculum.uninformative)))

    def _informative(self, batch: TRLBatch, rollout: Rollout) -> list[bool]:
        """For each group of all ranks, whether a row of it has a gradient."""
        reward = rollout.reward.view(-1, self._group_size)  # (P, G) of all ranks
        if not self.ignores_zero:
            return [True] * len(reward)
        is_informative = rewards_differ(reward)
        if self.config.uses_axes:
            rows = torch.tensor(Rows.of_trl(batch).has_gradient(), device=self.accelerator.device)
            is_informative = self.accelerator.gather(rows).view(reward.shape).any(dim=1)
        informative: list[bool] = is_informative.tolist()
        return informative

    @property
    def _group_size(self) -> int:
        return int(self.config.num_generations)
