"""Foresight held to account: the memory of real training steps on a CPU against what was foreseen on fake tensors.

    python -m scripts.benchmarks.foresight --json docs/results/foresight_memory.json
    python -m scripts.benchmarks.foresight --shapes 1m 6m --cases plain lora

Measured are the allocations and releases that torch's own CPU allocator reports to the profiler, which knows nothing of
the ledger that foresight counts with, in the second optimizer step of `Trainer.train()` on replayed rollouts. The sizes
of parameters, gradients and optimizer state are those of the real tensors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import ModelConfig

from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.foresight.memory.step import MOMENTS, measure
from trl_ext.foresight.shape import Launch, Lengths, shape_of
from trl_ext.recipes.grpo import GRPOTask
from trl_ext.recipes.model_settings import loaded_as
from trl_ext.runs.provenance import provenance

from .random_model import SHAPES, save_random_model
from .step import replaying

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of the trainer, and of the model
    "plain": ({}, {}),
    "checkpointing": ({"gradient_checkpointing": True}, {}),
    "eager attention": ({}, {"attn_implementation": "eager"}),
    "eager, checkpointing": ({"gradient_checkpointing": True}, {"attn_implementation": "eager"}),
    "prompts not shared": ({"share_prompt_prefix": False}, {}),
    "bfloat16": ({"bf16": True}, {}),
    "lora": ({}, {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}),
}
STATIC = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Work:
    """Lengths in tokens of a step's rows: a group with the longest prompt and one with the mean one."""

    prompt: int = 24
    longest_prompt: int = 96
    completion: int = 160
    group: int = 4
    micro: int = 2

    @property
    def rows(self) -> int:
        """Of an optimizer step."""
        return 2 * self.group


class _Replay:
    """In place of the engine: completions of the longest length."""

    def __init__(self, work: Work, vocabulary: int) -> None:
        ids = torch.randint(3, vocabulary, (work.rows, work.completion - 1), generator=torch.manual_seed(0))
        self.completions = [[*row, 1] for row in ids.tolist()]

    def seed_requests(self, seed: int, place: Any) -> None:
        """Nothing is sampled."""

    def sync_weights(self) -> None:
        """The weights do not matter here."""

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, Any, Any, Any]:
        """What vLLM would return."""
        return prompts, self.completions, [[[-1.0]] * len(ids) for ids in self.completions], None


