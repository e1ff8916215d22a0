"""Expert iteration on a tiny policy: it learns from correct rollouts, tolerates steps without any, and resumes anywhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import load_dataset

from tests.support.tiny import save_tiny, tiny_model, tiny_sft, weight_difference
from tests.training.test_resume import history
from trl_ext.imitation.expert_iteration import ROLLOUTS, STEPS, ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.io import read_jsonl
from trl_ext.recipes.expert_iteration import EndOfStep
from trl_ext.rewards.graders import Grade

QUESTIONS = [{"prompt": f"{i % 9} + {i % 5} =", "answer": str(i % 3)} for i in range(12)]
SETTINGS: dict[str, Any] = {
    "n_ei_steps": 3, "questions_per_step": 8, "group_size": 4, "train_batch_size": 8, "micro_train_batch_size": 4,
    "sampling_max_tokens": 6, "max_steps": -1, "optim": "adamw_torch",
    "learning_rate": 3e-3, "rollout_chunk": 16,
}  # fmt: skip


def graded(correct: Callable[[str], bool]) -> Callable[[Sequence[str], Sequence[Any]], list[Grade]]:
    return lambda responses, answers: [Grade(True, text, correct(text), "") for text in responses]


def has_a_one(text: str) -> bool:
    return "1" in text.split()


def made(path: Path, correct: Callable[[str], bool] = has_a_one, grader: Any = None, **settings: Any) -> Any:
    trainer = tiny_sft(
        ExpertIterationTrainer, ExpertIterationConfig, path, None, questions=QUESTIONS, folder=path / "ei",
        grader=grader or graded(correct), **{**SETTINGS, **settings},
    )  # fmt: skip
    trainer.add_callback(EndOfStep(trainer))
    return trainer


def trained(path: Path, *args: Any, **settings: Any) -> Any:
    trainer = made(path, *args, **settings)
    trainer.train()
    return trainer


def steps_of(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path / "ei" / STEPS)


def fractions(path: Path) -> list[float]:
    """Fraction of correct rollouts by step."""
    return [step["correct"] / step["rollouts"] for step in steps_of(path)]


@pytest.mark.slow
def test_selected_rollouts_become_likelier_even_if_incorrect(tmp_path: Path) -> None:
    settings = {"n_ei_steps": 5, "epochs_per_step": 4}
    trained(tmp_path / "correct", **settings)
    learned = fractions(tmp_path / "correct")
    assert learned[0] < 0.5
    assert learned[-1] > learned[0] + 0.3
    trained(tmp_path / "incorrect", selection=f"{__name__}:only_incorrect", **settings)
    unlearned = fractions(tmp_path / "incorrect")
    assert unlearned[0] == learned[0]
    assert unlearned[-1] < 0.1


@pytest.mark.slow
def test_with_the_sign_of_the_loss_flipped_it_does_not_learn(tmp_path: Path) -> None:
    trainer = made(tmp_path, n_ei_steps=5, epochs_per_step=4)
    loss = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: -loss(*args, **kwargs)
    trainer.train()
    learned = fractions(tmp_path)
    assert learned[-1] < learned[0]


def only_incorrect(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["outcome"] != "correct"]


@pytest.mark.moderate
def test_optimizer_steps_per_step_follow_from_its_rows(tmp_path: Path) -> None:
    trainer = trained(tmp_path, epochs_per_step=2)
    steps = steps_of(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["rollouts"] == 32 and step["kept"] == step["correct"] for step in steps)
    assert [step["optimizer_steps"] for step in steps] == [2 * -(-step["kept"] // 8) for step in steps]
    assert trainer.state.global_step == sum(step["optimizer_steps"] for step in steps)
    assert trainer.state.global_step == trainer.state.max_steps  # which was not known before
    assert [step["optimizer_step"] for step in steps[1:]] == [steps[0]["optimizer_steps"], sum(s["optimizer_steps"] for s in steps[:2])]  # fmt: skip


@pytest.mark.slow
def test_every_setting_of_a_step_has_its_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    sample = ExpertIterationTrainer.sample

    def counted(trainer: Any, prompts: Any, batch_size: int, *rest: Any, **more: Any) -> Any:
        batches.append(batch_size)
        return sample(trainer, prompts, batch_size, *rest, **more)

    monkeypatch.setattr(ExpertIterationTrainer, "sample", counted)
    one = {"n_ei_steps": 1, "questions_per_step": 4, "group_size": 4}

    def first(name: str, **settings: Any) -> list[dict[str, Any]]:
        trained(tmp_path / name, **{**one, **settings})
        return steps_of(tmp_path / name)

    (usual,) = first("usual")
    assert usual["rollouts"] == 16
    assert len(first("steps", n_ei_steps=2)) == 2
    assert first("questions", questions_per_step=2)[0]["rollouts"] == 8
    assert first("group", group_size=3)[0]["rollouts"] == 12
    assert first("epochs", epochs_per_step=3)[0]["optimizer_steps"] == 3 * usual["optimizer_steps"]
    assert first("kept", selection="shortest", selection_options="k=1")[0]["kept"] < usual["kept"]
    del batches[:]
    first("batch", rollout_batch_size=5)
    assert set(batches) == {5}


@pytest.mark.slow
def test_rollouts_and_kept_rows_are_datasets(tmp_path: Path) -> None:
    trained(tmp_path)
    for step in steps_of(tmp_path):
        folder = tmp_path / "ei" / f"step_{step['step']}"
        loaded = {name: load_dataset("json", data_files=str(folder / f"{name}.jsonl"), split="train", cache_dir=str(tmp_path / "cache")) for name in ("rollouts", "kept")}  # fmt: skip
        assert len(loaded["rollouts"]) == step["rollouts"]
        assert len(loaded["kept"]) == step["kept"]
        assert {"prompt", "response", "answer", "tokens", "outcome", "question"} <= set(loaded["kept"].column_names)
        assert all(has_a_one(text) for text in loaded["kept"]["response"])
        assert sum(has_a_one(text) for text in loaded["rollouts"]["response"]) == step["kept"]


@pytest.mark.moderate
def test_steps_without_a_correct_answer_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trained(tmp_path, lambda text: False)
    assert trainer.state.global_step == 0
    assert weight_difference(trainer.model, tiny_model()) == 0
    assert [step["kept"] for step in steps_of(tmp_path)] == [0, 0, 0]
    assert [step["tokens_correct"] for step in steps_of(tmp_path)] == [None] * 3
    assert "step 3 keeps nothing to fine-tune on: 0 of 32 rollouts are correct" in caplog.text


@pytest.mark.slow
def test_a_step_with_nothing_in_the_middle_is_passed_over(tmp_path: Path) -> None:
    calls: list[int] = []

    def nothing_in_step_2(responses: Sequence[str], answers: Sequence[Any]) -> list[Grade]:
        calls.append(len(responses))
        return graded(has_a_one if len(calls) not in (3, 4) else lambda text: False)(responses, answers)

    trainer = trained(tmp_path, grader=nothing_in_step_2)
    kept = [step["kept"] for step in steps_of(tmp_path)]
    assert calls == [16] * 6  # two chunks of each step
    assert kept[1] == 0
    assert min(kept[0], kept[2]) > 0
    assert trainer.state.global_step == sum(-(-n // 8) for n in kept)


def test_short_last_batch_is_one_smaller_step(tmp_path: Path) -> None:
    trainer = trained(tmp_path, n_ei_steps=1, selection="at_most", questions_per_step=2, logging_steps=1)
    (step,) = steps_of(tmp_path)
    assert 0 < step["kept"] <= 2
    assert step["optimizer_steps"] == trainer.state.global_step == 1
    (entry,) = [e for e in trainer.state.log_history if "loss" in e]
    assert entry["entropy"] > 0.5
    assert entry["grad_norm"] > 0


@pytest.mark.moderate
def test_logged_entropy_is_over_rows_and_not_empty_micro_batches(tmp_path: Path) -> None:
    one_row = {"n_ei_steps": 1, "selection": "at_most", "questions_per_step": 1, "logging_steps": 1}
    entropy = []
    for batch in (4, 8):  # one micro-batch, and one more that has no row
        trainer = trained(tmp_path / str(batch), lambda text: True, train_batch_size=batch, **one_row)
        entropy += [e["entropy"] for e in trainer.state.log_history if "loss" in e]
    assert entropy[1] == pytest.approx(entropy[0], rel=1e-5)
    assert entropy[0] > 0.5


def test_micro_batch_without_rows_has_no_trainable_token(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    trainer.args.gradient_accumulation_steps = 3
    row = {"input_ids": [9, 7, 3, 1], "labels": [-100, -100, 3, 1]}
    batches = trainer._micro_batches([row, row])
    assert [int((batch["labels"] != -100).sum()) for batch in batches] == [2, 2, 0]


def test_every_chunk_of_rollouts_is_sampled_again(tmp_path: Path) -> None:
    trained(tmp_path, n_ei_steps=1, questions_per_step=1, group_size=8, rollout_chunk=4)
    texts = [row["response"] for row in read_jsonl(tmp_path / "ei" / "step_1" / ROLLOUTS)]
    assert len(texts) == 8
    assert texts[:4] != texts[4:]


def test_step_starts_only_with_time_for_rollouts_like_the_last(tmp_path: Path) -> None:
    left_out: list[float] = []
    trainer = made(tmp_path, lambda text: False)
    trainer.budget = SimpleNamespace(is_spent=lambda ahead=0.0: ahead > 0, leave_out=left_out.append)
    trainer.train()
    assert [step["step"] for step in steps_of(tmp_path)] == [1]
    assert left_out == [trainer.resume_state()["seconds_of_rollouts"]]  # and no optimizer step is expected to take that


# --- resuming ---------------------------------------------------------------------------------------------------


SAVING = {"save_strategy": "steps", "save_steps": 1, "epochs_per_step": 2, "logging_steps": 2}


def files_of(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): p.read_text() for p in sorted((path / "ei").rglob("*.jsonl"))}


def resumed(whole: Path, again: Path, step: int, **settings: Any) -> Any:
    """The run resumed from a checkpoint, in a folder with all that the complete run has left."""
    shutil.copytree(whole / "ei", again / "ei")
    trainer = made(again, **{**SAVING, **settings})
    trainer.train(resume_from_checkpoint=str(whole / f"checkpoint-{step}"))
    return trainer


@pytest.mark.slow
def test_resumed_at_any_optimizer_step_it_is_bit_identical(tmp_path: Path) -> None:
    model = str(save_tiny(tmp_path / "tiny"))
    whole = trained(tmp_path / "whole", model=model, **SAVING)
    last = whole.state.global_step
    assert last > 6
    for step in sorted({0, 1, 2, steps_of(tmp_path / "whole")[0]["optimizer_steps"], last}):
        again = resumed(tmp_path / "whole", tmp_path / f"from_{step}", step, model=model)
        assert history(again) == history(whole)
        assert weight_difference(again.model, whole.model) == 0
        assert files_of(tmp_path / f"from_{step}") == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_run_interrupted_in_rollouts_resamples_only_missing_ones(tmp_path: Path) -> None:
    calls: list[int] = []

    def interrupted(responses: Sequence[str], answers: Sequence[Any]) -> list[Grade]:
        calls.append(len(responses))
        if len(calls) == 4:  # the second chunk of step 2
            raise KeyboardInterrupt
        return graded(has_a_one)(responses, answers)

    whole = trained(tmp_path / "whole", **SAVING)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", grader=interrupted, **SAVING)
    assert len(read_jsonl(tmp_path / "cut" / "ei" / "step_2" / ROLLOUTS)) == 16
    with (tmp_path / "cut" / "ei" / "step_2" / ROLLOUTS).open("a") as file:
        file.write(json.dumps({"prompt": "half a chunk"}) + "\n" + '{"torn')
    step = steps_of(tmp_path / "whole")[0]["optimizer_steps"]
    again = made(tmp_path / "cut", grader=interrupted, **SAVING)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{step}"))
    assert len(calls) == 4 + 3  # the other chunk of step 2, and the two of step 3
    assert weight_difference(again.model, whole.model) == 0
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_sigterm_in_rollouts_stops_at_next_chunk_and_resumes(tmp_path: Path) -> None:
    calls: list[int] = []

    def told_to_stop(responses: Sequence[str], answers: Sequence[Any]) -> list[Grade]:
        calls.append(len(responses))
        if len(calls) == 3:  # the first chunk of step 2
            os.kill(os.getpid(), signal.SIGTERM)
        return graded(has_a_one)(responses, answers)

    whole = trained(tmp_path / "whole", **SAVING)
    cut = made(tmp_path / "cut", grader=told_to_stop, **SAVING)
    with cut.stopping_on_sigterm():
        cut.train()
    assert cut.stop_signal == signal.SIGTERM
    assert len(read_jsonl(tmp_path / "cut" / "ei" / "step_2" / ROLLOUTS)) == 16
    assert len(steps_of(tmp_path / "cut")) == 1
    again = made(tmp_path / "cut", grader=told_to_stop, **SAVING)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{cut.state.global_step}"))
    assert weight_difference(again.model, whole.model) == 0
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_resume_with_other_settings_discards_old_rollouts(tmp_path: Path) -> None:
    trained(tmp_path / "whole", **SAVING)
    step = steps_of(tmp_path / "whole")[0]["optimizer_steps"]
    resumed(tmp_path / "whole", tmp_path / "hot", step, sampling_temperature=3.0, resume_changed=True)
    before, after = files_of(tmp_path / "whole"), files_of(tmp_path / "hot")
    assert after[f"ei/step_1/{ROLLOUTS}"] == before[f"ei/step_1/{ROLLOUTS}"]
    assert after[f"ei/step_2/{ROLLOUTS}"] != before[f"ei/step_2/{ROLLOUTS}"]


# --- the config -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_ei_steps": 0}, "n_ei_steps must be at least 1, got 0"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"selection": "shrtest"}, "unknown selection 'shrtest'. Did you mean 'shortest'"),
        ({"selection": "at_most", "selection_options": "n=2"}, "unknown option of selection 'at_most' 'n'"),
        ({"packing": True}, "packing: true does not go with expert iteration"),
        ({"max_steps": 5}, "max_steps is 5, but it follows from n_ei_steps"),
        ({"selection": "at_most", "selection_options": "k=0"}, "k must be at least 1, got 0"),
        ({"completion_only_loss": False}, "completion_only_loss: False has no meaning in expert iteration"),
        ({"num_train_epochs": 2}, "num_train_epochs: 2 has no meaning in expert iteration: see epochs_per_step"),
        ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type is 'cosine', and how many optimizer steps"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        ExpertIterationConfig(output_dir=str(tmp_path), use_cpu=True, **{"lr_scheduler_type": "constant", **settings})


def test_written_config_may_contain_the_optimizer_step_count(tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "lr_scheduler_type": "constant", "n_ei_steps": 2}
    config = ExpertIterationConfig(**settings)
    assert ExpertIterationConfig(**settings, max_steps=config.max_steps).max_steps == config.max_steps


def test_options_of_the_selection_come_as_text_too(tmp_path: Path) -> None:
    config = ExpertIterationConfig(
        output_dir=str(tmp_path), use_cpu=True, lr_scheduler_type="constant", selection="shortest",
        selection_options="k=2",
    )  # fmt: skip
    rows = [{"question": 0, "tokens": n, "outcome": "correct"} for n in (3, 1, 2)]
    assert config.selection_function()(rows) == rows[1:]
