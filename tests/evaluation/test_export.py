"""An evaluation as tasks of other harnesses: the files say what was set, and the libraries that are there load them."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import runpy
import sys
from functools import partial
from inspect import unwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import GenerationMixin

from tests.support.tiny import tiny_model
from trl_ext.errors import InputError
from trl_ext.evaluation.export import ExportedTask, write_tasks
from trl_ext.evaluation.exported import Exported
from trl_ext.generation.completion import Sampling

PROBLEMS = [
    {
        "prompt": "P1 {{x}}",
        "answer": ["1", "one"],
        "problem": "1?",
        "level": 2,
        "subject": "",
        "row": 0,
        "more": object(),
    },
    {"prompt": "P2", "answer": ["\u00bd"], "problem": "2?", "level": 0, "subject": "S", "row": 5},
]
OPTIONS = {"answer_format": "r1_zero"}
SAMPLING = Sampling(0.7, 0.9, 33, 4, ("</answer>",), 3)


def written(folder: Path, **more: Any) -> Path:
    fixed: dict[str, Any] = {"grader": "compatible", "options": OPTIONS, "samples": 2, "sampling": SAMPLING}
    write_tasks(folder / "tasks", ExportedTask("GSM8K (mine)", **{**fixed, **more}), PROBLEMS, "runs/my_model")
    return folder / "tasks"


class _Loader(yaml.SafeLoader):
    """lm-eval's `!function`, as its text."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def test_the_task_of_lm_eval_has_prompt_stop_and_sampling(tmp_path: Path) -> None:
    folder = written(tmp_path)
    task = yaml.load((folder / "lm_eval" / "trl_ext_gsm8k_mine.yaml").read_text(), _Loader)
    assert task["generation_kwargs"] == {
        "until": ["</answer>"], "max_gen_toks": 33, "do_sample": True, "temperature": 0.7, "top_p": 0.9,
    }  # fmt: skip
    assert (task["doc_to_text"], task["num_fewshot"], task["repeats"]) == ("{{prompt}}", 0, 2)
    assert task["filter_list"][0]["filter"] == [{"function": "take_first_k", "k": 2}]
    functions = {
        node.name
        for node in ast.parse((folder / "lm_eval" / "utils.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert {task[name].removeprefix("utils.") for name in ("custom_dataset", "process_results")} <= functions
    greedy = written(tmp_path / "greedy", sampling=Sampling(temperature=0.0)) / "lm_eval" / "trl_ext_gsm8k_mine.yaml"
    assert "temperature" not in yaml.load(greedy.read_text(), _Loader)["generation_kwargs"]


def test_the_other_tasks_name_the_same_settings(tmp_path: Path) -> None:
    folder = written(tmp_path)
    texts = {name: (folder / f"{name}_task.py").read_text() for name in ("lighteval", "inspect")}
    assert all("@" not in text.replace("@scorer", "").replace("@task", "") for text in texts.values())
    calls = {
        name: {k.arg: k.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) for k in n.keywords}
        for name, text in texts.items()
    }
    assert {name: ast.literal_eval(calls["lighteval"][name]) for name in ("name", "generation_size", "stop_sequence", "num_samples")} == {
        "name": "trl_ext_gsm8k_mine", "generation_size": 33, "stop_sequence": ["</answer>"], "num_samples": [2],
    }  # fmt: skip
    settings = ("max_tokens", "temperature", "top_p", "seed", "stop_seqs", "epochs")
    assert [ast.literal_eval(calls["inspect"][name]) for name in settings] == [33, 0.7, 0.9, 3, ["</answer>"], 2]
    readme = (folder / "README.md").read_text()
    assert "pretrained=runs/my_model --include_path tasks/lm_eval --tasks trl_ext_gsm8k_mine" in readme
    assert "min_tokens=4" in readme
    assert (
        'lighteval accelerate "model_name=runs/my_model,override_chat_template=false,'
        'generation_parameters={temperature:0.7,top_p:0.9}"'
    ) in readme
    assert """--model hf/runs/my_model -M "chat_template='{{ messages[0].content }}'"\n""" in readme
    greedy = written(tmp_path / "greedy", sampling=Sampling(temperature=0.0)) / "README.md"
    assert """messages[0].content }}'" -M do_sample=false\n""" in greedy.read_text()  # which its HF engine would not be


def test_what_is_written_grades_as_the_evaluation_does(tmp_path: Path) -> None:
    exported = Exported.read(written(tmp_path))
    assert exported.problems() == [{k: v for k, v in row.items() if k != "more"} for row in PROBLEMS]
    assert exported.dataset()[1]["prompt"] == "P2"
    closed, open_, wrong = (f"x </think> <answer> {text}" for text in ("1 </answer>", "one", "7"))
    answer = PROBLEMS[0]["answer"]
    assert [exported.grade(text, answer).correct for text in (closed, open_, wrong, "1")] == [True, True, False, False]
    assert exported.grade(open_, answer, cut=True).well_formed is False
    assert exported.means([[closed, wrong]], answer) == {"accuracy": 0.5, "format": 1.0}
    assert exported.means(["nothing"], answer) == {"accuracy": 0.0, "format": 0.0}
    without = Exported.read(written(tmp_path / "b", sampling=Sampling(stop=())))
    assert without.grade(open_, answer).well_formed is False


def inspect_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of it as the written task's scorer needs."""
    there: dict[str, dict[str, Any]] = {
        "inspect_ai": {"Task": SimpleNamespace, "task": lambda function: function},
        "inspect_ai.dataset": {"MemoryDataset": list, "Sample": SimpleNamespace},
        "inspect_ai.model": {"GenerateConfig": SimpleNamespace},
        "inspect_ai.scorer": {
            "CORRECT": "C", "INCORRECT": "I", "Score": SimpleNamespace, "accuracy": str, "stderr": str,
            "scorer": lambda **_: lambda function: function,
        },
        "inspect_ai.solver": {"generate": str},
    }  # fmt: skip
    for name, content in there.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("api", "stop_reason", "value"),
    [("hf", "stop", "I"), ("vllm", "stop", "C"), ("vllm", "max_tokens", "I")],  # its HF engine says "stop" of all
)
def test_inspect_grades_a_response_cut_off_as_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str, stop_reason: str, value: str
) -> None:
    inspect_without_its_package(monkeypatch)
    score = runpy.run_path(str(written(tmp_path) / "inspect_task.py"))["graded"]()
    output = SimpleNamespace(stop_reason=stop_reason, completion="x </think> <answer> 1 ")
    state = SimpleNamespace(model=SimpleNamespace(api=api), output=output, metadata={"answer": "1"})
    assert asyncio.run(score(state, None)).value == value
    output.completion += "</answer>"
    assert asyncio.run(score(state, None)).value == "C"


