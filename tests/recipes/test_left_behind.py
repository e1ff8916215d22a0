"""What runs leave behind, by every program that reads it: each pair runs, or is refused with the next step."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml

from tests.generation.test_merging import lora, save_adapter
from tests.recipes.test_grpo import ON_A_CPU, SMALL, TINY_RUN
from tests.recipes.test_sft_and_pipeline import SMALL_EI, SMALL_SFT
from tests.support.recipe import run_recipe
from tests.support.versions import needs_vllm
from trl_ext.browse.command import browse
from trl_ext.errors import PushError
from trl_ext.evaluation.compared import scores_of
from trl_ext.generation.merging import whole_model
from trl_ext.generation.model_source import locate
from trl_ext.hub.card import write_model_card
from trl_ext.hub.push import merge, merged, push
from trl_ext.io import read_jsonl
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.best_of_n import BestOfN, run_best_of_n
from trl_ext.recipes.cli import parse
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.expert_iteration import EXPERT_ITERATION_SETTINGS
from trl_ext.recipes.explain import explain, read
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.sft import SFT_SETTINGS
from trl_ext.runs.resume import find_checkpoint
from trl_ext.tools.estimate.planned import Launch
from trl_ext.tools.estimate.recipe import planned_run

GRPO = {**TINY_RUN, "max_steps": 1, "validation_problems": 2, "train_problems": 16}
EI = {**SMALL_EI, "n_ei_steps": 1, "validation_problems": 2, "save_strategy": "no"}
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
SEED = 3
GREEDY = {
    "validation_temperature": 0.0, "validation_problems": 4, "validate_every": 2, "sampling_max_tokens": 20, "seed": SEED,
}  # fmt: skip


def recipe(settings: tuple[type, ...], content: dict[str, Any], model: Path | str, folder: Path, **more: Any) -> Any:
    """A recipe's summary; its folder is `run` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"model_name_or_path": str(model), "output_dir": str(folder / "run"), "disable_tqdm": True, **more}
    (folder / "mine.yaml").write_text(yaml.safe_dump({**content, **run}))
    return run_recipe(
        *parse(settings, "about", folder / "mine.yaml", ["--config", str(folder / "mine.yaml"), *ON_A_CPU])
    )


