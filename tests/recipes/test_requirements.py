"""What a setting needs and is not there is said in a line, before a model loads; what an engine needs is worked out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3MoeConfig, Trainer
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames
from trl import ModelConfig

from tests.recipes.test_grpo import DEFAULT, ON_A_CPU, TINY_RUN
from tests.support.tiny import save_tiny, tiny_model, tiny_tokenizer
from tests.support.versions import needs_vllm
from trl_ext.errors import InputError
from trl_ext.io import write_jsonl
from trl_ext.recipes import evaluation_settings, model_settings, preflight
from trl_ext.recipes.cli import SettingsError, _Parser, read_settings
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.model_settings import check_dtype
from trl_ext.recipes.requirements import check_requirements
from trl_ext.recipes.settings import Data
from trl_ext.recipes.sft import SFT_SETTINGS

on_a_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU has what these lack")

# Flags of a recipe, and what the refusal says.
LACKING: list[tuple[str, list[str]]] = [
    ("--sampling_temperature 0", ["sampling_temperature must be above 0", "--validation_temperature 0"]),
    ("--top_p 0", ["top_p must be above 0"]),
    ("--top_k -3", ["top_k must be at least 0"]),
    ("--min_p 1.5", ["min_p must be between 0 and 1"]),
    ("--repetition_penalty 0", ["repetition_penalty must be above 0"]),
    ("--validation_temperature -1", ["validation_temperature must be at least 0"]),
    ("--validation_max_tokens 0", ["validation_max_tokens must be at least 1"]),
    ("--eval_strategy steps", ["eval_strategy: steps", "--validate_every", "--restore_best"]),
    ("--eval_strategy epoch", ["eval_strategy: epoch", "--validate_every"]),
    ("--eval_on_start true", ["eval_on_start: true", "--validate_every"]),
    ("--load_best_model_at_end true", ["load_best_model_at_end", "--restore_best"]),
    ("--save_steps 0", ["save_steps must be positive, got 0", "save_strategy: no"]),
    ("--save_steps -5", ["save_steps must be positive, got -5"]),
    ("--save_strategy best", ["save_strategy: best", "--restore_best"]),
    ("--lr_scheduler_type reduce_lr_on_plateau", ["reduce_lr_on_plateau", "--validate_every"]),
    ("--lr_scheduler_type cosine_with_min_lr", ["cosine_with_min_lr", "min_lr"]),
    ("--lr_scheduler_type warmup_stable_decay", ["warmup_stable_decay", "num_decay_steps"]),
    ("--use_liger_kernel true", ["use_liger_kernel needs a GPU and liger-kernel"]),
    ("--attn_implementation flash_attention_2", ["flash_attention_2 needs a GPU"]),
    ("--attn_implementation flash_attention_3", ["flash_attention_3 needs a GPU", "flash_attn_interface"]),
    ("--attn_implementation sdp", ["unknown attn_implementation 'sdp'", "Did you mean 'sdpa'?"]),
    ("--cache_implementation statc", ["cache_implementation 'statc'", "static"]),
    ("--torch_compile_backend indctor", ["unknown torch_compile_backend 'indctor'", "'inductor'"]),
    (
        "--torch_compile true --torch_compile_mode fast",
        ["unknown torch_compile_mode 'fast'", "max-autotune-no-cudagraphs"],
    ),
    ("--torch_compile true --torch_compile_mode reduce-overhead", ["one for each shape", "torch_compile_mode default"]),
    ("--report_to wandbb", ["wandbb", "tensorboard"]),
    ("--deepspeed none.json", ["deepspeed none.json: there is no such file"]),
    ("--fsdp_config none.json --fsdp full_shard", ["fsdp_config none.json: there is no such file"]),
    ("--accelerator_config none.json", ["accelerator_config none.json: there is no such file"]),
    ("--tf32 true", ["tf32"]),
    ("--seed -1", ["seed must be in [0, 2**32), got -1"]),
    ("--seed 4294967296", ["seed must be in [0, 2**32)"]),
    (
        '--gradient_checkpointing_kwargs {"reentrant":true}',
        ["gradient_checkpointing_kwargs", "Did you mean 'use_reentrant'?"],
    ),
    ("--fsdp full_shard", ["fsdp shards a model", "accelerate launch"]),
]
# Of a model that is tried without its weights.
OF_A_MODEL = [
    ("--use_peft true --lora_target_modules q_prj", ["use_peft: no adapter can be put on", "q_prj"]),
    ("--use_peft true --lora_r 0", ["no adapter can be put on", "`r` should be a positive integer"]),
    ("--use_peft true --lora_dropout 1.5", ["no adapter can be put on", "dropout probability"]),
    ('--model_init_kwargs {"atn":1}', ["cannot be loaded", "unexpected keyword argument 'atn'"]),
]
OF_AN_ENGINE = [
    ("--vllm_quantization fp8", ["vllm_quantization fp8 needs a GPU", "simulated_fp8"]),
    ("--vllm_quantization simulated_fp9", ["unknown vllm_quantization", "simulated_fp8"]),
    ("--vllm_dtype bf16", ["unknown vllm_dtype 'bf16'", "'bfloat16'"]),
    ("--vllm_model_impl transformer", ["unknown vllm_model_impl 'transformer'", "transformers"]),
]
OF_GRPO = ("top_", "min_p", "repetition", "cache", "temperature 0", "model_impl")


def refusal(settings: Any, default: Path, flags: str) -> str:
    """What ends a recipe with these flags before it reads data or a model."""
    with pytest.raises(Exception) as caught:
        preflight._check_settings(*read_settings(settings, "about", default, [*ON_A_CPU, *flags.split()]))
    assert isinstance(caught.value, (ValueError, InputError)), (flags, caught.value)
    return str(caught.value)


@pytest.mark.moderate
@on_a_cpu
@pytest.mark.parametrize("recipe", ["grpo", "sft"])
def test_what_is_not_there_is_said_before_a_model_loads(recipe: str) -> None:
    settings = GRPO_SETTINGS if recipe == "grpo" else SFT_SETTINGS
    default = DEFAULT if recipe == "grpo" else DEFAULT.with_name("sft_math.yaml")
    for flags, words in LACKING:
        if recipe == "grpo" or not any(name in flags for name in OF_GRPO):
            said = refusal(settings, default, flags)
            assert all(word in said for word in words), (flags, said)
            assert "\n" not in said, flags
    if recipe == "sft":
        assert "activation_offloading needs a GPU" in refusal(settings, default, "--activation_offloading true")


def test_what_a_model_is_not_made_with_is_said_before_it_loads(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    for flags, words in OF_A_MODEL:
        said = refusal(GRPO_SETTINGS, DEFAULT, f"--model_name_or_path {model} {flags}")
        assert all(word in said for word in words), (flags, said)
        assert "\n" not in said, flags
    for modules in ("q_proj v_proj", "q_proj", "layers.1.mlp.up_proj", ".*q_proj", "all-linear"):
        works = f"--model_name_or_path {model} --use_peft true --dtype bfloat16 --lora_target_modules {modules}"
        preflight._check_settings(*read_settings(GRPO_SETTINGS, "about", DEFAULT, [*ON_A_CPU, *works.split()]))


def test_a_loss_of_the_router_needs_experts(tmp_path: Path) -> None:
    model = str(save_tiny(tmp_path / "model"))
    asked = read_settings(GRPO_SETTINGS, "about", DEFAULT, [*ON_A_CPU, "--router_aux_loss_coef", "0.01"])
    with pytest.raises(ValueError, match=r"router_aux_loss_coef 0.01: .*model' \(qwen3\) has no experts.*leave it out"):
        preflight.rows_in_context(Data([], []), asked[0], model, *asked[1:])
    preflight.refuse_loss_of_experts(0.01, Qwen3MoeConfig(), model)
    preflight.refuse_loss_of_experts(None, Qwen3Config(), model)


def test_weights_are_in_a_dtype_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_settings(GRPO_SETTINGS, "about", DEFAULT, ON_A_CPU)[-1]
    half = ModelConfig(dtype="float16")
    check_dtype(half, config)
    monkeypatch.setattr(model_settings, "card_without_bf16", lambda use_cpu: "Tesla T4")
    with pytest.raises(ValueError, match=r"dtype bfloat16: Tesla T4 has no bfloat16, .*set dtype: float32"):
        check_dtype(ModelConfig(dtype="bfloat16"), config)
    config.fp16 = True
    check_dtype(half, config)  # on a CPU, where fp16 has no effect
    monkeypatch.setattr(model_settings, "is_without_fp16", lambda use_cpu: False)
    with pytest.raises(ValueError, match=r"dtype float16 with fp16: the loss scaler .*set dtype: float32"):
        check_dtype(half, config)
    check_dtype(ModelConfig(dtype="float16", use_peft=True), config)


def test_choices_hold_in_a_file_as_on_the_command_line(tmp_path: Path) -> None:
    parser = _Parser(tuple(GRPO_SETTINGS))
    known = {action.dest: action for action in parser._actions if action.choices}
    assert {"dtype", "lr_scheduler_type", "log_level"} <= set(known)
    for name, action in known.items():
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({name: "something"}))
        with pytest.raises(SettingsError, match=rf"{name}.*something"):
            read_settings(GRPO_SETTINGS, "about", tmp_path / "mine.yaml", ON_A_CPU)
        default = getattr(action.default, "value", action.default)
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({name: default} if isinstance(default, str) else {}))
        read_settings(GRPO_SETTINGS, "about", tmp_path / "mine.yaml", ON_A_CPU)


def test_deepspeed_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    config = read_settings(GRPO_SETTINGS, "about", DEFAULT, ON_A_CPU)[-1]
    config.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(
        ValueError, match=r"deepspeed shards a model over processes that a launcher starts: accelerate la"
    ):
        check_requirements(config)
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_requirements(config)


@needs_vllm
@on_a_cpu
def test_what_the_engine_lacks_is_said_before_it_starts() -> None:
    for flags, words in OF_AN_ENGINE:
        said = refusal(GRPO_SETTINGS, DEFAULT, f"--use_vllm true {flags}")
        assert all(word in said for word in words), (flags, said)


def test_every_optimizer_and_schedule_works_or_is_refused() -> None:
    config = read_settings(GRPO_SETTINGS, "about", DEFAULT, ON_A_CPU)[-1]
    refused, said = set(), dict[str, tuple[str, str]]()
    for member in (*OptimizerNames, *SchedulerType):
        which = "optim" if isinstance(member, OptimizerNames) else "lr_scheduler_type"
        before = getattr(config, which)
        setattr(config, which, member)
        try:
            check_requirements(config)
        except ValueError as error:
            refused.add(member.value)
            said[member.value] = f"{which} {member.value}", str(error)
        else:
            if which == "optim":
                Trainer.get_optimizer_cls_and_kwargs(config)
        setattr(config, which, before)
    assert all(error.startswith(named) and "\n" not in error for named, error in said.values())
    assert {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "linear", "cosine"}.isdisjoint(refused)
    if shutil.which("nvidia-smi") is None:
        assert {"adamw_torch_xla", "cosine_with_min_lr"} <= refused


@on_a_cpu
def test_bf16_on_a_cpu_trains_on_the_cpu_and_says_so() -> None:
    for flags in (["--bf16", "true"], ["--bf16_full_eval", "true"]):
        config = read_settings(GRPO_SETTINGS, "about", DEFAULT, flags)[-1]
        assert config.use_cpu
        assert ("bfloat16 by autocast" in config.precision_reason) == bool(config.bf16)
    assert not read_settings(GRPO_SETTINGS, "about", DEFAULT, [])[-1].use_cpu


# The engine's context.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose context is 128 tokens, and rows whose longest prompt is to validate on."""
    shape = tiny_model().config
    shape.vocab_size = len(tiny_tokenizer())
    for part in (type(tiny_model())(shape), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "bare.prompt").write_text("{question}")
    for split, longest in (("train", 20), ("validation", 58)):
        rows = [{"problem": "a " * n, "answer": "1"} for n in (*range(1, 16), longest)]
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    return tmp_path