def test_a_users_own_grader_is_taken_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def lenient(response, reference):\n    return {'format_reward': 1.0, 'answer_reward': 1.0}\n"
    )
    folder = written(tmp_path, grader=f"{tmp_path / 'mine.py'}:lenient", options={})
    assert json.loads((folder / "task.json").read_text())["grader"] == "mine.py:lenient"
    (tmp_path / "mine.py").unlink()
    monkeypatch.chdir("/")
    assert Exported.read(folder).grade("anything", "1").correct


def test_a_folder_with_files_is_not_written_into(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(InputError, match=r"tasks' is there and not empty; name a new folder"):
        written(tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
def test_lm_eval_loads_and_scores_the_task(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.tasks import TaskManager, get_task_dict

    folder = written(tmp_path)
    manager = TaskManager(include_path=str(folder / "lm_eval"), include_defaults=False)
    (task,) = get_task_dict(["trl_ext_gsm8k_mine"], manager).values()
    docs = list(task.test_docs())
    assert [task.doc_to_text(doc) for doc in docs] == ["P1 {{x}}", "P2"]
    scores = task.process_results(docs[0], [["</think> <answer> one ", "x"]])
    assert scores == {"accuracy": 0.5, "format": 0.5}


def test_a_harness_samples_from_a_model_saved_with_stop_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GenerationMixin, "_get_stopping_criteria", unwrap(GenerationMixin._get_stopping_criteria))
    model = tiny_model()
    model.generation_config.stop_strings = ["</answer>"]
    sample = partial(model.generate, torch.tensor([[3, 4]]), max_new_tokens=2, min_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="tokenizer"):
        sample()
    Exported.read(written(tmp_path))
    assert sample().shape == (1, 4)


@pytest.mark.nightly
@pytest.mark.slow
def test_inspect_evaluates_the_task(tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="inspect is not installed")
    try:
        importlib.import_module("tiktoken").get_encoding("o200k_base")  # with which its mock model counts tokens
    except Exception as error:
        pytest.skip(f"inspect's mock model needs a file of the network: {type(error).__name__}")
    from inspect_ai import eval as evaluate
    from inspect_ai.model import ModelOutput, get_model

    task = runpy.run_path(str(written(tmp_path, samples=1) / "inspect_task.py"))["trl_ext_gsm8k_mine"]()
    texts = ["</think> <answer> one ", "</think> <answer> 7 "]
    outputs = [ModelOutput.from_content("mockllm/model", text) for text in texts]
    (log,) = evaluate(task, model=get_model("mockllm/model", custom_outputs=outputs), log_dir=str(tmp_path / "logs"),
                      max_connections=1, display="none")  # fmt: skip
    assert log.status == "success"
    assert sorted(sample.scores["graded"].value for sample in log.samples) == ["C", "I"]
    assert log.results.scores[0].metrics["accuracy"].value == 0.5


@pytest.mark.nightly
@pytest.mark.slow
def test_lighteval_loads_and_scores_the_task(tmp_path: Path) -> None:
    if importlib.util.find_spec("lighteval") is None:
        pytest.skip("lighteval is not installed")
    try:
        from lighteval.models.model_output import ModelResponse
        from lighteval.tasks.lighteval_task import LightevalTask
    except ImportError as error:
        pytest.skip(f"lighteval does not import next to the rest: {error}")
    (config,) = runpy.run_path(str(written(tmp_path) / "lighteval_task.py"))["TASKS_TABLE"]
    task = LightevalTask(config)  # its registry of all tasks needs a network
    task.dataset = LightevalTask.download_dataset_worker(task)
    docs = task.eval_docs()
    assert [doc.query for doc in docs] == ["P1 {{x}}", "P2"]
    response = ModelResponse(text=["</think> <answer> 1 ", "7"])
    assert task.metrics[0].compute_sample(doc=docs[0], model_response=response) == {"accuracy": 0.5}
