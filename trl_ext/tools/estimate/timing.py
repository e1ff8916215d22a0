"""`Timing`: what a run's phases take, and how a budget of time is spent."""

from __future__ import annotations

from dataclasses import dataclass

from trl_ext.tools.estimate.plan import BudgetPlan, Rates, Workload, plan
from trl_ext.tools.estimate.sides import Sides


@dataclass(frozen=True)
class Phase:
    """A part of a run and what it takes once."""

    name: str
    per: str  # what has one of it: a rollout, an optimizer step, a validation, a checkpoint, the run
    seconds: float
    bound: str  # the ceiling that most of these seconds are spent at


@dataclass(frozen=True)
class Timing:
    """The estimated time of a run."""

    phases: tuple[Phase, ...]
    rates: Rates
    workload: Workload
    tokens_computed_per_trained: float  # prompt and completion, by completion
    sides: Sides
    is_served: bool = False  # by vLLM servers, on GPUs of their own

    def plan(self, budget: float) -> BudgetPlan:
        """How a budget of so many seconds is spent."""
        return plan(self.rates, self.workload, budget)

    def table(self, budget: float | None = None) -> str:
        """The phases, a line each, and how a budget of so many seconds is spent."""
        lines = [f"{'phase':<24}{'once per':<12}{'seconds':>10}  bound by"]
        lines += [f"{p.name:<24}{p.per:<12}{p.seconds:>10.3f}  {p.bound}" for p in self.phases if p.seconds]
        if self.is_served:
            lines += ["", self.sides.of_server()]
        if budget is not None:
            planned, every = self.plan(budget), self.workload.validate_every
            lines += ["", f"{planned.steps} optimizer steps, {planned.steps / self.workload.updates:.0f} rollouts and "
                          f"{planned.steps // every + 2} validations fit into {budget:.0f} s"]  # fmt: skip
            parts = sorted(planned.seconds.items(), key=lambda part: -part[1])
            lines += [f"{name:<24}{seconds:>10.1f} s{seconds / budget:>8.1%}" for name, seconds in parts]
        return "\n".join(lines)