class _Watch(TrainerCallback):
    """Profiles the second optimizer step, and sizes what is there at its end."""

    def __init__(self) -> None:
        self.profiler: Any = None
        self.static: dict[str, int] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start."""
        if state.global_step == 1:
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.__enter__()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """End, with the gradients still there."""
        if state.global_step == 1:
            self.profiler.__exit__(None, None, None)
            inner = getattr(optimizer, "optimizer", optimizer)
            states = [tensor for state in inner.state.values() for tensor in state.values()]
            self.static = {
                "parameters": _bytes([*model.parameters(), *model.buffers()]),
                "gradients": _bytes(p.grad for p in model.parameters()),
                "optimizer": _bytes(states),
            }


def _bytes(tensors: Any) -> int:
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values())


@contextmanager
def marked(trainer: Any) -> Iterator[None]:
    """While it trains, the profiler is told when a forward pass, a backward pass or the optimizer runs."""

    def within(name: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"moment:{name}"):
                return method(*args, **kwargs)

        return run

    accelerator = trainer.accelerator
    with (
        patch.object(trainer, "_compute_loss", within("forward", trainer._compute_loss)),
        patch.object(accelerator, "backward", within("backward", accelerator.backward)),
        patch.object(torch.optim.AdamW, "step", within("optimizer step", torch.optim.AdamW.step)),
    ):
        yield


def allocations(profiler: Any) -> list[tuple[int, int]]:
    """Times in ns, in order, and bytes of what the CPU's allocator gave, or took back (below 0), in a profile.

    A release of what was there before is left out: torch reports it only if an earlier profile of the process saw it
    allocated.
    """
    events, todo = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            events.append((event.start_time_ns, fields.alloc_size, fields.ptr))
    found, live = [], set[int]()
    for at, size, address in sorted(events):
        if size < 0 and address not in live:
            continue
        (live.add if size > 0 else live.remove)(address)
        found.append((at, size))
    return found


def peaks(profiler: Any, at_start: int) -> dict[str, int]:
    """Most bytes that were live in each moment, by the allocator's events.

    Args:
        at_start: bytes that were live when the profiler began.
    """
    events = list(profiler.profiler.kineto_results.events())
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns(), e.name()[7:]) for e in events if "moment:" in e.name()]
    found, live = dict.fromkeys(MOMENTS, 0), at_start
    for at, size in allocations(profiler):
        live += size
        for began, ended, name in spans:
            if began <= at <= ended:
                found[name] = max(found[name], live)
    return found


def run(shape: str, case: str, work: Work, folder: Path) -> tuple[dict[str, int], dict[str, int], Any]:
    """Measured peaks, measured sizes, and what is foreseen."""
    settings, of_model = CASES[case]
    path = save_random_model(folder / shape, shape)
    model = ModelConfig(model_name_or_path=str(path), dtype="float32", **of_model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    words = [" ".join(["w5"] * n) for n in (work.longest_prompt, work.prompt)]
    config = ExtGRPOConfig(
        output_dir=str(folder / "run"), use_cpu=True, max_steps=2, per_device_train_batch_size=work.micro,
        gradient_accumulation_steps=work.rows // work.micro, num_generations=work.group, learning_rate=1e-6,
        max_completion_length=work.completion, preset="reinforce_with_baseline", report_to="none", save_strategy="no",
        disable_tqdm=True, use_vllm=True, vllm_mode="colocate", vllm_importance_sampling_correction=False,
        shuffle_dataset=False, **{"bf16": False, "gradient_checkpointing": False, **settings},
    )  # fmt: skip
    policy = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=model.attn_implementation or "sdpa"
    )
    network, watch = policy.config, _Watch()
    lengths = Lengths(work.prompt, work.longest_prompt, work.completion, work.completion)
    foreseen = shape_of(GRPOTask(), model, config, network, Launch(), lengths, {})
    rewards = [float(i % 2) for i in range(work.rows)]
    with replaying(_Replay(work, len(tokenizer))):
        trainer = ExtGRPOTrainer(
            policy, lambda completions, **_: rewards, config, Dataset.from_list([{"prompt": w} for w in words]),
            processing_class=tokenizer, peft_config=loaded_as(model)["peft_config"],
        )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    with marked(trainer):
        trainer.train()
    measured = peaks(watch.profiler, watch.static["parameters"] + watch.static["optimizer"])
    return measured, watch.static, measure(foreseen, on_gpu=False)


def compare(measured: Mapping[str, int], static: Mapping[str, int], foreseen: Any) -> dict[str, dict[str, float]]:
    """By part: measured and foreseen bytes, and the relative error."""
    rows = {name: (size, max(of[name] for of in foreseen.peaks.values())) for name, size in static.items()}
    rows |= {f"peak, {moment}": (measured[moment], foreseen.total(moment)) for moment in MOMENTS}
    held = sum(static.values())
    kept = {moment: sum(foreseen.peaks[moment][kind] for kind in STATIC) for moment in MOMENTS}
    del kept["optimizer step"]
    rows |= {
        f"all else, {moment}": (measured[moment] - held, foreseen.total(moment) - size)
        for moment, size in kept.items()
        if size > 0.999 * held
    }
    rows["peak"] = max(measured.values()), max(map(foreseen.total, MOMENTS))
    return {name: {"measured": a, "foreseen": b, "error": b / a - 1} for name, (a, b) in rows.items()}


def main() -> None:
    """Compare, print, and write the file asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["1m", "6m", "60m"])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for shape in args.shapes:
            for case in args.cases:
                parts = compare(*run(shape, case, Work(), Path(scratch)))
                found[f"{shape}, {case}"] = parts
                shown = ", ".join(f"{name} {of['error']:+.1%}" for name, of in parts.items())
                print(f"{shape}, {case}: {parts['peak']['measured'] / 2**20:.0f} MiB; {shown}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"found": found, **provenance()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
