"""`deterministic`: the whole table of what is covered, refusals before a model loads, and runs that are the same."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import requests
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel
from trl import ModelConfig

from tests.generation.test_vllm import SETTINGS, save_model
from tests.recipes.test_grpo import TINY_RUN
from tests.support.tiny import fraction_of_ones, make_trainer, save_tiny, save_wide, tiny_sft, tiny_tokenizer
from tests.support.versions import needs_vllm
from tests.support.vllm_server import VllmServer, serving
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.errors import InputError
from trl_ext.generation import determinism
from trl_ext.generation.determinism import (
    AMPERE,
    ATTENTION,
    COLOCATED,
    CPU,
    DEVICES,
    ENGINES,
    EVALUATION,
    FAMILIES,
    HF,
    HOPPER,
    OLDER,
    OTHER,
    SERVER,
    TABLE,
    Row,
    check_covered,
    check_model,
    engine_arguments,
    lacks_of_server,
    prepare_process,
    row_of,
)  # fmt: skip
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer
from trl_ext.recipes import preflight
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.cli import parse
from trl_ext.recipes.evaluate import prepare as prepare_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.model_settings import check_model_settings
from trl_ext.recipes.settings import Data

IN_VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
ON_CPU: dict[str, Any] = {  # of what a vLLM server answers to /server_info, here on a CPU and one request at a time
    "vllm_env": {"VLLM_BATCH_INVARIANT": False},
    "vllm_config": {
        "device_config": {"device": "cpu"}, "model_config": {"dtype": "torch.float32", "quantization": None},
        "scheduler_config": {"max_num_seqs": 1}, "cache_config": {"enable_prefix_caching": False},
        "attention_config": {"backend": None},
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    """What transformers switches on for the rest of a process, in Python and in its environment, is off again."""
    with patch.dict(os.environ):
        yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(determinism, "device_of", lambda use_cpu: device)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def config(**settings: Any) -> ExtGRPOConfig:
    given = {"output_dir": "unused", "bf16": False, "use_cpu": True, "report_to": "none", **settings}
    return ExtGRPOConfig(**given, deterministic=True)


def test_every_engine_and_device_has_one_row() -> None:
    found = [(engine, device) for row in TABLE for engine in row.engines for device in row.devices]
    assert sorted(found) == sorted((engine, device) for engine in ENGINES for device in DEVICES)
    covered = {(engine, device) for engine, device in found if not row_of(engine, device).refused}
    served = {(SERVER, AMPERE), (SERVER, HOPPER), (EVALUATION, AMPERE), (EVALUATION, HOPPER), (COLOCATED, HOPPER)}
    assert covered == {(engine, CPU) for engine in ENGINES} | served


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_table_is_what_is_refused(engine: str, device: str) -> None:
    row = row_of(engine, device)
    begin = f"deterministic with {engine} on a {device}"
    if row.refused:
        with pytest.raises(ValueError, match=begin) as refused:
            check_covered(engine, device, *row.dtypes[:1])
        assert str(refused.value) == f"{begin}: {row.refused}"
        return
    for dtype in (None, "auto", "float32", "bfloat16", "float16"):
        if dtype in (None, "auto", *row.dtypes) or not row.dtypes:
            assert check_covered(engine, device, dtype) is row
        else:
            with pytest.raises(ValueError, match=f"^{begin}: only in {row.dtypes[0]}, got {dtype}$"):
                check_covered(engine, device, dtype)
    if engine != HF:
        with pytest.raises(ValueError, match=f"^{begin}: not with vllm_quantization='fp8'; leave it out$"):
            check_covered(engine, device, quantization="fp8")
    for family in (*FAMILIES, "qwen3_moe", "mamba"):
        if family in row.families or not row.families:
            check_model(row, family, "sdpa")
        else:
            with pytest.raises(ValueError, match=rf"verified with ernie4_5, .*, and the model is of {family}$"):
                check_model(row, family, "sdpa")
    for attention in (None, *ATTENTION, "eager", "flex_attention"):
        if attention in (None, *ATTENTION) or not row.is_batch_invariant:
            check_model(row, "qwen3", attention)
        else:
            with pytest.raises(ValueError, match=f"attend by FlashAttention, and attn_implementation is {attention}"):
                check_model(row, "qwen3", attention)


def test_which_device_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert determinism.device_of(use_cpu=True) == CPU
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert determinism.device_of(use_cpu=True) == CPU
    assert determinism.device_of(use_cpu=False) == OTHER  # MPS
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert determinism.device_of(use_cpu=False) == OTHER  # ROCm
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, device in {(7, 5): OLDER, (8, 0): AMPERE, (8, 9): AMPERE, (9, 0): HOPPER, (12, 0): HOPPER}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert determinism.device_of(use_cpu=False) == device


@needs_vllm
def test_settings_are_refused_before_a_model_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for settings, line in {
        ("vllm_dtype", "bfloat16"): r"deterministic with colocated vLLM on a CPU: only in float32, got bfloat16",
        ("vllm_quantization", "simulated_fp8"): r"not with vllm_quantization='simulated_fp8'; leave it out",
        (
            "lr_decay_fraction",
            0.5,
        ): "deterministic with lr_decay_fraction, which follows the clock: leave one of them out",
    }.items():
        with pytest.raises(ValueError, match=line):
            config(**IN_VLLM, time_budget=60.0, **dict([settings]))
        with pytest.raises(ValueError, match=line):
            ExtSFTConfig(**{**IN_VLLM, "output_dir": "unused", "bf16": False, "use_cpu": True, "report_to": "none"},
                         time_budget=60.0, deterministic=True, **dict([settings]))  # fmt: skip
    with pytest.raises(ValueError, match="deterministic with load_in_4bit: bitsandbytes' kernels are not covered"):
        check_model_settings(ModelConfig(use_peft=True, load_in_4bit=True), config(use_vllm=False))
    on(monkeypatch, HOPPER)
    with pytest.raises(ValueError, match=r"no deterministic cumulative sum there, which top_p=0\.9 takes; set 1"):
        config(**IN_VLLM, top_p=0.9)
    config(**{**IN_VLLM, "vllm_mode": "server"}, top_p=0.9)  # in a process of its own
    with pytest.raises(ValueError, match=r"HF generate on a GPU of 9\.0 or newer: .* set use_vllm: true"):
        config(use_vllm=False)
    for device, line in {
        AMPERE: "has no gradient: use a vLLM server, vllm_mode: server",
        OLDER: "8.0 or newer",
    }.items():
        on(monkeypatch, device)
        with pytest.raises(ValueError, match=line):
            config(**IN_VLLM)


@pytest.mark.moderate
def test_evaluations_are_refused_before_a_model_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = str(save_tiny(tmp_path / "model"))
    given = {"model_name_or_path": model, "deterministic": True}
    assert Evaluation(**given, use_vllm="false").covered == row_of(HF, CPU)
    with pytest.raises(ValueError, match="leave it out with responses and export"):
        Evaluation(**given, use_vllm="false", export="somewhere")
    on(monkeypatch, HOPPER)
    for kind in (Evaluation, functools.partial(BestOfN, samples=16)):
        with pytest.raises(ValueError, match=r"HF generate on a GPU of 9\.0 or newer: torch has no deterministic cumu"):
            kind(**given, use_vllm="false")


@needs_vllm
@pytest.mark.moderate
def test_a_model_is_refused_before_it_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [{"prompt": f"a {n}", "answer": "1"} for n in range(8)]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**TINY_RUN, "output_dir": str(tmp_path / "run")}))
    on(monkeypatch, HOPPER)
    flags = ["--use_cpu", "true", "--bf16", "false", "--use_vllm", "true", "--deterministic", "true"]
    flags += ["--model_name_or_path", str(save_model(tmp_path / "model", True))]
    for attention, line in {
        "eager": "attend by FlashAttention, and attn_implementation is eager",
        "sdpa": None,
    }.items():
        parsed = parse(GRPO_SETTINGS, None, tmp_path / "run.yaml", [*flags, "--attn_implementation", attention])
        with contextlib.nullcontext() if line is None else pytest.raises(InputError, match=line):
            preflight.prepare(*parsed, lambda seed: Data(rows[:6], rows[5:]))
    other = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tiny_tokenizer()), n_embd=32, n_layer=1, n_head=2, n_positions=64)
    )
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    problems = tmp_path / "validation.jsonl"
    problems.write_text("".join(json.dumps({"problem": row["prompt"], "answer": "1"}) + "\n" for row in rows))
    (tmp_path / "bare.prompt").write_text("{question}")
    settings = Evaluation(
        model_name_or_path=str(tmp_path / "other"), dataset=str(problems), prompt=str(tmp_path / "bare.prompt"), max_tokens=8,
        use_vllm="true", deterministic=True, output_dir=str(tmp_path / "evaluation"),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"verified with ernie4_5, .*, and the model is of gpt2"):
        prepare_evaluation(settings)


@needs_vllm
def test_a_whole_process_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("VLLM_BATCH_INVARIANT", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
    for name in names:
        os.environ.pop(name, None)
    config(**IN_VLLM)  # on a CPU, where vLLM has no such kernels and would refuse to start
    on(monkeypatch, HOPPER)
    config(**{**IN_VLLM, "vllm_mode": "server"})
    assert not any(name in os.environ for name in names)
    made = config(**IN_VLLM)
    assert [os.environ[name] for name in names] == ["1", ":16:8", "1"]
    assert made.full_determinism
    assert made.engine_settings()["covered"] == row_of(COLOCATED, HOPPER)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    prepare_process(COLOCATED, row_of(COLOCATED, HOPPER))  # it was imported with it
    del os.environ["VLLM_BATCH_INVARIANT"]
    with pytest.raises(ValueError, match="vLLM was imported without VLLM_BATCH_INVARIANT=1, which it reads then"):
        prepare_process(COLOCATED, row_of(COLOCATED, HOPPER))


@pytest.mark.vllm
def test_vllm_takes_what_the_engine_is_started_with() -> None:
    from vllm.config import AttentionConfig

    assert engine_arguments(row_of(COLOCATED, CPU), "sdpa") == {"dtype": "float32"}
    for row in (row for row in TABLE if row.is_batch_invariant):
        for attention, version in {**ATTENTION, None: None}.items():
            given = engine_arguments(row, attention)
            made = AttentionConfig(**given["attention_config"])
            assert (given["dtype"], made.backend.name, made.flash_attn_version) == ("bfloat16", "FLASH_ATTN", version)
            assert made.backend.get_class().supports_batch_invariance()


def changed(info: dict[str, Any], part: str, **values: Any) -> dict[str, Any]:
    info = copy.deepcopy(info)
    info["vllm_config"][part] |= values
    return info


def test_what_a_server_lacks_is_told_with_the_remedy() -> None:
    assert lacks_of_server(ON_CPU) is None
    for info in (
        changed(ON_CPU, "scheduler_config", max_num_seqs=2),
        changed(ON_CPU, "cache_config", enable_prefix_caching=True),
    ):
        assert lacks_of_server(info) == (
            "decodes what has arrived together, which on a CPU changes log-probabilities",
            " --max-num-seqs 1 --no-enable-prefix-caching",
        )
    assert lacks_of_server(changed(ON_CPU, "model_config", dtype="torch.bfloat16")) == (
        "has weights in torch.bfloat16, and deterministic covers float32", " --dtype float32",
    )  # fmt: skip
    gpu = changed(ON_CPU, "device_config", device="cuda")
    gpu = changed(gpu, "model_config", dtype="torch.bfloat16")
    assert lacks_of_server(gpu) == (
        "has kernels that depend on the batch",
        " VLLM_BATCH_INVARIANT=1 in its environment",
    )
    gpu["vllm_env"]["VLLM_BATCH_INVARIANT"] = True
    assert lacks_of_server(gpu) == ("may attend by another kernel than the trainer", " --attention-backend FLASH_ATTN")
    for written in ("FLASH_ATTN", "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"):
        assert lacks_of_server(changed(gpu, "attention_config", backend=written)) is None
    quantized = changed(gpu, "model_config", quantization="fp8")
    assert lacks_of_server(quantized) == (
        "has quantized weights (fp8), which deterministic does not cover", "out --quantization",
    )  # fmt: skip
    del gpu["vllm_env"]  # as of a version that does not tell
    assert lacks_of_server(gpu) == (
        "has kernels that depend on the batch",
        " VLLM_BATCH_INVARIANT=1 in its environment",
    )


def bit_identical(one: Any, other: Any) -> bool:
    """The weights, and all that was logged but for times."""
    weights = zip(one.model.parameters(), other.model.parameters(), strict=True)
    logs = [
        [
            {k: v for k, v in entry.items() if not any(w in k for w in ("runtime", "per_second", "time", "seconds"))}
            for entry in t.state.log_history
        ]
        for t in (one, other)
    ]
    return all(a.equal(b) for a, b in weights) and logs[0] == logs[1]


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_two_runs_without_an_engine_are_the_same(tmp_path: Path, bf16: bool) -> None:
    def run(name: str, **settings: Any) -> Any:
        given = {"preset": "grpo_clip", "use_vllm": False, "bf16": bf16, **settings}
        trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / name, fraction_of_ones, **given)
        trainer.train()
        return trainer

    usual = run("usual")
    assert not torch.are_deterministic_algorithms_enabled()
    first = run("first", deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert bit_identical(first, run("second", deterministic=True))
    assert bit_identical(first, usual)  # torch has nothing else for these operations on a CPU


@pytest.mark.moderate
def test_fine_tuning_and_evaluation_switch_it_on(tmp_path: Path) -> None:
    rows = [{"input_ids": [9, 7, 10, 8, 11, 1], "completion_mask": [0, 0, 0, 0, 1, 1]}]
    tiny_sft(ExtSFTTrainer, ExtSFTConfig, tmp_path / "run", rows, use_vllm=False)
    Evaluation(model_name_or_path=str(save_tiny(tmp_path / "model")), use_vllm="false").sampler(str(tmp_path / "model"))
    assert not torch.are_deterministic_algorithms_enabled()
    tiny_sft(ExtSFTTrainer, ExtSFTConfig, tmp_path / "run", rows, use_vllm=False, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    settings = Evaluation(model_name_or_path=str(tmp_path / "model"), use_vllm="false", deterministic=True)
    settings.sampler(str(tmp_path / "model"))
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.vllm
def test_two_runs_are_bit_identical(tmp_path: Path) -> None:
    model = str(save_wide(tmp_path / "model"))

    def run(name: str) -> Any:
        given = {**SETTINGS, "vllm_dtype": "auto", "deterministic": True}
        with patch.dict(os.environ):  # an engine leaves a rank in it, for which the next trainer would take DDP
            trainer = make_trainer(
                ExtGRPOTrainer, ExtGRPOConfig, tmp_path / name, fraction_of_ones, model=model, **given
            )
            trainer.train()
        return trainer

    first, second = run("first"), run("second")
    assert first.vllm_generation.llm.llm_engine.vllm_config.model_config.dtype == torch.float32  # the covered one
    assert bit_identical(first, second)
    logged = [entry for entry in first.state.log_history if "sampling/identical_fraction" in entry]
    assert len(logged) == 2
    assert all(0 < entry["sampling/identical_fraction"] <= 1 for entry in logged)
    assert all(entry["sampling/sampling_logp_difference/max"] < 2e-5 for entry in logged)


@pytest.mark.vllm
@pytest.mark.nightly
def test_two_evaluations_by_an_engine_are_the_same(tmp_path: Path) -> None:
    model = str(save_wide(tmp_path / "model"))
    settings = Evaluation(model_name_or_path=model, use_vllm="true", deterministic=True, max_tokens=12, stop=["stop"])

    def sampled() -> tuple[str, list[Any]]:
        with patch.dict(os.environ):
            sampler = settings.sampler(model, context=64)
            return sampler.dtype, sampler([f"a {n} + b" for n in range(9)], range(9))

    first, second = sampled(), sampled()
    assert first == second
    assert first[0] == "float32"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    model = save_wide(tmp_path_factory.mktemp("served") / "model")
    with serving(model, "--max-num-seqs", "1", "--no-enable-prefix-caching") as started:
        yield started.wait()


@pytest.mark.vllm
@pytest.mark.timeout(280)
def test_a_server_that_is_covered_answers_whatever_else_is_asked(server: VllmServer, tmp_path: Path) -> None:
    info = requests.get(f"{server.url}/server_info?config_format=json", timeout=60).json()
    assert {name: type(info["vllm_config"][name]) for name in ON_CPU["vllm_config"]} == dict.fromkeys(
        ON_CPU["vllm_config"], dict
    )
    assert lacks_of_server(info) is None
    settings = {**SETTINGS, "vllm_mode": "server", "vllm_server_base_url": server.url, "deterministic": True}
    for name in ("vllm_dtype", "vllm_max_model_length", "vllm_enforce_eager"):
        del settings[name]
    given = {"model": str(server.model), **settings}
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, **given)
    engine, torch_seed = trainer.vllm_generation, torch.manual_seed(0)
    prompts = torch.randint(3, 18, (12, 33), generator=torch_seed).tolist()
    with engine.seeds.fixed(3):
        together = engine.generate(prompts=prompts, images=None, num_generations=1)
    for count in (1, 4):  # the same prompts with the same seeds, in other company
        with engine.seeds.fixed(3):
            fewer = engine.generate(prompts=prompts[:count], images=None, num_generations=1)
        assert fewer[1] == together[1][:count]
        assert fewer[2] == together[2][:count]
    with (
        patch("trl_ext.generation.server.lacks_of_server", lambda info: ("lacks it", " --flag")),
        pytest.raises(InputError, match=r"the vLLM server at .* lacks it; start it with --flag"),
    ):
        make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, **given)


def test_the_rows_say_what_is_covered() -> None:
    assert all(bool(row.refused) != bool(row.known_by) for row in TABLE)
    assert all(isinstance(row, Row) and (row.engines == (HF,) or row.refused or row.dtypes) for row in TABLE)
