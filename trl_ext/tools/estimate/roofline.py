"""A planned run and a machine -> the seconds of each of its phases, what binds them, and the rates of a plan."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from trl_ext.tools.estimate.costs.ceilings import NOTHING, Machine, Spent
from trl_ext.tools.estimate.costs.counting import ModelCosts, count_model
from trl_ext.tools.estimate.costs.exchange import gradient_exchange, optimizer_work, sync_work
from trl_ext.tools.estimate.costs.micro_batches import plan_step, scoring_work, training_work
from trl_ext.tools.estimate.costs.operations import Work
from trl_ext.tools.estimate.costs.sampling import Sampling
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.hardware import Gpu
from trl_ext.tools.estimate.plan import Rates, Workload
from trl_ext.tools.estimate.sides import Sides
from trl_ext.tools.estimate.timing import Phase, Timing

if TYPE_CHECKING:
    from trl_ext.tools.estimate.planned import PlannedRun

ALL_PROBLEMS = 5000  # of a validation without a number of problems: MATH's test split
PHASES = {  # name -> what has one of it, and the part of a run whose measured pace it has
    "prompts": ("rollout", "rollout"),
    "decoding": ("rollout", "rollout"),
    "rewards": ("rollout", "rollout"),
    "weights to the engine": ("rollout", "sync"),
    "old log-probabilities": ("rollout", "training"),
    "micro-batches": ("step", "training"),
    "gradient exchange": ("step", "training"),
    "optimizer": ("step", "step"),
    "validation on the way": ("validation", "validation"),
    "validation at the end": ("run", "validation"),
    "checkpoint": ("checkpoint", "save"),
}
_NO_PRODUCTS = torch.float32
_SAVED = 3 * 4  # bytes per trained parameter of a checkpoint: weights and both moments


def estimate_time(
    run: PlannedRun, gpu: Gpu, efficiency: Efficiency | None = None, costs: ModelCosts | None = None
) -> Timing:
    """The time of a run on GPUs of a kind.

    Args:
        efficiency: what the machine reaches of its peaks; None for assumptions.
        costs: of the model, where they have been counted already.
    """
    reached = efficiency or Efficiency()
    costs = costs or count_costs(run)
    machine = Machine(gpu, reached, run.launch.hosts)
    spent = {name: one * reached.pace.get(PHASES[name][1], 1.0) for name, one in _spent(run, costs, machine).items()}
    phases = tuple(Phase(name, PHASES[name][0], one.seconds, one.bound) for name, one in spent.items())
    seconds = {name: one.seconds for name, one in spent.items()}
    sides = _sides(run, reached, seconds)
    rates = _rates(run, reached, seconds, sides)
    computed = 1 + run.lengths.prompt / run.lengths.completion
    return Timing(phases, rates, _workload(run), computed, sides, run.engine == "server")


def count_costs(run: PlannedRun) -> ModelCosts:
    """The costs of a run's model, with its adapter."""

    def adapt(model: Any) -> Any:
        from peft import get_peft_model

        return get_peft_model(model, copy.deepcopy(run.peft)) if run.peft else model

    return count_model(run.network, run.weights_dtype, run.autocast_dtype, adapt)


