"""torch.compile: what a step calls is compiled, once for all shapes, to the same gradient; what samples is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from peft import LoraConfig
from torch import nn
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from tests.grpo.test_step import ALL, OFF_POLICY, trained
from tests.support.tiny import ends_early, make_trainer, tiny_model, weight_difference
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.compat import compilation
from trl_ext.compat.compilation import check_compilation, compile_layers

# With eager layers are traced as for any other backend, in a third of the time; with aot_eager forward and backward, as
# for inductor. Neither builds a kernel.
COMPILED: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
PATHS: dict[str, dict[str, Any]] = {
    "shared_prompts": ALL,
    "contiguous_rows": {**ALL, "share_prompt_prefix": False},
    "checkpointed": {**ALL, "gradient_checkpointing": True},
    "backward_traced": {**ALL, "torch_compile_backend": "aot_eager"},
    "adapter": {**ALL, "peft_config": LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0)},
}
EACH_PUSH = ("shared_prompts",)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Counted(TrainerCallback):
    """How many graphs there were after each step."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.graphs.append(graphs())


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(name, marks=() if name in EACH_PUSH else pytest.mark.nightly) for name in PATHS]
)
def test_layers_are_compiled_once_to_the_same_gradient(path: str, tmp_path: Path) -> None:
    """Lengths and numbers of rows and of prompts are others in every step, and a graph is of any of them."""
    counted, settings = Counted(), {**OFF_POLICY, **PATHS[path], "n_grpo_steps": 5, "micro_batch_tokens": 60}
    backend = {**COMPILED, "torch_compile_backend": settings.pop("torch_compile_backend", "eager")}
    plain = trained(tmp_path / "plain", **settings)
    assert graphs() == 0
    compiled = trained(tmp_path / "compiled", **settings, callbacks=[counted], **backend)
    assert len(counted.graphs) == 10
    assert counted.graphs[0] > 0
    assert counted.graphs[-1] < 60  # of each kind of call, such as with a single row, for both layers together
    if path != "contiguous_rows":  # of which a single row comes late
        assert counted.graphs[-3] == counted.graphs[-1]
    assert not counters["recompile_limit"]
    first = trained(tmp_path / "first", **{**settings, "n_grpo_steps": 1})
    assert weight_difference(plain.model, first.model) > 1e-4
    assert weight_difference(plain.model, compiled.model) < 1e-7  # norms compute in float32 in a float64 model too


@pytest.mark.slow
def test_sampling_calls_layers_as_they_are(tmp_path: Path) -> None:
    for stop in (["stop"], None):  # our loop, and TRL's call of generate
        settings = {"preset": "grpo_clip", "stop": stop, "max_steps": 1, **COMPILED}
        trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, **settings)
        trainer.completion_ids(["1 +", "2 + 3"])
        assert graphs() == 0
        trainer.train()
        made = graphs()
        assert made > 0
        trainer.completion_ids(["1 +", "2 + 3 +"])
        assert graphs() == made
        assert not [name for name in trainer.model.state_dict() if "_orig_mod" in name]
        torch._dynamo.reset()
        counters.clear()


@pytest.mark.nightly
@pytest.mark.slow
def test_inductor_has_the_same_gradient(tmp_path: Path) -> None:
    settings = {**OFF_POLICY, **ALL, "learning_rate": 0.1, "n_grpo_steps": 1}
    plain = trained(tmp_path / "plain", **settings)
    compiled = trained(tmp_path / "compiled", **settings, torch_compile=True)
    assert weight_difference(plain.model, compiled.model) < 1e-7


def asked(**settings: Any) -> Any:
    given = {"torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_mode": None, "fsdp": []}
    return SimpleNamespace(**{**given, "deepspeed_plugin": None, **settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"torch_compile_mode": "reduce-overhead"}, "records CUDA graphs, one for each shape"),
        ({"torch_compile_backend": "cudagraphs"}, "torch_compile_backend cudagraphs records CUDA graphs"),
        ({"torch_compile_backend": "fx2trt"}, "unknown torch_compile_backend 'fx2trt'"),
        ({"torch_compile_mode": "fast"}, "unknown torch_compile_mode 'fast'"),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "ZeRO-3 has in parts: leave torch_compile out"),
        ({"fsdp": ["full_shard"]}, "FSDP has in parts"),
    ],
)
def test_what_cannot_be_compiled_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        check_compilation(asked(**settings))
    assert "\n" not in str(refused.value)
    check_compilation(asked(**{**settings, "torch_compile": False}))
    check_compilation(asked(deepspeed_plugin=SimpleNamespace(zero_stage=2)))


def test_what_a_launcher_shards_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP has in parts"):
        check_compilation(asked())


def test_inductor_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler on a CPU .* or leave torch_compile out"):
        check_compilation(asked(torch_compile_backend="inductor"))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has none: leave torch_compile out"):
        compile_layers(nn.Linear(1, 1), TorchDynamoPlugin(backend="aot_eager"))
    model = tiny_model()
    assert compile_layers(model, TorchDynamoPlugin(backend="aot_eager")) == model.config.num_hidden_layers
