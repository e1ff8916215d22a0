"""The state of every optimizer that transformers names: as much as the real one's, or refused by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames
from transformers.utils import is_bitsandbytes_available

from trl_ext.compat.fake_modules import parameters_replaced
from trl_ext.tools.estimate.memory import optimizers
from trl_ext.tools.estimate.memory.ledger import Answered
from trl_ext.tools.estimate.memory.optimizer_sources import SOURCES, Weight
from trl_ext.tools.estimate.memory.optimizers import (
    SourcedOptimizer,
    bytes_of,
    make_optimizer,
    paged_bytes,
    source_line,
    state_tensors,
)
from trl_ext.tools.estimate.planned import NoEstimateError

NETWORK = Qwen3Config(
    hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, vocab_size=512, tie_word_embeddings=True,
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16)
needs_bitsandbytes = pytest.mark.skipif(not is_bitsandbytes_available(), reason="needs bitsandbytes")


def trainer_of(name: str, dtype: torch.dtype, folder: Path, **settings: Any) -> Trainer:
    """With gradients of a tiny model."""
    model = AutoModelForCausalLM.from_config(settings.pop("network", NETWORK), dtype=dtype)
    args = TrainingArguments(str(folder), optim=name, use_cpu=True, bf16=False, report_to="none", **settings)
    trainer = Trainer(model=model, args=args)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return trainer


def counted(name: str, dtype: torch.dtype, folder: Path) -> int | None:
    """Bytes of state of the real optimizer after a step on real weights; None where it is not installed."""
    torch.manual_seed(0)
    trainer = trainer_of(name, dtype, folder, optim_target_modules="all-linear")
    try:
        optimizer = trainer.create_optimizer()
    except (ImportError, ValueError):
        return None
    for parameter in trainer.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with contextlib.suppress(AttributeError):
        optimizer.train()  # of schedule-free ones
    optimizer.step()
    return bytes_of(state_tensors(optimizer))


def estimated(name: str, dtype: torch.dtype, folder: Path, **settings: Any) -> tuple[int, int]:
    """Bytes of state on fake tensors, and of them the paged ones."""
    settings = {"optim_target_modules": "all-linear"} | settings
    with FakeTensorMode(allow_non_fake_inputs=True), Answered(lambda mask: mask[0]), parameters_replaced():
        trainer = trainer_of(name, dtype, folder, **settings)
        optimizer = make_optimizer(trainer)
        optimizer.step()
        return bytes_of(state_tensors(optimizer)), paged_bytes(trainer.args, optimizer)


@pytest.mark.moderate
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_every_optimizers_state_is_the_real_ones(tmp_path: Path) -> None:
    """Where its package is installed; where not, the estimate says by what source it knows, or refuses by name."""
    wrong, refused, by_source = {}, dict[str, str](), set()
    for name in (member.value for member in OptimizerNames):
        for dtype in DTYPES:
            real = counted(name, dtype, tmp_path)
            try:
                found, _ = estimated(name, dtype, tmp_path)
            except NoEstimateError as error:
                refused[name] = str(error)
                continue
            if real is None:
                by_source.add(name)
            elif found != real:
                wrong[name, dtype] = (found, real)
    assert not wrong
    assert refused == {name: f"optim {name}: {of.unmodeled}" for name, of in SOURCES.items() if of.unmodeled}
    assert by_source <= SOURCES.keys(), "its state is neither counted nor known: describe it in optimizer_sources.py"
    assert SOURCES.keys() <= {member.value for member in OptimizerNames}


@pytest.mark.moderate
@needs_bitsandbytes
def test_bitsandbytes_keeps_what_its_source_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [name for name, source in SOURCES.items() if source.package == "bitsandbytes"]
    real = {(name, dtype): counted(name, dtype, tmp_path) for name in asked for dtype in DTYPES}
    monkeypatch.setattr(optimizers, "by_source", SOURCES.get)
    assert {(name, dtype): estimated(name, dtype, tmp_path)[0] for name, dtype in real} == real


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "ademamix_8bit", "lion_8bit", "paged_adamw_32bit"])
def test_bitsandbytes_state_follows_its_source_without_it(name: str) -> None:
    """By hand: 8 bits with a scale for 256 elements and the tables once; embeddings and small weights in 32 bits."""
    shapes = {"embedding": (512, 64), "large": (100, 64), "small": (64, 63)}
    weights = {
        nn.Parameter(torch.empty(shape)): Weight(shape, 4, is_embedding=kind == "embedding")
        for kind, shape in shapes.items()
    }
    for parameter in weights:
        parameter.grad = torch.empty_like(parameter)
    optimizer = SourcedOptimizer(weights, SOURCES[name])
    optimizer.step()
    states = {"adamw_bnb_8bit": 2, "ademamix_8bit": 3, "lion_8bit": 1, "paged_adamw_32bit": 2}[name]
    in_32_bits = 4 * (512 * 64 + 64 * 63)
    large = 4 * 6400 if "32bit" in name else 6400 + 4 * 25
    tables = 0 if "32bit" in name else 1024 * min(states, 2)
    assert bytes_of(state_tensors(optimizer)) == states * (in_32_bits + large) + tables


def test_a_projected_matrix_keeps_its_projection(tmp_path: Path) -> None:
    """Of an attention's and an MLP's matrices; the state has the rank instead of the shorter side."""
    matrices = [(64, 64), (32, 64), (32, 64), (64, 64), (256, 64), (256, 64), (64, 256)]
    others = 512 * 64 + 64 * 3 + 32 * 2  # embedding, the norms of the model, and those of queries and keys
    only_r = {"optim_args": "rank=8"}
    moments = sum(2 * 8 * max(shape) for shape in matrices) + 2 * others
    square, narrow = (sum(width(min(shape)) for shape in matrices) for width in (lambda m: m * m, lambda m: 8 * m))
    assert estimated("galore_adamw", torch.float32, tmp_path, **only_r)[0] == 4 * (moments + square)
    assert estimated("galore_adamw", torch.bfloat16, tmp_path, **only_r)[0] == 2 * (moments + narrow)
    assert estimated("apollo_adamw", torch.float32, tmp_path, **only_r)[0] == 4 * (moments + narrow)
    only_q = estimated("apollo_adamw", torch.float32, tmp_path, optim_target_modules=["q_proj"], **only_r)[0]
    assert only_q == 8 * (others + sum(n * m for n, m in matrices[1:])) + 4 * 8 * (64 + 2 * 64)


def test_a_projection_is_a_view_of_all_singular_vectors() -> None:
    _, _, vectors = torch.linalg.svd(torch.randn(40, 16), full_matrices=False)
    assert vectors[:4].untyped_storage().nbytes() == 4 * 16 * 16
    assert vectors[:4].to(torch.bfloat16).untyped_storage().nbytes() == 2 * 4 * 16


@pytest.mark.parametrize(("name", "width"), [("paged_adamw_32bit", 8), ("paged_ademamix_8bit", 3)])
def test_what_is_paged_is_state_of_large_weights(name: str, width: int, tmp_path: Path) -> None:
    wide = Qwen3Config(**NETWORK.to_dict() | {"intermediate_size": 1600})
    kept, paged = estimated(name, torch.bfloat16, tmp_path, network=wide)
    assert paged == 3 * width * 1600 * 64, "the MLP's; all others have less than 100,000 elements"
    assert kept > paged
    assert estimated("adamw_torch", torch.bfloat16, tmp_path)[1] == 0


def test_an_unknown_projection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoEstimateError, match=r"optim galore_adamw: .*proj_type is not known"):
        estimated("galore_adamw", torch.float32, tmp_path, optim_args="rank=8,proj_type=full")


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), optim="grokadamw", use_cpu=True)
    assert "not measured: 12 n (n elements" in str(source_line(args))
    args.optim = OptimizerNames.ADAFACTOR
    assert source_line(args) is None