def evaluated(model: Path | str, folder: Path, kind: Any = Evaluation, **more: Any) -> Any:
    fixed = {"problems": 2, "max_tokens": 6, "use_vllm": "false", "temperature": 0.0, "output_dir": str(folder)}
    return kind(model_name_or_path=str(model), **{**fixed, **more})


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs of three steps, with checkpoints, and what else there may be, all made of these."""
    top, saving = tmp_path_factory.mktemp("left"), {"save_strategy": "steps", "save_steps": 1, **GREEDY}
    cache = pytest.MonkeyPatch()
    cache.setenv("TRL_EXT_CACHE", str(top / "cache"))
    config = dataclasses.replace(SMALL, steps=60, batch=16, hidden=64, heads=2)  # it has read enough to differ
    base = make_base_policy(0, top, config, progress=False)
    recipe(SFT_SETTINGS, {**SMALL_SFT, **saving, **LORA, "learning_rate": 0.02}, base, top / "of_lora")
    recipe(SFT_SETTINGS, {**SMALL_SFT, **saving, "max_steps": 1}, base, top / "of_full")
    (top / "of_lora" / "run").rename(top / "lora")
    (top / "of_full" / "run").rename(top / "full")
    kinds: dict[str, peft.PeftConfig] = {
        "rslora": lora(use_rslora=True), "dora": lora(use_dora=True), "saved": lora(modules_to_save=["lm_head"]),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    }  # fmt: skip
    for name, config in kinds.items():
        shutil.copytree(top / "lora", top / name, ignore=shutil.ignore_patterns("checkpoint-*", "adapter_*"))
        save_adapter(top / name, base, config)
    ignored = shutil.ignore_patterns("adapter_*", "summary.json", "README.md")
    shutil.copytree(top / "lora", top / "killed", ignore=ignored)
    shutil.copytree(top / "lora" / "checkpoint-3", top / "killed" / "checkpoint-3", dirs_exist_ok=True)
    shutil.copytree(top / "full", top / "sharded", ignore=shutil.ignore_patterns("model.safetensors", "checkpoint-*"))
    (top / "sharded" / "zero_to_fp32.py").touch()
    for stage in ("full", "lora"):
        shutil.copytree(top / stage, top / "pipeline" / f"stage_of_{stage}")
    shutil.copy(top / "lora" / "summary.json", top / "pipeline")
    yield top
    cache.undo()


WHOLE, ADAPTERS = ("full", "full/checkpoint-1"), ("lora", "rslora", "dora", "saved", "lora/checkpoint-2")
EVERY = (*WHOLE, *ADAPTERS, "prompt", "killed", "sharded", "pipeline")
TRAINED = ("full", "saved", "lora/checkpoint-2", "prompt", "killed")  # a run of each reader with each takes minutes
CHECKPOINTS, NO_RUN = ("full/checkpoint-1", "lora/checkpoint-2"), ("killed", "sharded", "pipeline")
NO_MODEL = {
    "killed": r"a run without a final model, .*: give its last checkpoint, '.*/killed/checkpoint-3'",
    "sharded": r"DeepSpeed's, sharded over the ranks: python .*zero_to_fp32.py",
    "pipeline": r"holds no model. Models in it: '.*/stage_of_full', '.*/stage_of_lora'",
}
FURTHER = NO_MODEL | {"prompt": "PROMPT_TUNING, which PEFT does not train further: start from its base model"}
MERGING = NO_MODEL | {"prompt": "PROMPT_TUNING changes no weights. Sample with HF generate"}
READERS: dict[str, tuple[Callable[[Path, Path], object], dict[str, str]]] = {
    "evaluate": (lambda model, out: run_evaluation(evaluated(model, out)), NO_MODEL),
    "evaluate with vLLM": (lambda model, _: whole_model(str(model)), MERGING),
    "best_of_n": (lambda model, out: run_best_of_n(evaluated(model, out, BestOfN, samples=2, at=[1, 2])), NO_MODEL),
    "grpo": (lambda model, out: recipe(GRPO_SETTINGS, GRPO, model, out), FURTHER),
    "a new adapter": (lambda model, out: recipe(GRPO_SETTINGS, {**GRPO, **LORA}, model, out), MERGING),
    "sft": (lambda model, out: recipe(SFT_SETTINGS, {**SMALL_SFT, "max_steps": 1}, model, out), FURTHER),
    "expert_iteration": (lambda model, out: recipe(EXPERT_ITERATION_SETTINGS, EI, model, out), FURTHER),
    "resume": (
        lambda model, out: resumed(model, out),
        dict.fromkeys(set(EVERY) - {*CHECKPOINTS}, "trainer_state.json is missing; `--resume auto` takes the newest good"),
    ),
    "export": (
        lambda model, out: run_evaluation(evaluated(model, out, export=str(out / "tasks"))),
        NO_MODEL | dict.fromkeys((*ADAPTERS, "prompt"), r"every harness .*python -m trl_ext.hub merge \S+ \S+-merged"),
    ),
    "merge": (
        lambda model, out: merge(model, out / "whole"), MERGING | dict.fromkeys(WHOLE, "holds a whole model already")
    ),
    "push": (
        lambda model, _: push(model, "me/x"),
        dict.fromkeys(EVERY, "the Hub cannot be used .*to push it later")
        | dict.fromkeys((*CHECKPOINTS, *NO_RUN), "holds no finished run: it needs summary.json and one of"),
    ),
    "push merged": (
        lambda model, out: merged(model, out, "me/x"),
        MERGING | dict.fromkeys((*WHOLE, *NO_RUN), "holds no adapter") | {"lora/checkpoint-2": "summary.json"},
    ),
    "card": (lambda model, _: write_model_card(model), dict.fromkeys((*CHECKPOINTS, "killed", "pipeline"), "summary.json|config.yaml")),
    "browse": (
        lambda model, out: browse([model], out / "page.html"),
        dict.fromkeys((*CHECKPOINTS, "pipeline"), "has nothing to show; give the folder of a run"),
    ),
    "compare": (
        lambda model, _: scores_of(model),
        dict.fromkeys(EVERY, "recipes/evaluate.py --model_name_or_path .* --output_dir .*-evaluated first")
        | dict.fromkeys(("killed", "pipeline"), "recipes/evaluate.py --output_dir"),
    ),
    "explain": (lambda model, _: explain(read(None, ["--model_name_or_path", str(model)])), {}),
    "estimate": (
        lambda model, out: planned_run(settings_file(out), [f"model_name_or_path={model}"], Launch()),
        dict.fromkeys(("killed", "pipeline"), "its config.json is neither in a folder of that name"),
    ),
}  # fmt: skip


def resumed(model: Path, out: Path) -> Any:
    """The run of a checkpoint, on a copy of its folder; no other folder is one to resume from."""
    if not model.name.startswith("checkpoint-"):
        return find_checkpoint(str(model), out)
    copy = shutil.copytree(model.parent, out / "run")
    content = yaml.safe_load((copy / "config.yaml").read_text())
    return recipe(SFT_SETTINGS, content, content["model_name_or_path"], out, resume=str(copy / model.name))


def settings_file(out: Path) -> Path:
    (out / "mine.yaml").write_text(yaml.safe_dump({**GRPO, "model_name_or_path": "m"}))
    return out / "mine.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_every_program_reads_it_or_refuses_it_by_name(
    reader: str, left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    use, refusals = READERS[reader]
    for name in TRAINED if reader in ("a new adapter", "sft", "expert_iteration") else EVERY:
        (out := tmp_path / name.replace("/", "_")).mkdir()
        said = outcome(use, left / name, out)
        assert (said is None) == (name not in refusals), (name, said)
        assert said is None or re.search(refusals[name], said), (name, said)


def outcome(use: Callable[[Path, Path], object], model: Path, out: Path) -> str | None:
    """The message of a refusal; None where there is none."""
    try:
        use(model, out)
    except (ValueError, OSError, PushError, SystemExit) as refusal:
        return str(refusal)
    return None


@pytest.mark.slow
def test_an_evaluation_says_of_an_adapter_what_its_run_said(left: Path, tmp_path: Path) -> None:
    report = run_evaluation(evaluated(left / "lora", tmp_path / "e", problems=4, max_tokens=20, seed=SEED))
    logged = read_jsonl(left / "lora" / "generations.jsonl")
    first, last = ({row["prompt"]: row["response"] for row in logged if row["step"] == step} for step in (0, 3))
    assert {row["prompt"]: row["response"] for row in report.rows} == last
    assert first.keys() == last.keys()
    assert first != last
    said = json.loads((left / "lora" / "summary.json").read_text())["validations"][-1]
    assert (report.accuracy, len(report.rows)) == (said["accuracy"], said["problems"])


@pytest.mark.slow
def test_an_adapter_is_trained_further_or_gets_a_new_one_on_top(left: Path, tmp_path: Path) -> None:
    settings = {**SMALL_SFT, "max_steps": 1, "learning_rate": 0.1}
    recipe(SFT_SETTINGS, settings, left / "saved", tmp_path / "same")
    recipe(SFT_SETTINGS, {**settings, **LORA}, left / "saved", tmp_path / "new")
    first, same, new = (locate(str(path)) for path in (left / "saved", tmp_path / "same/run", tmp_path / "new/run"))
    assert same.base == first.base
    assert new.base == whole_model(first.name)
    configs = [peft.PeftConfig.from_pretrained(source.adapter) for source in (first, same, new)]
    assert [config.modules_to_save for config in configs] == [["lm_head"], ["lm_head"], None]
    assert same.tokenizer == str(tmp_path / "same/run")
    states = [peft.load_peft_weights(str(source.adapter)) for source in (first, same)]
    assert states[0].keys() == states[1].keys()
    assert any(not torch.equal(weight, states[1][name]) for name, weight in states[0].items())


@pytest.mark.vllm
@pytest.mark.timeout(900)  # several engines are started, 10 to 20 s each
@needs_vllm
def test_vllm_says_of_an_adapter_what_hf_generate_says(left: Path, tmp_path: Path) -> None:
    engine = {"use_vllm": "true", "vllm_enforce_eager": True, "vllm_max_model_length": 256}
    both = [
        run_evaluation(
            evaluated(left / "saved", tmp_path / name, problems=6, max_tokens=12, dtype="float32", **settings)
        )
        for name, settings in {"hf": {}, "vllm": engine}.items()
    ]
    assert [row["response"] for row in both[0].rows] == [row["response"] for row in both[1].rows]
