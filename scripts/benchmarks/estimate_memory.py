"""The memory of real training steps against the estimate on fake tensors.

    python -m scripts.benchmarks.estimate_memory --json docs/results/estimate_memory.json
    python -m scripts.benchmarks.estimate_memory --shapes 1m 6m --cases plain lora
    python -m scripts.benchmarks.estimate_memory --shapes qwen2.5-math-1.5b --measure gpu.json     # on a GPU
    python -m scripts.benchmarks.estimate_memory --against gpu.json --json docs/results/estimate_gpu.json     # anywhere

Measured is the second optimizer step of `Trainer.train()` on replayed rollouts. On a CPU these are the allocations and
releases that torch's own allocator reports to the profiler, which knows nothing of the ledger that the estimate counts
with; on a GPU, in bfloat16 and with a recipe's lengths, the most that the CUDA allocator had given at a time. The sizes
of parameters, gradients and optimizer state are those of the real tensors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer, TrainerCallback
from transformers.utils import is_bitsandbytes_available
from trl import ModelConfig

from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.grpo import construction
from trl_ext.recipes.grpo import GRPOTask
from trl_ext.recipes.model_settings import loaded_as
from trl_ext.runs.provenance import provenance
from trl_ext.tools.estimate.memory.optimizers import state_tensors
from trl_ext.tools.estimate.memory.step import MOMENTS, measure
from trl_ext.tools.estimate.planned import Launch, Lengths, PlannedRun

from .peak_memory import peak, start_peak
from .random_model import SHAPES, network_of, save_random_model
from .step import replaying

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of the trainer, and of the model
    "plain": ({}, {}),
    "checkpointing": ({"gradient_checkpointing": True}, {}),
    "eager attention": ({}, {"attn_implementation": "eager"}),
    "eager, checkpointing": ({"gradient_checkpointing": True}, {"attn_implementation": "eager"}),
    "prompts not shared": ({"share_prompt_prefix": False}, {}),
    "bfloat16": ({"bf16": True}, {}),
    "lora": ({}, {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}),
    **{optim: ({"optim": optim}, {}) for optim in ("adafactor", "sgd", "adamw_bnb_8bit", "ademamix")},
}
CASES |= {  # with bitsandbytes
    f"lora, {bits} bits": ({}, {**CASES["lora"][1], f"load_in_{bits}bit": True}) for bits in (4, 8)
}
NEED_BITSANDBYTES = ("adamw_bnb_8bit", "ademamix", "lora, 4 bits", "lora, 8 bits")
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


ON_A_GPU = Work(prompt=150, longest_prompt=600, completion=1024, group=8)


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
    """Watches the second optimizer step's allocations, and sizes what is there at its end."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.is_on = on_gpu, False
        self.profiler: Any = None
        self.static: dict[str, int] = {}
        self.of_gpu = dict.fromkeys(MOMENTS, 0)
        self.reserved = 0  # most bytes that the CUDA allocator held

    def moment(self, name: str) -> AbstractContextManager[object]:
        """What a forward pass, a backward pass or the optimizer runs within."""
        return self._on_gpu(name) if self.on_gpu else record_function(f"moment:{name}")

    @contextmanager
    def _on_gpu(self, name: str) -> Iterator[None]:
        start_peak()
        yield
        if self.is_on:
            self.of_gpu[name] = max(self.of_gpu[name], peak())
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())

    def peaks(self) -> dict[str, int]:
        """Most bytes that were live in each moment."""
        return (
            self.of_gpu if self.on_gpu else peaks(self.profiler, self.static["parameters"] + self.static["optimizer"])
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start."""
        self.is_on = state.global_step == 1
        if self.is_on and not self.on_gpu:
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.__enter__()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """End, with the gradients still there."""
        if self.is_on:
            if self.profiler:
                self.profiler.__exit__(None, None, None)
            inner = getattr(optimizer, "optimizer", optimizer)
            self.static = {
                "parameters": _bytes([*model.parameters(), *model.buffers(), *_scales(model)]),
                "gradients": _bytes(p.grad for p in model.parameters()),
                "optimizer": _bytes(state_tensors(inner)),
            }


def _bytes(tensors: Any) -> int:
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values())


def _scales(model: Any) -> Iterator[torch.Tensor]:
    """Of weights that bitsandbytes has quantized to 4 bits, next to them; those of 8 bits are the layers' own."""
    for state in (getattr(parameter, "quant_state", None) for parameter in model.parameters()):
        if state is not None:
            yield from [state.absmax, state.state2.absmax] if state.nested else [state.absmax]


@contextmanager
def marked(trainer: Any, moment: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """While it trains, forward passes, backward passes and the optimizer run within their moment."""

    def within(name: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with moment(name):
                return method(*args, **kwargs)

        return run

    accelerator = trainer.accelerator
    optimizer, _ = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    with (
        patch.object(trainer, "_compute_loss", within("forward", trainer._compute_loss)),
        patch.object(accelerator, "backward", within("backward", accelerator.backward)),
        patch.object(optimizer, "step", within("optimizer step", optimizer.step)),
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
    changes, live = [], set[int]()
    for at, size, address in sorted(events):
        if size < 0 and address not in live:
            continue
        (live.add if size > 0 else live.remove)(address)
        changes.append((at, size))
    return changes


def peaks(profiler: Any, at_start: int) -> dict[str, int]:
    """Most bytes that were live in each moment, by the allocator's events.

    Args:
        at_start: bytes that were live when the profiler began.
    """
    events = list(profiler.profiler.kineto_results.events())
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns(), e.name()[7:]) for e in events if "moment:" in e.name()]
    highest, live, changes = dict.fromkeys(MOMENTS, 0), at_start, allocations(profiler)
    for began, _, name in spans:  # a moment may allocate nothing
        highest[name] = max(highest[name], at_start + sum(size for at, size in changes if at < began))
    for at, size in changes:
        live += size
        for began, ended, name in spans:
            if began <= at <= ended:
                highest[name] = max(highest[name], live)
    return highest


def settings_of(case: str, shape: str, work: Work, folder: Path, on_gpu: bool) -> tuple[ModelConfig, ExtGRPOConfig]:
    """Of a run of this case."""
    settings, of_model = CASES[case]
    model = ModelConfig(model_name_or_path=str(folder / shape), dtype="float32", **of_model)
    config = ExtGRPOConfig(
        output_dir=str(folder / "run"), use_cpu=not torch.cuda.is_available(), max_steps=2,
        per_device_train_batch_size=work.micro,
        gradient_accumulation_steps=work.rows // work.micro, num_generations=work.group, learning_rate=1e-6,
        max_completion_length=work.completion, preset="reinforce_with_baseline", report_to="none", save_strategy="no",
        disable_tqdm=True, use_vllm=True, vllm_mode="colocate", vllm_importance_sampling_correction=False,
        shuffle_dataset=False, **{"bf16": on_gpu, "gradient_checkpointing": False, **settings},
    )  # fmt: skip
    return model, config


def estimate(shape: str, case: str, work: Work, folder: Path, on_gpu: bool) -> Any:
    """Its estimate."""
    model, config = settings_of(case, shape, work, folder, on_gpu)
    lengths = Lengths(work.prompt, work.longest_prompt, work.completion, work.completion)
    network = network_of(shape)
    return measure(PlannedRun(GRPOTask(), model, config, network, Launch(), lengths), on_gpu=on_gpu)


def run(shape: str, case: str, work: Work, folder: Path) -> dict[str, Any]:
    """Measured peaks and sizes; on a GPU also what the allocator reserved, and what CUDA took in addition."""
    on_gpu = torch.cuda.is_available()
    with replaying(_Replay(work, SHAPES[shape]["vocab_size"])):
        model, config = settings_of(case, shape, work, folder, on_gpu)
    path = save_random_model(folder / shape, shape)
    tokenizer = AutoTokenizer.from_pretrained(path)
    words = [" ".join(["w5"] * n) for n in (work.longest_prompt, work.prompt)]
    attention = model.attn_implementation or "sdpa"
    loaded = loaded_as(model)
    policy = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention, quantization_config=loaded["quantization_config"]
    )
    watch = _Watch(on_gpu)
    rewards = [float(i % 2) for i in range(work.rows)]
    # No engine is handed quantized weights here, so none has to be refused.
    with replaying(_Replay(work, len(tokenizer))), patch.object(construction, "check_quantization"):
        trainer = ExtGRPOTrainer(
            policy, lambda completions, **_: rewards, config, Dataset.from_list([{"prompt": w} for w in words]),
            processing_class=tokenizer, peft_config=loaded["peft_config"],
        )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    with marked(trainer, watch.moment):
        trainer.train()
    figures: dict[str, Any] = {"peaks": watch.peaks(), "static": watch.static}
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        figures |= {"reserved": watch.reserved, "context": total - free - torch.cuda.memory_reserved()}
    return figures


def compare(measured: Mapping[str, int], static: Mapping[str, int], estimated: Any) -> dict[str, dict[str, float]]:
    """By part: measured and estimated bytes, and the relative error."""
    rows = {name: (size, max(of[name] for of in estimated.peaks.values())) for name, size in static.items()}
    rows["optimizer"] = static["optimizer"], estimated.resident["optimizer"]  # without what a step of it passes through
    rows |= {f"peak, {moment}": (measured[moment], estimated.total(moment)) for moment in MOMENTS}
    held = sum(static.values())
    kept = {moment: sum(estimated.peaks[moment][kind] for kind in STATIC) for moment in MOMENTS}
    del kept["optimizer step"]
    rows |= {
        f"all else, {moment}": (measured[moment] - held, estimated.total(moment) - size)
        for moment, size in kept.items()
        if size > 0.999 * held
    }
    rows["peak"] = max(measured.values()), max(map(estimated.total, MOMENTS))
    return {name: {"measured": a, "estimated": b, "error": (b - a) / max(a, 1)} for name, (a, b) in rows.items()}


def main() -> None:
    """Measure, compare, print, and write the files asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["1m", "6m", "60m"])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=None, help="(default: all that can run)")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="only measure, and write what --against takes")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with what --measure wrote elsewhere")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    able = [case for case in CASES if case not in NEED_BITSANDBYTES or is_bitsandbytes_available()]
    origin = provenance()
    with tempfile.TemporaryDirectory() as scratch:
        if args.against:
            given = json.loads(args.against.read_text(encoding="utf-8"))
        else:
            given = {"work": asdict(ON_A_GPU if torch.cuda.is_available() else Work()),
                     "on_gpu": torch.cuda.is_available(), "measured": {}, **origin}  # fmt: skip
        work, comparisons = Work(**given["work"]), dict[str, Any]()
        for shape in args.shapes if not args.against else given["measured"]:
            cases = given["measured"].setdefault(shape, {})
            for case in (args.cases or able) if not args.against else cases:
                if not args.against:
                    cases[case] = run(shape, case, work, Path(scratch))
                if args.measure:
                    print(f"{shape}, {case}: {cases[case]}", flush=True)
                    args.measure.write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
                    continue
                one = cases[case]
                parts = compare(
                    one["peaks"], one["static"], estimate(shape, case, work, Path(scratch), given["on_gpu"])
                )
                comparisons[f"{shape}, {case}"] = parts
                shown = ", ".join(f"{name} {of['error']:+.1%}" for name, of in parts.items())
                print(f"{shape}, {case}: {parts['peak']['measured'] / 2**20:.0f} MiB; {shown}", flush=True)
    if args.json:
        result = {"found": comparisons, "measured": given, **origin}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
