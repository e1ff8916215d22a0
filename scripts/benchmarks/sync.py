"""Seconds and extra memory of handing the policy's weights to the colocated vLLM engine, three ways in alternation:

* reload: all of them through one layerwise reload, as `trl_ext.generation.vllm` does;
* per parameter: one `load_weights` call each, as TRL does (where it works; on a CPU it does not);
* through disk: a checkpoint is saved, and vLLM reloads it.

    python -m scripts.benchmarks.sync
    python -m scripts.benchmarks.sync --shape qwen2.5-math-1.5b --json docs/results/sync_speed.json
    python -m scripts.benchmarks.sync --lora 32
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tqdm import tqdm
from trl.generation.vllm_generation import VLLMGeneration

from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.weight_transfer import process_output_heads
from trl_ext.runs.provenance import provenance

from .peak_memory import peak, start_peak
from .random_model import SHAPES, save_random_model

MIB = 2**20


def make_trainer(model: Path, folder: Path, lora: int | None) -> ExtGRPOTrainer:
    """A trainer with its engine, for its weights only."""
    on_gpu = torch.cuda.is_available()
    config = ExtGRPOConfig(
        output_dir=str(folder / "run"), preset="grpo_clip", use_vllm=True, report_to="none", bf16=on_gpu,
        vllm_gpu_memory_utilization=0.3, vllm_max_model_length=512, vllm_dtype="bfloat16" if on_gpu else "float32",
        num_generations=2, per_device_train_batch_size=2, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    adapter = LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    prompts = Dataset.from_list([{"prompt": "w3 w4"}] * 4)
    return ExtGRPOTrainer(str(model), lambda completions, **_: [0.0] * len(completions), config, prompts,
                          peft_config=adapter)  # fmt: skip


def ways_of(trainer: ExtGRPOTrainer, folder: Path) -> dict[str, Callable[[], Any]]:
    """The three ways; a checkpoint of adapters is none that vLLM could reload."""
    engine = trainer.vllm_generation
    runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner

    def through_disk() -> None:
        trainer.model.save_pretrained(folder / "checkpoint")
        runner.reload_weights(weights_path=str(folder / "checkpoint"))
        process_output_heads(runner.model)

    ways = {"reload": engine.sync_weights, "per parameter": lambda: VLLMGeneration.sync_weights(engine)}
    if not isinstance(trainer.model, PeftModel):
        ways["through disk"] = through_disk
    return ways


def measured(way: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and MiB of memory beyond what was there before."""
    before = start_peak()
    began = time.perf_counter()
    way()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, (peak() - before) / MIB


def compare(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, Any]]:
    """Each way's median seconds and MiB, or what it failed with."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for round_ in tqdm(range(repeats + 1), desc="rounds"):
        for name, way in ways.items():
            if name in failed:
                continue
            try:
                reading = measured(way)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"[:200]
                continue
            if round_:  # the first warms up
                times[name].append(reading)
    done = {name: {"seconds": median(s for s, _ in pairs), "extra_mib": median(m for _, m in pairs)}
            for name, pairs in times.items() if pairs}  # fmt: skip
    return done | {name: {"failed": error} for name, error in failed.items()}


def main() -> None:
    """Measure, print, and write the JSON asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="60m", help="of a model with random weights (default: 60m)")
    parser.add_argument("--model", type=Path, help="a model's folder, instead of --shape")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters of this rank on it")
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds (default: 10)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = args.model or save_random_model(folder / args.shape, args.shape)
        trainer = make_trainer(model, folder, args.lora)
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        figures = compare(ways_of(trainer, folder), args.repeats)
    ours = figures["reload"]["seconds"]
    print(f"\n{parameters / 1e6:.0f} M parameters, median of {args.repeats} rounds")
    for name, row in figures.items():
        if "failed" in row:
            print(f"{name:<15} failed: {row['failed']}")
        else:
            print(
                f"{name:<15} {row['seconds']:>8.3f} s ({row['seconds'] / ours:.1f}x) {row['extra_mib']:>8.0f} MiB extra"
            )
    if args.json:
        result = {"model": str(args.model or args.shape), "parameters": parameters, "ways": figures, **provenance()}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
