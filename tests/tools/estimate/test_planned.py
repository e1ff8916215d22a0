"""A recipe's settings to what decides memory and time, as on the machine that runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from trl import ModelConfig

from tests.support.tiny import tiny_model
from tests.tools.estimate.runs import planned
from trl_ext import ExtGRPOConfig
from trl_ext.errors import InputError
from trl_ext.runs.recipes import RECIPES
from trl_ext.tools.estimate.planned import Launch, Lengths, NoEstimateError, PlannedRun
from trl_ext.tools.estimate.recipe import for_processes, planned_run, recipe_settings

ROOT = Path(__file__).parents[3]
GRPO = ROOT / "recipes/grpo_math_qwen2.5_math_1.5b.yaml"


def read(*changes: str, config: Path = GRPO, launch: Launch | None = None) -> PlannedRun:
    """With changes of the settings."""
    return planned_run(config, changes, launch or Launch(2, zero_stage=2))


def test_the_real_recipe_is_read_as_on_two_gpus() -> None:
    run = read()
    assert (run.recipe, run.rollout, run.group, run.step, run.updates) == ("grpo", 256, 8, 256, 1)
    assert (run.config.per_device_train_batch_size, run.config.gradient_accumulation_steps) == (2, 64)
    assert (run.engine, run.engine_sequences, run.config.vllm_gpu_memory_utilization) == ("vllm", 128, 0.3)
    assert (run.autocast_dtype, run.weights_dtype) == (torch.bfloat16, torch.float32)
    assert run.config.gradient_checkpointing
    assert (run.lengths.longest_prompt, run.lengths.max_completion) == (1750, 1024)
    assert (run.task.validate_every, run.save_every) == (10, 20)
    assert run.config.policy_loss == "reinforce"


def test_rollouts_ahead_are_read_with_a_server_only() -> None:
    assert read("vllm_mode=server", "rollout_ahead=1", launch=Launch()).samples_ahead
    assert not read("vllm_mode=server", launch=Launch()).samples_ahead
    for changes in (["rollout_ahead=1"], ["rollout_ahead=2", "vllm_mode=server"]):
        with pytest.raises(InputError, match=r"rollout_ahead \d: 0, or 1 with use_vllm: true and vllm_mode: server"):
            read(*changes)


@pytest.mark.parametrize("config", ["leaderboard", "pipeline"])
def test_the_stages_of_a_pipeline_are_estimated_one_by_one(config: str) -> None:
    with pytest.raises(InputError, match="one by one") as found:
        read(config=GRPO.with_name(f"{config}_qwen2.5_math_1.5b.yaml"))
    commands = [line.split() for line in str(found.value).splitlines()[1:]]
    assert len(commands) >= 2
    for _, _, _, file, *flags in commands:
        changes = flags[flags.index("--set") + 1 :] if "--set" in flags else []
        assert read(*changes, config=ROOT / file).launch.zero_stage == 2


@pytest.mark.parametrize(("config", "name"), [("grpo_math", "grpo"), ("sft_math", "sft")])
def test_a_task_class_of_your_own_is_of_its_recipe(config: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, *others = RECIPES[name].settings()
    monkeypatch.setattr(RECIPES[name].place.replace(":", "."), (type("MyTask", (task,), {}), *others))
    assert read(config=GRPO.with_name(f"{config}_qwen2.5_math_1.5b.yaml")).recipe == name


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ({"group_size": 8}, "grpo"),
        ({"filter_correct": True, "max_length": 1024}, "sft"),
        ({"filter_corect": True, "max_length": 1024, "traces": "traces.jsonl"}, "sft"),
        ({"group_size": 8, "max_length": 1024}, "expert_iteration"),
    ],
)
def test_a_file_is_for_the_recipe_that_knows_most_of_its_names(own: dict[str, Any], name: str) -> None:
    assert recipe_settings({"model_name_or_path": "m", "learning_rate": 1e-5, **own}) == RECIPES[name].settings()


def test_two_updates_and_epochs_multiply() -> None:
    assert read("train_batch_size=128", "epochs_per_rollout_batch=2").updates == 4


def test_a_step_without_a_size_has_the_rows_of_every_gpu() -> None:
    config = ExtGRPOConfig("runs", use_cpu=True, bf16=False, report_to="none", num_generations=4, preset="grpo_clip",
                           per_device_train_batch_size=2, gradient_accumulation_steps=4)  # fmt: skip
    for_processes(config, 4)
    found = PlannedRun(None, ModelConfig(), config, Qwen3Config(), Launch(4), Lengths(1, 1, 1, 1))
    assert (found.step, found.rollout, found.updates, found.packs) == (32, 32, 1, True)


def test_a_micro_batch_is_no_wider_than_a_gpus_share() -> None:
    assert read("micro_train_batch_size=256").config.per_device_train_batch_size == 128


@pytest.mark.parametrize(
    ("setting", "engine"), [("use_vllm=auto", "vllm"), ("use_vllm=false", "hf"), ("vllm_mode=server", "server")]
)
def test_the_engine_is_the_one_that_gpus_would_have(setting: str, engine: str) -> None:
    assert read(setting).engine == engine


def test_adapter_and_attention_are_the_models() -> None:
    run = read("use_peft=true", "lora_r=4", "attn_implementation=auto")
    assert run.peft is not None
    assert run.attention == "flash_attention_2"


def test_lengths_can_be_given_next_to_settings() -> None:
    lengths = read("completion=300", "prompt=150", "longest_prompt=900").lengths
    assert (lengths.prompt, lengths.longest_prompt, lengths.completion) == (150, 900, 300)


def test_the_longest_prompt_leaves_room_for_a_completion() -> None:
    assert read("vllm_max_model_length=2048").lengths.longest_prompt == 1024


@pytest.mark.parametrize(("name", "recipe"), [("sft_math", "sft"), ("expert_iteration", "expert_iteration")])
def test_the_other_recipes_have_rows_of_the_longest_length(name: str, recipe: str) -> None:
    run = read(config=ROOT / f"recipes/{name}_qwen2.5_math_1.5b.yaml")
    assert (run.recipe, run.longest_row, run.step, run.config.per_device_train_batch_size) == (recipe, 2048, 64, 4)


def test_quantized_weights_are_modeled_as_far_as_known() -> None:
    alone = {"launch": Launch()}
    assert [read(f"load_in_{bits}bit=true", "use_peft=true", **alone).quantized_bits for bits in (4, 8)] == [4, 8]
    assert read(**alone).quantized_bits == 0
    with pytest.raises(NoEstimateError, match="quantized weights with DeepSpeed"):
        read("load_in_4bit=true", "use_peft=true")
    with pytest.raises(NoEstimateError, match="quantized weights with DoRA"):
        read("load_in_4bit=true", "use_peft=true", "use_dora=true", **alone)


def test_a_quantized_checkpoint_is_not_counted_in_full() -> None:
    network = Qwen3Config(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(NoEstimateError, match="quantized weights of a checkpoint"):
        PlannedRun(None, ModelConfig(), None, network, Launch(), Lengths(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("distributed_type: FSDP", "FSDP"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}", "file of DeepSpeed's own"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, offload_param_device: cpu}", "offloading"),
        ("distributed_type: DEEPSPEED", "without a zero_stage"),
    ],
)
def test_a_configuration_not_modeled_is_no_zero_0(settings: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(f"num_processes: 2\n{settings}\n", encoding="utf-8")
    with pytest.raises(NoEstimateError, match=said):
        Launch.of_accelerate(file)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(InputError, match="NAME=VALUE"):
        read("micro_train_batch_size")
    with pytest.raises(ValueError, match=r"grpo_math_qwen2\.5_math_1\.5b\.yaml"):
        read(config=ROOT / "recipes/grpo_math_qwen2.5_math_1.5.yaml")
    with pytest.raises(InputError, match="embedded policy"):
        read(config=ROOT / "recipes/grpo_math.yaml")


def test_a_launch_is_what_accelerate_would_start() -> None:
    assert Launch.of_accelerate(ROOT / "accelerate_configs/nodes_zero3.yaml") == Launch(16, 2, 3)
    assert Launch.of_accelerate(ROOT / "accelerate_configs/two_gpus_ddp.yaml") == Launch(2, 1, 0)
    with pytest.raises(InputError, match="accelerate_configs/ has some"):
        Launch.of_accelerate(ROOT / "accelerate_configs/none.yaml")
    with pytest.raises(InputError, match="num_processes"):
        Launch.of_accelerate(GRPO)


def test_a_limit_of_tokens_counts_where_a_step_keeps_it(tmp_path: Path) -> None:
    """Else the advice to lower it could not be followed."""
    given = {"preset": "dapo", "micro_batch_tokens": 4096, "use_cpu": True, "report_to": "none"}
    follows = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for settings, parameters, kept in (
        ({}, None, 4096), ({"entropy_coef": 0.1}, None, None), ({}, follows, None),
    ):  # fmt: skip
        config = ExtGRPOConfig(output_dir=str(tmp_path), **given, **settings)
        network = Qwen3Config(rope_parameters=parameters)
        found = PlannedRun(None, ModelConfig(), config, network, Launch(), Lengths(1, 1, 1, 1))
        assert (found.token_limit, found.packs) == (kept, kept is not None)


def test_teachers_weigh_what_they_are_loaded_in(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    size = sum(parameter.numel() for parameter in tiny_model().parameters())
    one = {"teacher": str(tmp_path)}
    assert planned().teacher_bytes == 0
    assert planned(**one).teacher_bytes == 4 * size
    two = {"teacher": f"a={tmp_path},b={tmp_path}"}
    assert planned(**two, teacher_init_kwargs={"dtype": "bfloat16"}).teacher_bytes == 2 * 2 * size
    assert planned(**one, teacher_init_kwargs={"load_in_4bit": True}).teacher_bytes == size // 2
    assert not planned(**one, distillation="reverse_kl").learns_divergence
    assert planned(**one, distillation="jensen_shannon").learns_divergence