def _spent(run: PlannedRun, costs: ModelCosts, machine: Machine) -> dict[str, Spent]:
    """Each phase once, in the order of `PHASES`, at the assumed pace."""
    dtype, reached = run.compute_dtype, machine.efficiency
    batches, on_gpu = plan_step(run), machine.gpu.asynchronous
    passes = training_work(costs, batches, run.config.gradient_checkpointing, on_gpu)
    sampling = Sampling(run, costs, machine)
    spent = dict.fromkeys(PHASES, NOTHING)
    if run.recipe != "sft":
        spent["prompts"], spent["decoding"] = sampling.rollout()
        spent["rewards"] = sampling.rewards(run.rollout)
        python = reached.tensor_seconds * costs.tensors if run.engine != "hf" else 0.0
        spent["weights to the engine"] = machine.spend(sync_work(run, costs, 2), _NO_PRODUCTS, python)
        scored = [machine.spend(work, dtype) for work in scoring_work(costs, batches, on_gpu)]
        spent["old log-probabilities"] = sum(scored, NOTHING) * _steps_scored(run)
    spent["micro-batches"] = sum((machine.spend(work, dtype) for work in passes), NOTHING)
    exchanged = gradient_exchange(run, costs, len(batches.rows))
    spent["gradient exchange"] = machine.spend(exchanged, _NO_PRODUCTS, 0.0)
    launched = 4 * costs.tensors * reached.op_seconds  # norm, scaling, step and zeroing of each
    spent["optimizer"] = machine.spend(optimizer_work(run, costs), _NO_PRODUCTS, launched)
    spent["validation on the way"], spent["validation at the end"] = map(sampling.validation, _problems(run))
    saved = _SAVED * costs.trained_parameters / reached.disk
    spent["checkpoint"] = machine.spend(Work(), _NO_PRODUCTS, saved)
    return spent


def _steps_scored(run: PlannedRun) -> float:
    """Optimizer steps of a rollout whose rows are run through once more, without gradient.

    Those after the first need log-probabilities of the policy that sampled, with several passes the first as well,
    unless the engine's are taken; a reference model scores all.
    """
    has_them = run.updates == 1 or getattr(run.config, "old_log_probs", "policy") == "sampler"
    old = 0 if has_them else run.updates if run.epochs > 1 else run.updates - 1
    return old / run.epochs + (run.updates / run.epochs if run.beta else 0)


def _problems(run: PlannedRun) -> tuple[int, int]:
    """Of a validation on the way and of the one at the end."""
    on_the_way = run.task.validation_problems or ALL_PROBLEMS
    return on_the_way, run.final_problems or on_the_way


def _per_rollout(run: PlannedRun, seconds: dict[str, float]) -> float:
    """The passes of all optimizer steps on a rollout."""
    step = seconds["micro-batches"] + seconds["gradient exchange"]
    return seconds["old log-probabilities"] + run.updates * step


def _per_step(reached: Efficiency, seconds: dict[str, float]) -> float:
    """An optimizer step outside its passes."""
    return seconds["optimizer"] + reached.step_seconds * reached.pace.get("step", 1.0)


def _sides(run: PlannedRun, reached: Efficiency, seconds: dict[str, float]) -> Sides:
    """Of a rollout with its optimizer steps; validations and checkpoints wait for it and take their own time."""
    training = seconds["rewards"] + _per_rollout(run, seconds) + run.updates * _per_step(reached, seconds)
    sampling = seconds["prompts"] + seconds["decoding"]
    return Sides(sampling, training, seconds["weights to the engine"], run.samples_ahead)


def _rates(run: PlannedRun, reached: Efficiency, seconds: dict[str, float], sides: Sides) -> Rates:
    """As `plan.measured` would read them from the logs, where rewards are in rollouts and waiting is a rollout."""
    tokens = run.rollout * run.lengths.completion
    trained = tokens * run.epochs * run.trained_fraction
    on_the_way, final = _problems(run)
    per_problem = seconds["validation on the way"] / on_the_way, seconds["validation at the end"] / final
    return Rates(
        start=reached.start_seconds,
        completion_token=(sides.policy_waits + seconds["rewards"]) / tokens,
        trained_token=_per_rollout(run, seconds) / trained if trained else 0.0,
        sync=seconds["weights to the engine"],
        step=_per_step(reached, seconds),
        problem=per_problem[0],
        slowest_problem=max(per_problem),
        save=seconds["checkpoint"],
    )


def _workload(run: PlannedRun) -> Workload:
    on_the_way, final = _problems(run)
    return Workload(
        rollout_batch_size=run.rollout,
        updates=run.updates,
        epochs=run.epochs,
        tokens=run.lengths.completion,
        validate_every=run.task.validate_every,
        problems=on_the_way,
        final_problems=final,
        save_every=run.save_every,
        pilot_rows=run.trained_fraction,
        restore_best=run.task.restore_best,
    )
