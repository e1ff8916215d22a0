"""Settings that change memory, speed or what is printed, in runs of three steps: these end, and learn the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from scripts.docs_pages import effects_of
from tests.support.tiny import ends_early, make_trainer, prompts, tiny_sft, tiny_tokenizer
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.trainer import ExtGRPOTrainer
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer, tokenized

# Settings of one run each, which go together. With `aot_eager` a step is traced as for inductor, and no kernel built.
RUNS: dict[str, dict[str, Any]] = {
    "loader": {
        "dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2,
        "dataloader_multiprocessing_context": "fork", "dataloader_in_order": False, "dataloader_pin_memory": True,
    },
    "memory": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "torch_empty_cache_steps": 1, "use_cache": True, "pad_to_multiple_of": 8,
    },
    "printed": {
        "log_level": "error", "log_level_replica": "error", "skip_memory_metrics": False,
        "logging_nan_inf_filter": False, "include_num_input_tokens_seen": "all", "log_completions": True,
        "log_multimodal": False, "num_completions_to_print": 1, "log_unique_prompts": True, "run_name": "mine",
        "project": "mine", "debug": "underflow_overflow",
    },
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "other": {
        "full_determinism": True, "enable_jit_checkpoint": True, "ddp_timeout": 60,
        "restore_callback_states_from_checkpoint": True, "ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 1,
        "ddp_broadcast_buffers": False, "accelerator_config": {"even_batches": False},
    },
}  # fmt: skip
EVALUATED: dict[str, Any] = {  # which draws from the generators of the run, in TRL too
    "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "do_eval": True,
    "eval_dataset": 4, "load_best_model_at_end": True, "metric_for_best_model": "eval_reward",
    "greater_is_better": False, "bf16_full_eval": True,
}  # fmt: skip
OF_SFT: dict[str, dict[str, Any]] = {
    "memory": {"pad_to_multiple_of": 8, "dataset_num_proc": 2, "use_cache": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}

ELSEWHERE = {"eval_dataset", "ddp_timeout", "restore_callback_states_from_checkpoint"}  # no setting, or another test's


def weights(trainer: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def trained(folder: Path, resume: str | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    if "eval_dataset" in settings:
        settings["eval_dataset"] = prompts(settings["eval_dataset"])
    given = {"preset": "grpo_clip", "stop": ["stop"], "max_steps": 3, **settings}
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, folder, ends_early, **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def fine_tuned(folder: Path, **settings: Any) -> Any:
    traces = [{"prompt": f"{i % 9} +", "response": " ".join("abc"[: 1 + i % 3])} for i in range(16)]
    rows = tokenized(traces, tiny_tokenizer())[0]
    torch.manual_seed(0)
    trainer = tiny_sft(ExtSFTTrainer, ExtSFTConfig, folder, rows, **{"max_steps": 3, **settings})
    trainer.train()
    return trainer


@pytest.mark.slow
def test_what_changes_speed_or_print_alone_learns_the_same(tmp_path: Path) -> None:
    apart = {}
    for train, runs in ((trained, RUNS), (fine_tuned, OF_SFT)):
        plain = weights(train(tmp_path / f"{train.__name__}_plain"))
        for name, settings in runs.items():
            found = weights(train(tmp_path / f"{train.__name__}_{name}", **settings))
            apart[train.__name__, name] = (found - plain).abs().max().item()
        assert not plain.equal(weights(train(tmp_path / f"{train.__name__}_other_seed", seed=8)))
    cached = trained(tmp_path / "cached", cache_implementation="dynamic")  # by the loop of transformers: other draws
    assert weights(cached).isfinite().all()
    evaluated = trained(tmp_path / "evaluated", **EVALUATED).state
    rewards = [entry["eval_reward"] for entry in evaluated.log_history if "eval_reward" in entry]
    assert len(rewards) == 3
    assert evaluated.best_metric == min(rewards)
    assert evaluated.best_model_checkpoint == str(tmp_path / f"evaluated/checkpoint-{evaluated.best_global_step}")
    assert all(difference < 1e-5 for difference in apart.values()), apart  # a compiled step sums in another order


@pytest.mark.slow
def test_a_compiled_run_is_saved_and_resumed_as_others_are(tmp_path: Path) -> None:
    settings = {**RUNS["compiled"], "save_strategy": "steps", "save_steps": 1}
    counters.clear()
    whole = trained(tmp_path / "run", **settings)
    assert counters["frames"]["ok"] > 0  # parts of the step were compiled
    with safe_open(tmp_path / "run/checkpoint-1/model.safetensors", "pt") as stored:
        assert {name for name in stored.keys() if "_orig_mod" in name} == set()  # noqa: SIM118, no dict
    resumed = trained(tmp_path / "again", resume=str(tmp_path / "run/checkpoint-2"), **settings)
    assert torch.allclose(weights(resumed), weights(whole), atol=1e-5)
    whole.save_final_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert all(loaded[name].equal(value) for name, value in whole.model.state_dict().items())


def test_the_page_names_what_these_runs_show() -> None:
    this = "training/test_honored_settings::test_what_changes_speed_or_print_alone_learns_the_same"
    shown = {n: e.shown_by for part in ("TrainingArguments", "GRPOConfig") for n, e in effects_of(part).items()}
    tried = {name for settings in (*RUNS.values(), EVALUATED) for name in settings} | {"cache_implementation"}
    assert {name for name, by in shown.items() if by == this} <= tried
    assert all(shown[name] in (this, "a run") for name in tried - ELSEWHERE)
    of_sft = {name for name, effect in effects_of("SFTConfig").items() if effect.shown_by == this}
    assert of_sft <= {name for settings in OF_SFT.values() for name in settings}
