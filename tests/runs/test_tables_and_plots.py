"""What a run leaves behind for a person to read."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image
from transformers import TrainerControl, TrainerState, TrainingArguments

from trl_ext.evaluation.evaluator import Report
from trl_ext.generation.completion import Completion
from trl_ext.io import append_jsonl, replacing, write_text
from trl_ext.rewards.graders import Grade
from trl_ext.runs.clock import Clock
from trl_ext.runs.folder import Run
from trl_ext.runs.layout import SUMMARY, RunFolder, checkpoint_name, finished
from trl_ext.runs.summary import write_summary
from trl_ext.runs.tables_and_plots import before_after_table, examples, write_curve, write_steps_plot
from trl_ext.training.callbacks import GenerationsLog, JsonlLog, Validation, validation_line
from trl_ext.training.progress import ProgressBar


def report(outcomes: list[str], levels: list[int]) -> Report:
    fixed = {"subject": "s", "tokens": 3, "finish_reason": "stop"}
    return Report([{**fixed, "outcome": o, "level": n} for o, n in zip(outcomes, levels, strict=True)])


def entry(step: int, accuracy: float) -> dict[str, Any]:
    outcomes = {"correct": accuracy, "format_only": 0.1, "neither": 0.9 - accuracy}
    more = {"wall_clock_s": 10.0 * step, "problems": 40, "outcomes": outcomes, "mean_tokens": 7.4}
    return {"step": step, "accuracy": accuracy, **more}


HISTORY = [entry(0, 0.25), entry(20, 0.625), entry(40, 0.5)]


def test_before_and_after_table_has_level_accuracy_and_outcomes() -> None:
    before = report(["neither", "format_only", "correct", "neither"], [1, 1, 2, 2])
    after = report(["correct", "correct", "correct", "format_only"], [1, 1, 2, 2])
    assert before_after_table(before.summary(), after.summary()).splitlines() == [
        "                            before   after",
        "accuracy                     0.250   0.750",
        "  level 1                    0.000   1.000",
        "  level 2                    0.500   0.500",
        "format and answer correct    0.250   0.750",
        "format only                  0.250   0.250",
        "neither                      0.500   0.000",
    ]


def test_examples_are_the_first_of_their_category() -> None:
    more = {"sample": 0, "reason": "", "problem": "1 + 1", "response": "2", "extracted": "2", "answer": "2"}
    outcomes = ["correct", "neither", "neither", "correct", "neither"]
    graded = Report([{**more, "problem_id": number, "outcome": found} for number, found in enumerate(outcomes)])
    for category, numbers in {"neither": [1, 2], "correct": [0, 3], "format_only": [], None: [0, 1]}.items():
        shown = [text.strip().partition(",")[0] for text in examples(graded, 2, category)]
        assert shown == [f"--- problem {number}" for number in numbers]


def test_a_dataset_without_levels_has_no_level_lines() -> None:
    flat = report(["correct"], [0])
    assert len(before_after_table(flat.summary(), flat.summary()).splitlines()) == 5


@pytest.mark.parametrize("history", [HISTORY, HISTORY[:1]], ids=["three", "one"])
def test_the_curve_is_a_png_with_two_panels(history: list[dict[str, Any]], tmp_path: Path) -> None:
    write_curve(tmp_path / "curve.png", {"a_run": history}, title="a_run")
    with Image.open(tmp_path / "curve.png") as image:
        image.load()
        assert image.format == "PNG"
        assert image.size == (2000, 800)
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 10  # not blank


@pytest.mark.moderate
def test_two_runs_in_one_plot_have_a_legend(tmp_path: Path) -> None:
    sizes = []
    for runs in ({"seed 0": HISTORY}, {"seed 0": HISTORY, "seed 1": HISTORY}):
        write_curve(tmp_path / "curve.png", runs, title="runs")
        with Image.open(tmp_path / "curve.png") as image:
            sizes.append(sum(pixel != (255, 255, 255) for pixel in image.convert("RGB").get_flattened_data()))
    assert sizes[1] > sizes[0] + 200  # the same line twice, and a box with two labels


def ei_step(number: int, correct: int, solved: int, lengths: tuple[float | None, ...]) -> dict[str, Any]:
    names = ("tokens", "tokens_correct", "tokens_incorrect")
    known = {"step": number, "rollouts": 8, "questions": 4, "correct": correct, "questions_with_a_right_answer": solved}
    known |= {"optimizer_step": 3 * (number - 1), **({"entropy_estimate": 1 / number} if correct else {})}
    return known | dict(zip(names, lengths, strict=True))


EI_STEPS = [ei_step(1, 2, 2, (20.0, 12.0, 24.0)), ei_step(2, 8, 4, (10.0, 10.0, None))]


@pytest.mark.moderate
def test_the_plot_of_expert_iteration_is_a_png_with_three_panels(tmp_path: Path) -> None:
    write_steps_plot(tmp_path / "steps.png", EI_STEPS, [(1, 0.5), (2, 0.4)], title="a_run")
    with Image.open(tmp_path / "steps.png") as image:
        image.load()
        assert image.format == "PNG"
        assert image.size == (2600, 800)
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 10  # not blank
    assert [path.name for path in tmp_path.iterdir()] == ["steps.png"]


@pytest.mark.parametrize(
    "steps", [EI_STEPS, [], [ei_step(1, 0, 0, (None, None, None)) | {"rollouts": 0, "questions": 0}]]
)
def test_plot_has_shares_and_lengths_by_step_and_entropy(
    steps: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []

    def keep(figure: Figure, path: Path, **_: Any) -> None:
        figures.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", keep)  # drawing takes longest
    entropy = [(3, 0.5), (6, 0.25)] if steps else []
    write_steps_plot(tmp_path / "steps.png", steps, entropy, title="a_run")
    panels = figures[0].axes
    drawn = [
        {line.get_label(): list(zip(*map(list, line.get_data()), strict=True)) for line in panel.lines}
        for panel in panels[:2]
    ]
    if steps == EI_STEPS:
        assert drawn[0] == {"rollouts": [(1, 0.25), (2, 1.0)], "questions, by any rollout": [(1, 0.5), (2, 1.0)]}
        assert drawn[1].pop("incorrect rollouts") == [(1, 24.0), (2, pytest.approx(float("nan"), nan_ok=True))]
        assert drawn[1] == {"all rollouts": [(1, 20.0), (2, 10.0)], "correct rollouts": [(1, 12.0), (2, 10.0)]}
    else:
        assert set(drawn[0]) == {"rollouts", "questions, by any rollout"}
        assert set(drawn[1]) == {"all rollouts", "correct rollouts", "incorrect rollouts"}
        assert all(values == [(step["step"], 0.0) for step in steps] for values in drawn[0].values())
    of_all, line = panels[2].lines
    assert list(zip(*map(list, of_all.get_data()), strict=True)) == ([(0, 1.0), (3, 0.5)] if steps == EI_STEPS else [])
    assert list(zip(*map(list, line.get_data()), strict=True)) == entropy
    assert panels[0].get_ylim() == (0.0, 1.0)
    axes = [panel.get_xlabel() for panel in panels]
    assert axes == ["expert-iteration step", "expert-iteration step", "optimizer steps"]
    assert figures[0].get_suptitle() == "a_run"


def test_summary_has_first_last_and_best_validation(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    returned = write_summary(path, HISTORY, 123.456, {"seed": 3, "preset": "grpo_clip"})
    assert json.loads(path.read_text()) == returned == {
        "validation_accuracy_before": 0.25, "validation_accuracy_after": 0.5, "best_validation_accuracy": 0.625,
        "best_validation_step": 20, "validation_problems": 40, "final_validation_problems": 40, "wall_clock_s": 123.5, "validations": HISTORY, "seed": 3,
        "preset": "grpo_clip",
    }  # fmt: skip
    heads = ["validation_accuracy_before", "validation_accuracy_after", "best_validation_accuracy"]
    heads += ["best_validation_step", "validation_problems", "final_validation_problems", "wall_clock_s", "seed"]
    assert list(json.loads(path.read_text())) == [*heads, "preset", "validations"]  # as earlier versions wrote it
    assert path.read_text().startswith(
        '{\n  "validation_accuracy_before": 0.25,\n  "validation_accuracy_after": 0.5,\n'
    )
    assert path.read_text().endswith("}\n")
    assert RunFolder(tmp_path).summary() == returned


def test_a_runs_folder_knows_where_it_finished(tmp_path: Path) -> None:
    (tmp_path / "a-no_std").mkdir()
    write_summary(tmp_path / "a-no_std" / SUMMARY, HISTORY, 1.0, {})
    assert finished(tmp_path / "a") is None, "a-no_std is another run"
    assert finished(tmp_path / "nowhere" / "a") is None
    for name in ("a", "a-2", "a-10", "a-11"):
        (tmp_path / name).mkdir()
    for name in ("a", "a-2", "a-10"):
        write_summary(tmp_path / name / SUMMARY, HISTORY, 1.0, {})
    assert finished(tmp_path / "a") == RunFolder(tmp_path / "a-10")
    assert not RunFolder(tmp_path / "a-11").is_finished
    assert checkpoint_name(7) == "checkpoint-7"


def test_of_equally_good_validations_the_first_is_the_best(tmp_path: Path) -> None:
    summary = write_summary(tmp_path / "s.json", [entry(0, 0.1), entry(5, 0.3), entry(9, 0.3)], 1.0, {})
    assert summary["best_validation_step"] == 5
    again = {**entry(9, 0.4), "weights_of_step": 5}  # measured once more at the end
    assert (
        write_summary(tmp_path / "s.json", [entry(5, 0.3), entry(9, 0.2), again], 1.0, {})["best_validation_step"] == 5
    )


def test_a_validation_in_one_line() -> None:
    assert validation_line(HISTORY[1], 40) == (
        "validation at step   20/40: accuracy 0.625  (format only 0.100, neither 0.275; 7 tokens; 200 s)"
    )


def test_rows_are_appended_as_one_json_object_per_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_jsonl(path, [{"text": "a\nb"}, {"text": "π"}])
    append_jsonl(path, [{"n": 1}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"text": "a\nb"}, {"text": "π"}, {"n": 1}]
    assert "π" in path.read_text()


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_text(path, "old")

    def write_half() -> None:
        with replacing(path) as scratch:
            scratch.write_text("half")
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write_half()
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    write_text(path, "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("first", [True, False])
def test_metrics_are_logged_with_step_by_the_first_rank_only(tmp_path: Path, first: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    log = JsonlLog(path, Clock(1e9))
    args, control = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"), TrainerControl()
    state = TrainerState(global_step=3, is_world_process_zero=first)
    for logs in ({"reward": 0.5}, {}, None):
        log.on_log(args, state, control, logs=logs)
    written = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [(row["step"], row["reward"]) for row in written] == ([(3, 0.5)] if first else [])
    assert all(row["wall_clock_s"] > 1e9 for row in written)


@pytest.mark.parametrize("every", [1, 7])
def test_progress_in_a_log_file_is_ten_lines_at_any_frequency(
    every: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bar, state = ProgressBar(), TrainerState(max_steps=200, is_world_process_zero=True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    bar.on_train_begin(None, state, None)
    for state.global_step in range(every, 201, every):
        bar.on_log(None, state, None, logs={"loss": 0.1})
    assert len(capsys.readouterr().out.splitlines()) == (10 if every == 1 else 9)  # 196 is the last one logged


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_terminal_bar_or_ten_lines_in_a_log_file(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bar, state = ProgressBar(), TrainerState(max_steps=30, is_world_process_zero=True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    bar.on_train_begin(None, state, None)
    for state.global_step in range(1, 31):
        bar.on_step_end(None, state, None)
        bar.on_log(None, state, None, logs={"loss": 0.1, "reward": state.global_step / 10, "entropy": None})
    bar.on_train_end(None, state, None)
    said = capsys.readouterr()
    lines = [f"step {step}/30: reward {step / 10:.2f}" for step in range(3, 31, 3)]
    assert said.out.splitlines() == ([] if terminal else lines)
    assert ("30/30" in said.err) == terminal


def test_plot_starts_at_0_and_keeps_other_problem_sets_off_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda made, path, **_: (figures.append(made), path.touch()))
    measured = ((0, 238, 0.4, 512), (20, 300, 0.8, 512), (20, 350, 0.97, 5000))
    names = ("step", "wall_clock_s", "accuracy", "problems")
    history = [dict(zip(names, values, strict=True)) for values in measured]
    write_curve(tmp_path / "curve.png", {"a": history}, "title")
    for panel, xs in zip(figures[0].axes, ([0, 20], [238, 300]), strict=True):
        line, point = panel.lines
        assert (list(line.get_xdata()), list(line.get_ydata())) == (xs, [0.4, 0.8])
        assert list(point.get_ydata()) == [0.97]
        assert panel.get_xlim()[0] == 0
        assert [text.get_text() for text in panel.texts] == ["0.970 on 5000"]
    write_steps_plot(tmp_path / "steps.png", [], [], "title")
    assert [[text.get_text() for text in panel.texts] for panel in figures[1].axes] == [["nothing to show"]] * 3
    assert all(len(panel.get_yticks()) == 0 or panel.get_ylim() == (0, 1) for panel in figures[1].axes)


def validating(tmp_path: Path, history: list[dict[str, Any]], accuracy: float, log_to: Path | None = None) -> Any:
    """A validation whose policy answers so many of ten problems correctly, in a run that has had some."""
    run = Run(tmp_path, {}, validations=history)
    problems = [{"prompt": "p", "answer": str(i)} for i in range(10)]

    def grade(responses: Any, truths: Any) -> list[Grade]:
        return [Grade(True, truth, float(truth) < 10 * accuracy, "") for truth in truths]

    trainer = SimpleNamespace(
        stop_signal=None, best_step=None, args=SimpleNamespace(disable_tqdm=True, temperature=1.0)
    )
    trainer.sample = lambda prompts, seed, rows: (
        [Completion("a response", 1, True, entropy_estimate=0.25)] * len(prompts)
    )
    trainer.log_now = lambda logs: None
    trainer.stopping_early = contextlib.nullcontext
    trainer.log_table = lambda name, rows: None
    trainer.seconds_to_save = 0.0
    return Validation(problems, grade, lambda state: state.global_step % 20 == 0, {"seed": 0}, run, trainer, log_to)


def test_several_samples_of_a_problem_give_pass_at_k(tmp_path: Path) -> None:
    validation, logged = validating(tmp_path, [], 0.5), []
    validation.samples = 4
    validation.trainer.log_now = logged.append

    def first_of_four(responses: Any, truths: Any) -> list[Grade]:
        return [Grade(True, truth, n % 4 == 0 and float(truth) < 5, "") for n, truth in enumerate(truths)]

    validation.grader = first_of_four  # one of the four samples of half of the ten problems
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    validation.on_train_begin(args, TrainerState(), TrainerControl())
    (entry,) = validation.run.validations
    # pass@2: 1 - C(3, 2) / C(4, 2) = 1/2 of half of the problems
    wanted = {"problems": 10, "accuracy": 0.125, "pass@2": 0.25, "pass@4": 0.5}
    assert {name: entry[name] for name in wanted} == wanted
    assert (logged[0]["validation/pass@2"], logged[0]["validation/pass@4"]) == (0.25, 0.5)
    assert "pass@1" not in entry


@pytest.mark.parametrize(("accuracy", "saves"), [(0.9, True), (0.5, False)])
def test_best_validation_is_checkpointed_even_after_resume(accuracy: float, saves: bool, tmp_path: Path) -> None:
    validation = validating(tmp_path, list(HISTORY), accuracy)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", save_steps=1000)
    state, control = TrainerState(global_step=60, max_steps=100), TrainerControl()
    validation.on_train_begin(args, TrainerState(global_step=40), control)
    assert len(validation.run.validations) == 3  # the run had validated before it was interrupted
    assert validation.trainer.best_step == 20
    validation.on_step_end(args, state, control)
    assert [entry["step"] for entry in validation.run.validations] == [0, 20, 40, 60]
    assert control.should_save is saves
    assert validation.trainer.best_step == (60 if saves else 20)
    validation.trainer.stop_signal = 15
    validation.on_train_end(args, TrainerState(global_step=70), control)
    assert len(validation.run.validations) == 4  # told to stop: no time for another


def test_a_run_that_saves_nothing_saves_no_best_either(tmp_path: Path) -> None:
    validation, control = validating(tmp_path, list(HISTORY), 0.9), TrainerControl()
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", save_strategy="no")
    validation.on_step_end(args, TrainerState(global_step=60), control)
    assert not control.should_save


@pytest.mark.parametrize(("step", "due"), [(19, False), (20, True), (21, False)])
def test_the_policy_is_validated_after_the_steps_where_it_is_due(step: int, due: bool, tmp_path: Path) -> None:
    validation = validating(tmp_path, [entry(0, 0.5)], 0.4)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    validation.on_step_end(args, TrainerState(global_step=step), TrainerControl())
    assert [found["step"] for found in validation.run.validations] == ([0, 20] if due else [0])


def test_first_responses_of_each_validation_are_logged_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    validation = validating(tmp_path, [], 0.2, log_to=path)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", save_strategy="no")
    validation.on_train_begin(args, TrainerState(global_step=0), TrainerControl())
    validation.on_step_end(args, TrainerState(global_step=20), TrainerControl())
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["ground_truth"]) for row in written] == [(s, t) for s in (0, 20) for t in "0123"]
    response = {"step": 0, "prompt": "p", "response": "a response", "tokens": 1, "entropy_estimate": 0.25}
    for place, right in ((0, 1.0), (1, 1.0), (2, 0.0)):  # in format all of them
        assert written[place] == response | {
            "ground_truth": str(place), "outcome": "correct" if right else "format_only", "reward": right,
            "rewards": {"format_reward": 1.0, "answer_reward": right},
        }  # fmt: skip


def test_responses_are_logged_only_by_first_rank_and_if_asked(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", save_strategy="no")
    path = tmp_path / "generations.jsonl"
    for log_to, first in ((path, False), (None, True)):
        validation = validating(tmp_path, [], 0.2, log_to)
        validation.on_train_begin(args, TrainerState(is_world_process_zero=first), TrainerControl())
        assert len(validation.run.validations) == 1
    assert list(tmp_path.iterdir()) == []


def test_generations_are_logged_at_the_first_step_and_when_due(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    trainer: Any = SimpleNamespace(
        log_table=lambda name, rows: None, last_rollout=[{"prompt": str(i)} for i in range(10)]
    )
    log = GenerationsLog(path, 4, trainer, rows=3)
    args, control = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"), TrainerControl()
    for step in range(1, 9):
        log.on_step_end(args, TrainerState(global_step=step, is_world_process_zero=True), control)
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in written] == [(s, p) for s in (1, 4, 8) for p in "036"]


def test_a_whole_group_is_logged_next_to_rows_from_all_over(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    trainer: Any = SimpleNamespace(
        log_table=lambda name, rows: None, last_rollout=[{"prompt": str(i)} for i in range(12)]
    )
    log = GenerationsLog(path, 4, trainer, rows=3, group=3, per_token=lambda row: {"per_token": row} if row else {})
    args, state = (
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"),
        TrainerState(global_step=4),
    )
    log.on_step_end(args, state, TrainerControl())
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["prompt"] for row in written] == ["0", "1", "2", "4", "8"]
    assert [row.get("per_token") for row in written] == [None, 1, 2, 4, 8]