def contexts(folder: Path, **more: Any) -> list[Any]:
    """What a run of the recipe starts its engine with, as far as its context is concerned."""
    task = {"dataset": str(folder / "{split}.jsonl"), "prompt": str(folder / "bare.prompt")}
    run = {"output_dir": str(folder / "run"), "model_name_or_path": str(folder / "model"), **task}
    (folder / "mine.yaml").write_text(yaml.safe_dump({**TINY_RUN, "use_vllm": True, **run, **more}))
    task, model, config = read_settings(GRPO_SETTINGS, "about", folder / "mine.yaml", ON_A_CPU)
    preflight.prepare(task, model, config, task.data)
    return [config.engine_settings().get("max_model_len"), config.vllm_max_model_length]


@pytest.mark.moderate
@needs_vllm
def test_an_engines_context_follows_from_the_rows(folder: Path) -> None:
    assert contexts(folder) == [128, None]  # 58 + 8, in whole blocks
    assert contexts(folder, sampling_max_tokens=6) == [64, None]
    assert contexts(folder, sampling_max_tokens=6, validation_max_tokens=7) == [128, None]
    assert contexts(folder, sampling_max_tokens=70) == [128, None]  # not more than the model's
    assert contexts(folder, vllm_max_model_length=99) == [None, 99]
    assert contexts(folder, use_vllm=False) == [None, None]
    dropped = {"sampling_max_tokens": 50, "vllm_max_model_length": None, "validation_max_tokens": 100}
    assert contexts(folder, **dropped, too_long="drop") == [128, None]


class Started(Exception):
    """Carries what an engine is started with."""


@needs_vllm
def test_an_evaluations_context_follows_from_its_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(model: str, sampling: Any, turns: None, **engine: Any) -> None:
        raise Started(engine["max_model_len"])

    monkeypatch.setattr(evaluation_settings, "VLLMSampler", start)
    found = []
    for more in ({"max_tokens": 6}, {"max_tokens": 7}, {"max_tokens": 6, "vllm_max_model_length": 99}):
        asked: Any = {"dataset": str(folder / "{split}.jsonl"), "prompt": str(folder / "bare.prompt"), **more}
        asked |= {"model_name_or_path": str(folder / "model"), "use_vllm": "true", "stop": ["1"]}
        with pytest.raises(Started) as caught:
            run_evaluation(Evaluation(**asked, output_dir=str(folder / str(len(found)))))
        found.append(caught.value.args[0])
    assert found == [64, 128, 99]
