"""The notebook of the docs, and what a process that trains again and again leaves behind."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import TrainerState

from tests.support.tiny import ends_early, make_trainer
from tests.support.versions import needs_smollm2
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.errors import InputError
from trl_ext.plots import figure
from trl_ext.registry import Registry, UnknownName
from trl_ext.rewards import REWARDS

pytest.importorskip("IPython")
pytest.importorskip("nbclient")

from scripts import notebook_form, run_notebook

SMALL = {"STEPS": "2", "ROLLOUTS": "16", "PROBLEMS": "8", "MAX_TOKENS": "12", "PRETRAINING": "20"}


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell: Any) -> set[str]:
    return {
        kind for output in cell["outputs"] for kind in output.get("data", {"error": ""} if "ename" in output else ())
    }


COMMITTED = json.loads(run_notebook.NOTEBOOK.read_text(encoding="utf-8"))


def test_the_committed_notebook_was_run_from_top_to_bottom() -> None:
    assert [cell["execution_count"] for cell in cells(COMMITTED)] == list(range(1, len(cells(COMMITTED)) + 1))
    assert sum("image/png" in kinds(cell) for cell in cells(COMMITTED)) == 3
    errors = [cell["metadata"].get("tags") for cell in cells(COMMITTED) if "error" in kinds(cell)]
    assert errors == [["raises-exception"]]


def test_the_committed_outputs_are_small_and_name_no_machine() -> None:
    assert run_notebook.NOTEBOOK.stat().st_size < 300_000
    said = json.dumps(
        [output for cell in cells(COMMITTED) for output in cell["outputs"] if "image/png" not in kinds(cell)]
    )
    assert not [word for word in ("/home/", "/root", "/tmp/", "site-packages", "Warning") if word in said]


def test_a_parameter_that_the_notebook_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no 'STEP':\nSTEPS = 40"):
        run_notebook.executed({"STEP": "2"}, tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_cell_runs_in_a_kernel_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXT_CACHE", str(tmp_path / "cache"))
    notebook = run_notebook.executed(SMALL, tmp_path, timeout=240)
    assert [kinds(cell) & {"image/png", "error"} for cell in cells(notebook)] == [
        kinds(cell) & {"image/png", "error"} for cell in cells(COMMITTED)
    ]
    said = ["".join(output.get("text", "") for output in cell["outputs"]) for cell in cells(notebook)]
    trained = [text for text in said if "held-out problems" in text]
    assert [text.split(":")[0].split()[-1] for text in trained] == ["grpo_clip", "focal"]
    assert not [text for text in said if "Warning" in text or "no effect" in text]
    (error,) = [output for cell in cells(notebook) for output in cell["outputs"] if "ename" in output]
    assert error["ename"] == "UnknownName"
    place, message = error["traceback"]
    assert place.startswith('cell, line 1: ExtGRPOConfig(output_dir="runs/notebook/typo"')
    assert message.startswith("UnknownName: unknown policy loss 'focall'. Did you mean 'focal'?")


def test_the_form_for_colab_is_made_of_the_notebook() -> None:
    assert notebook_form.FORM.read_text(encoding="utf-8") == notebook_form.written(), "python -m scripts.notebook_form"
    assert not [cell for cell in cells(notebook_form.form()) if cell["outputs"]]


def test_a_form_of_another_notebook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "grpo.ipynb"
    other.write_text(run_notebook.NOTEBOOK.read_text(encoding="utf-8").replace("ROLLOUTS = 128", "ROLLOUTS = 127"))
    monkeypatch.setattr(notebook_form, "SOURCE", other)
    with pytest.raises(ValueError, match=r"grpo\.ipynb has this passage in 0 cells, not once in one:\nROLLOUTS = 128"):
        notebook_form.form()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_smollm2
def test_the_form_for_colab_runs_with_a_real_model(tmp_path: Path) -> None:
    small = {"MODEL": '"smollm2"', "STEPS": "2", "ROLLOUTS": "8", "PROBLEMS": "2", "MAX_TOKENS": "16", "BY_HAND": "1"}
    notebook = run_notebook.executed(small, tmp_path, timeout=540, notebook=notebook_form.form())
    said = ["".join(output.get("text", "") for output in cell["outputs"]) for cell in cells(notebook)]
    assert [text for text in said if "on cpu, in the trainer next to torch.float32" in text]
    trained = [text for text in said if "held-out problems" in text]
    assert [text.split(":")[0].split()[-1] for text in trained] == ["grpo_clip", "focal"]
    (error,) = [output for cell in cells(notebook) for output in cell["outputs"] if "ename" in output]
    assert error["ename"] == "UnknownName"


# What a notebook shows.


def test_an_error_of_input_shows_the_users_line_and_its_message(tmp_path: Path) -> None:
    for wrong in ({"preset": "grpo_clp"}, {"num_generations": 3, "per_device_train_batch_size": 4}):
        with pytest.raises(ValueError) as refused:
            ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **wrong)
        place, message = refused.value._render_traceback_()  # which IPython calls
        assert place.startswith(f"{__file__}, line ")
        assert place.endswith("ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **wrong)")
        assert message == f"{type(refused.value).__name__}: {refused.value}"
    assert InputError("a").__class__("b")._render_traceback_() == ["InputError: b"]


def test_a_table_of_rewards_takes_the_place_of_the_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils.notebook import NotebookProgressCallback

    from trl_ext.training.notebook import NotebookProgress
    from trl_ext.training.progress import show_progress

    monkeypatch.setattr("transformers.trainer.DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    monkeypatch.setattr("trl_ext.training.progress.is_in_notebook", lambda: True)
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, preset="grpo_clip", disable_tqdm=False)
    before = list(trainer.callback_handler.callbacks)
    show_progress(trainer)  # as a recipe does
    assert trainer.callback_handler.callbacks == before
    (shown,) = [callback for callback in before if isinstance(callback, NotebookProgressCallback)]
    assert isinstance(shown, NotebookProgress)
    args, state = trainer.args, TrainerState(max_steps=20)
    shown.on_train_begin(args, state, None)
    for state.global_step in range(21):
        shown.on_log(args, state, None, logs={"loss": 0.0, "reward": state.global_step / 20, "entropy": 0.5})
        if state.global_step == 10:
            shown.on_log(args, state, None, logs={"validation/accuracy": 0.25})
    head, *rows = shown.training_tracker.inner_table
    assert head == ["Step", "reward", "entropy", "validation accuracy"]
    assert [row[0] for row in rows] == list(range(2, 21, 2))
    assert rows[0] == [2, "0.10", "0.50"]
    assert rows[4] == [10, "0.25", "0.50", "0.250"] or rows[4][3] == "0.250"


def test_plots_of_a_run_leave_the_notebooks_own_as_they_are(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("svg")
    mine = plt.figure()
    with figure(tmp_path / "a.png", (2, 2)) as (panel,):
        panel.plot([0, 1], [0, 1])
    assert plt.get_backend() == "svg"
    assert plt.gcf() is mine
    assert len(plt.get_fignums()) == 1
    plt.close(mine)


# Members that are defined in a cell.


def in_a_cell(text: str, names: dict[str, Any]) -> None:
    exec(text, {"__name__": "__main__", **names})


def test_a_cell_may_be_run_again_and_its_member_is_tried() -> None:
    table = Registry("shape", fault=lambda member, size: None if member(2) == 4 else f"is wrong for {size}")
    for value in (5, 4):
        in_a_cell(f"@table.register\ndef square(x): return {value}", {"table": table})
        if value == 5:
            with pytest.raises(ValueError, match="shape 'square' is wrong for 4"):
                table.build("square")
    assert table.build("square")(2) == 4
    with pytest.raises(ValueError, match="registered twice"):
        table.register(table["square"])


def test_a_function_in_place_of_a_name_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"policy loss: <function .*> is not a name; register"):
        ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, policy_loss=ends_early)
    assert issubclass(UnknownName, InputError)


# Many runs in one process.


class Left:
    """What this process holds."""

    def __init__(self) -> None:
        gc.collect()
        process = psutil.Process()
        self.megabytes = process.memory_info().rss / 2**20
        self.tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        self.threads, self.os_threads = threading.active_count(), process.num_threads()
        self.children, self.files = len(process.children(recursive=True)), process.num_fds()
        self.groups = torch.distributed.is_initialized()


@pytest.mark.nightly
@pytest.mark.slow
def test_ten_runs_in_a_process_leave_nothing_behind(tmp_path: Path) -> None:
    left = []
    for number in range(10):
        trainer = make_trainer(
            ExtGRPOTrainer, ExtGRPOConfig, tmp_path / str(number), REWARDS["strict"], preset="grpo_clip",
            report_to="tensorboard",
        )  # fmt: skip
        trainer.train()
        del trainer
        left.append(Left())
    after_two, last = vars(left[1]), vars(left[-1])
    growth = last.pop("megabytes") - after_two.pop("megabytes")
    assert last == after_two
    assert growth < 25
    assert not last["groups"]
