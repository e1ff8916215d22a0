"""What ends a run early: a budget that leaves time for the end, a collapse, nothing left to learn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.runs.test_tables_and_plots import validating
from tests.support.tiny import fraction_of_ones, make_trainer, tiny_model, weight_difference
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.rewards.graders import Grade
from trl_ext.runs.folder import Run
from trl_ext.runs.tables_and_plots import selection_note
from trl_ext.training.callbacks import Validation
from trl_ext.training.stopping import EarlyStop, TimeBasedLRDecay, TimeBudget, collapsed


def arguments(tmp_path: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **more)


class Hand:
    """A clock that is set by hand."""

    now = 10.0

    def seconds(self) -> float:
        return self.now


def budget(seconds: float, *others: bool, reserve: float = 0.0) -> TimeBudget:
    """10 s into a run; what the other ranks say of theirs."""

    def gather(mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine, torch.tensor(others, dtype=torch.bool)])

    trainer = SimpleNamespace(accelerator=SimpleNamespace(device="cpu", gather=gather))
    clock: Any = Hand()
    return TimeBudget(trainer, clock, seconds, lambda: reserve)


@pytest.mark.parametrize(
    ("seconds", "others", "spent"),
    [(10.5, (), False), (10.0, (), True), (9.5, (), True), (10.5, (False, False), False), (10.5, (False, True), True)],
)
def test_training_ends_at_the_step_that_uses_up_any_rank_time(
    seconds: float, others: tuple[bool, ...], spent: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path, disable_tqdm=False)
    limit, control = budget(seconds, *others), TrainerControl()
    assert limit.is_spent() is spent
    limit.on_step_end(args, TrainerState(global_step=7, is_world_process_zero=True), control)
    assert control.should_training_stop is spent
    said = capsys.readouterr().out
    assert said == (f"the time budget of {seconds:.0f} s is spent after step 7\n" if spent else "")


@pytest.mark.parametrize(
    ("quiet", "first", "stopping"), [(True, True, False), (False, False, False), (False, True, True)]
)
def test_time_budget_message_is_absent_if_quiet_or_other_rank(
    quiet: bool, first: bool, stopping: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = TrainerControl(should_training_stop=stopping)
    args = arguments(tmp_path, disable_tqdm=quiet)
    budget(5.0).on_step_end(args, TrainerState(is_world_process_zero=first), control)
    assert control.should_training_stop
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "spent"), [(22.9, True), (23.1, False)])
def test_budget_must_leave_time_for_the_longest_step_and_the_end(seconds: float, spent: bool, tmp_path: Path) -> None:
    limit, control = budget(seconds, reserve=4.0), TrainerControl()
    clock: Any = limit.clock
    for clock.now in (10.0, 11.0, 16.0, 17.0):  # steps of 1, 5 and 1 s
        limit.on_step_begin(None, None, None)
    clock.now = 14.0
    assert limit.is_spent() is False  # nothing ahead but the end
    limit.on_step_end(arguments(tmp_path, disable_tqdm=True), TrainerState(), control)
    assert control.should_training_stop is spent  # 14 + 5 + 4


def steps(limit: TimeBudget, tmp_path: Path, *seconds: float) -> bool:
    """Whether it stops after steps that take so long."""
    clock = cast(Hand, limit.clock)
    for took in seconds:
        control = TrainerControl()
        limit.on_step_begin(None, None, None)
        clock.now += took
        limit.on_step_end(arguments(tmp_path, disable_tqdm=True), TrainerState(), control)
    return control.should_training_stop


@pytest.mark.parametrize(
    ("seconds", "took", "spent"),
    [
        (19.9, [5.0], True),  # the step just done is what is known of the next
        (20.1, [5.0], False),
        (62.1, [50.0, 1.0], False),  # later ones start nothing up
        (61.9, [50.0, 1.0], True),
        (26.9, [1.0, 5.0, *[0.1] * 60], True),  # 22 + 5: a validation comes again
        (27.1, [1.0, 5.0, *[0.1] * 60], False),
    ],
)
def test_expected_step_time_is_the_longest_but_the_first(
    seconds: float, took: list[float], spent: bool, tmp_path: Path
) -> None:
    assert steps(budget(seconds), tmp_path, *took) is spent


def test_what_belongs_to_no_step_is_not_expected_of_one(tmp_path: Path) -> None:
    limit = budget(100.0)
    assert not steps(limit, tmp_path, 1.0, 1.0)
    clock: Any = limit.clock
    clock.now += 40.0  # 52 by now
    limit.leave_out(40.0)
    assert not steps(limit, tmp_path, 1.0)
    limit.seconds = 54.1
    assert not steps(limit, tmp_path, 0.0)


@pytest.mark.moderate
def test_budget_spent_before_the_first_step_allows_no_step(tmp_path: Path) -> None:
    trainer: Any = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, max_steps=2)
    clock: Any = Hand()
    limit = TimeBudget(trainer, clock, 9.0)
    trainer.add_callback(limit)
    trainer.train()
    assert trainer.state.global_step == 0
    assert trainer._step == 0  # and no rollout either, which would be a step's most expensive part
    assert weight_difference(trainer.model, tiny_model()) == 0
    limit.seconds = 1000.0
    trainer.train()
    assert trainer.state.global_step == 2


# A learning rate that falls on the clock.


@pytest.mark.slow
@pytest.mark.parametrize("other", [None, 0.25, 2.0])  # of another rank's clock
def test_learning_rate_decays_to_zero_at_the_end_of_the_budget(other: float | None, tmp_path: Path) -> None:
    """100 s, the last 40 of which decay; 10 s are for the end."""
    now = Hand()
    now.now = 45.0

    def alternating(completions: list[str], **_: object) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    config = {"max_steps": 6, "learning_rate": 0.1, "lr_scheduler_type": "constant", "logging_steps": 1}
    trainer: Any = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, alternating, advantage="group_mean", **config)
    clock: Any = now
    limit = TimeBudget(trainer, clock, 100.0, lambda: 10.0)
    decay = TimeBasedLRDecay(limit, 0.4)
    if other is not None:
        gather = trainer.accelerator.gather
        trainer.accelerator.gather = lambda mine: (
            torch.cat([mine, torch.tensor([other])])
            if mine.shape == (1,) and mine.is_floating_point()
            else gather(mine)
        )
    used: list[float] = []

    class Times(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
            used.append(optimizer.param_groups[0]["lr"])

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now.now += 10.0

    trainer.add_callback(decay)
    trainer.add_callback(Times())
    trainer.train()
    # steps begin 45, 35, 25, 15, 5 and -5 s before the training's end; a step's factor holds for the next one
    of_clock = [1.0, 1.0, 35 / 40, 25 / 40, 15 / 40, 5 / 40]
    wanted = [0.1] + [0.1 * min(factor, 1.0 if other is None else other) for factor in of_clock[1:]]
    assert used == pytest.approx(wanted)
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged == pytest.approx(wanted)


def test_a_schedule_that_goes_by_the_loss_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    args = arguments(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match="ReduceLROnPlateau is not; take another --lr_scheduler_type"):
        TimeBasedLRDecay(budget(9.0), 0.5).on_train_begin(args, TrainerState(), TrainerControl(), lr_scheduler=schedule)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_decay_fraction": 0.5}, "lr_decay_fraction is a fraction of the time budget: give --time_budget too"),
        ({"lr_decay_fraction": 0.0, "time_budget": 9.0}, "lr_decay_fraction must be above 0 and at most 1, got 0.0"),
        ({"lr_decay_fraction": 1.5, "time_budget": 9.0}, "lr_decay_fraction must be above 0 and at most 1, got 1.5"),
    ],
)
def test_a_decay_that_cannot_be_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ExtGRPOConfig(output_dir=str(tmp_path), advantage="group_mean", **settings)


# What the end takes.


def ending(tmp_path: Path, history: list[dict[str, Any]], final: int, restore_best: bool) -> Validation:
    """A validation on the first 10 of `final` problems, in a run that has a checkpoint at step 20."""
    validation: Validation = validating(tmp_path, history, 0.5)
    validation.final = validation.problems * (final // 10)
    validation.restore_best = restore_best
    validation.trainer.restored = []
    validation.trainer.restore_weights = validation.trainer.restored.append
    (tmp_path / "checkpoint-20").mkdir(parents=True)
    return validation


def past(step: int, accuracy: float, seconds: float = 0.0) -> dict[str, Any]:
    return {"step": step, "accuracy": accuracy, "problems": 10, "seconds": seconds}


def test_end_time_is_estimated_from_the_slowest_validation(tmp_path: Path) -> None:
    validation = ending(tmp_path, [past(0, 0.1, 3.0), past(20, 0.2, 1.0)], final=40, restore_best=False)
    validation.trainer.seconds_to_save = 5.0
    assert validation.seconds_to_end() == pytest.approx(1.2 * (4 * 3.0 + 5.0) + 2.0)
    validation.restore_best = True  # and the best weights are to be read
    assert validation.seconds_to_end() == pytest.approx(1.2 * (4 * 3.0 + 10.0) + 2.0)
    validation.run.validations.clear()
    assert validation.seconds_to_end() == pytest.approx(1.2 * 10.0 + 2.0)


@pytest.mark.parametrize(
    ("restore_best", "best", "final", "restored", "measured"),
    [
        (False, 20, 10, [], None),  # the last step was just measured
        (False, 20, 40, [], {"step": 40, "problems": 40}),
        (True, 20, 10, [20], {"step": 40, "weights_of_step": 20, "problems": 10}),
        (True, 20, 40, [20], {"step": 40, "weights_of_step": 20, "problems": 40}),
        (True, 40, 10, [], {"step": 40, "problems": 10}),  # what chose the weights is not what is reported
        (True, 0, 40, [], {"step": 40, "problems": 40}),  # its checkpoint is not there
    ],
)
def test_run_ends_with_the_requested_weights_and_problems(
    restore_best: bool, best: int, final: int, restored: list[int], measured: dict[str, Any] | None, tmp_path: Path
) -> None:
    history = [past(step, 0.9 if step == best else 0.3) for step in (0, 20, 40)]
    validation = ending(tmp_path, history, final, restore_best)
    validation.on_train_end(arguments(tmp_path), TrainerState(global_step=40), TrainerControl())
    assert validation.trainer.restored == [tmp_path / f"checkpoint-{step}" for step in restored]
    new = validation.run.validations[3:]
    assert [{k: v for k, v in e.items() if k in ("step", "weights_of_step", "problems")} for e in new] == (
        [measured] if measured else []
    )


@pytest.mark.parametrize(
    ("temperature", "final", "selection", "words"),
    [
        (
            None,
            10,
            (True, 10, None),
            "fresh samples; all 10 problems also chose the weights, so it may be a little too",
        ),
        (
            1.0,
            40,
            (True, 10, 0.5),
            "fresh samples; 10 of the 40 problems also chose the weights; on the others it is 0.5",
        ),
        (0.0, 10, (False, 10, None), "Greedy responses are those that the weights were chosen by; all 10 problems"),
    ],
)
def test_what_is_reported_is_not_what_the_weights_were_chosen_by(
    temperature: float | None, final: int, selection: tuple[Any, ...], words: str, tmp_path: Path
) -> None:
    history = [past(20, 0.9), past(40, 0.3)]
    for restore_best in (True, False):
        validation = ending(tmp_path / str(restore_best), list(history), final, restore_best)
        validation.sampling |= {"seed": 7, "temperature": temperature}
        validation.trainer.args.temperature, seeds = 0.7, []
        sample = validation.trainer.sample

        def noting(
            texts: Any, seed: int, temperature: Any, rows: Any, sample: Any = sample, seeds: list[int] = seeds
        ) -> Any:
            seeds.append(seed)
            return sample(texts, seed, rows)

        validation.trainer.sample = noting
        validation.on_train_end(arguments(tmp_path), TrainerState(global_step=40), TrainerControl())
        last = validation.run.validations[-1]
        if restore_best:
            assert (seeds[-1] != 7, tuple(last["selection"].values())) == (True, selection)
            assert words in str(selection_note(last["selection"], last["problems"]))
        else:
            assert (set(seeds) <= {7}, "selection" in last) == (True, False)


def test_latest_of_indistinguishable_validations_is_restored(tmp_path: Path) -> None:
    history = [past(20, 0.9), past(30, 0.81), past(40, 0.8)]  # of 10 problems: 0.9 has an error of 0.095
    validation = ending(tmp_path, history, final=40, restore_best=True)
    (tmp_path / "checkpoint-30").mkdir()
    validation.on_train_end(arguments(tmp_path), TrainerState(global_step=40), TrainerControl())
    assert validation.trainer.restored == [tmp_path / "checkpoint-30"]


def test_a_run_that_may_go_back_to_its_start_saves_it(tmp_path: Path) -> None:
    for restore_best in (True, False):
        validation: Validation = validating(tmp_path, [], 0.5)
        validation.restore_best, saved = restore_best, []
        validation.trainer.save_checkpoint_now = lambda saved=saved: saved.append(True)
        validation.on_train_begin(arguments(tmp_path), TrainerState(global_step=0), TrainerControl())
        assert saved == [True] * restore_best


@pytest.mark.moderate
def test_a_run_ends_with_the_weights_of_its_best_validation(tmp_path: Path) -> None:
    """Correct as often as the step has it, whatever the policy says."""
    accuracy = {0: 0.2, 1: 0.5, 2: 0.9, 3: 0.4, 4: 0.3}
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 4}
    trainer: Any = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, preset="grpo_clip", **saving)

    def grade(responses: Any, answers: Any) -> list[Grade]:
        correct = round(10 * accuracy[trainer.state.global_step])
        return [Grade(True, text, i < correct, "") for i, text in enumerate(responses)]

    problems = [{"prompt": "1 + 1 =", "answer": "2"}] * 10
    run, weights = Run(tmp_path, {}), []

    class Weights(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})

    sampling = {"batch_size": 10, "seed": 0}
    trainer.add_callback(Validation(problems, grade, lambda _: True, sampling, run, trainer, restore_best=True))
    trainer.add_callback(Weights())
    trainer.train()
    assert [entry["accuracy"] for entry in run.validations] == [0.2, 0.5, 0.9, 0.4, 0.3, 0.3]
    assert run.validations[-1]["weights_of_step"] == 2
    ended = trainer.model.state_dict()
    assert all(torch.equal(value, weights[1][name]) for name, value in ended.items())
    assert not all(torch.equal(value, weights[3][name]) for name, value in ended.items())


# Runs without hope.


@pytest.mark.parametrize(
    ("accuracies", "lost"),
    [
        ([], False),
        ([0.9], False),
        ([0.1, 0.9, 0.4], False),  # one may be unlucky
        ([0.1, 0.9, 0.4, 0.44], True),
        ([0.1, 0.9, 0.4, 0.45], False),  # not below half
        ([0.1, 0.9, 0.4, 0.6, 0.4], False),
        ([0.0, 0.0, 0.0], False),  # it has nothing to lose
    ],
)
def test_two_validations_below_a_share_of_best_are_a_collapse(accuracies: list[float], lost: bool) -> None:
    reason = collapsed(accuracies, 0.5)
    assert (reason is not None) is lost
    if reason is not None:
        assert reason == "collapsed: accuracy 0.400, 0.440 after 0.900"


def test_a_run_that_has_collapsed_ends_and_says_why(tmp_path: Path) -> None:
    run = Run(tmp_path, {}, validations=[past(0, 0.8), past(20, 0.2), past(40, 0.1)])
    for below_best, stops in ((0.5, True), (0.1, False), (None, False)):
        run.ended_early, control = None, TrainerControl()
        EarlyStop(run, below_best, None).on_step_end(None, TrainerState(global_step=40), control)
        assert control.should_training_stop is stops
        assert run.ended_early == ("collapsed: accuracy 0.200, 0.100 after 0.800, at step 40" if stops else None)


def test_a_run_ends_when_a_validation_has_the_target(tmp_path: Path) -> None:
    for accuracy, target, stops in ((0.6, 0.6, True), (0.59, 0.6, False), (0.9, None, False)):
        run, control = Run(tmp_path, {}, validations=[past(0, 0.7), past(20, accuracy)]), TrainerControl()
        EarlyStop(run, None, None, target).on_step_end(None, TrainerState(global_step=20), control)
        assert control.should_training_stop is stops
        assert run.ended_early == ("reached an accuracy of 0.6: 0.600, at step 20" if stops else None)


@pytest.mark.parametrize(
    ("accuracies", "patience", "stops"),
    [
        ((0.5, 0.7, 0.6, 0.7), 2, True),  # the same accuracy again is no new best
        ((0.5, 0.7, 0.6, 0.71), 2, False),
        ((0.5, 0.7, 0.6, 0.7), 3, False),
        ((0.5,), 1, False),
        ((), 1, False),
        ((0.5, 0.4, 0.3, 0.2), None, False),
    ],
)
def test_a_run_ends_when_the_best_validation_is_old(
    accuracies: tuple[float, ...], patience: int | None, stops: bool, tmp_path: Path
) -> None:
    validations = [past(20 * number, accuracy) for number, accuracy in enumerate(accuracies)]
    run, control = Run(tmp_path, {}, validations=validations), TrainerControl()
    EarlyStop(run, None, None, patience=patience).on_step_end(None, TrainerState(global_step=60), control)
    assert control.should_training_stop is stops
    said = "no longer improves: the best accuracy, 0.700, is 2 validations old, at step 60"
    assert run.ended_early == (said if stops else None)


def test_run_with_only_zero_variance_steps_for_a_while_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, {})
    rule, control = EarlyStop(run, None, 3), TrainerControl()
    for fraction, stops in ((1, False), (1, False), (0.9, False), (1, False), (1, False), (1, True)):
        rule.on_log(None, None, None, logs={"frac_reward_zero_std": fraction})
        rule.on_log(None, None, None, logs={"validation/accuracy": 0.1})
        rule.on_step_end(None, TrainerState(global_step=6), control)
        assert control.should_training_stop is stops
    assert run.ended_early == "dead: 3 logged steps in a row without a group of different rewards, at step 6"
    never = EarlyStop(run, None, None)
    assert never.run.zero_variance_steps == 3
    never.on_step_end(None, TrainerState(global_step=6), control := TrainerControl())
    assert not control.should_training_stop
