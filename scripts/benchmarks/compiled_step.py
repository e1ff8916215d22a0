"""Seconds of an optimizer step with compiled layers and with the same layers as they are, on one replayed rollout.

    python -m scripts.benchmarks.compiled_step --model smollm2 --json docs/results/compiled_step.json
    python -m scripts.benchmarks.compiled_step --model FOLDER_OR_GGUF --rollouts 4 --every 16     # 0.5B: 6 GB

One trainer makes every step, on the savings that are the default: with `torch_compile` and without in turn, so
that whatever else the machine does slows both down. The learning rate is 0: every gradient is of the same weights. The
first step of either kind warms up, and what it takes longer is what compiling takes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.compat.compilation import uncompiled
from trl_ext.compat.startup import use_all_cores
from trl_ext.generation.model_source import loadable
from trl_ext.runs.provenance import provenance

from .step import Replay, Watch, Workload, replaying

WAYS = ("as they are", "compiled")


def trainer_of(args: argparse.Namespace, work: Workload, watch: Watch, folder: Path) -> Any:
    """Whose layers are compiled, and called as they are within `uncompiled`."""
    source = loadable(args.model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    policy = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, args.dtype))
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    prompts = Dataset.from_list([{"prompt": f"{i} +" * work.prompt} for i in range(work.rollouts // work.group)])
    rewards = work.rewards().tolist()
    with replaying(Replay(work, len(tokenizer))):
        config = ExtGRPOConfig(
            preset="grpo_clip", output_dir=str(folder), max_steps=1, per_device_train_batch_size=work.micro,
            num_generations=work.group, gradient_accumulation_steps=work.rollouts // work.micro,
            max_completion_length=work.max_length, learning_rate=0.0, optim="sgd", report_to="none",
            save_strategy="no", disable_tqdm=True, bf16=False, use_vllm=True, vllm_mode="colocate",
            vllm_importance_sampling_correction=False, gradient_checkpointing=args.checkpointing, logging_steps=1000,
            max_grad_norm=0.0, torch_compile=True, torch_compile_backend=args.backend,
        )  # fmt: skip
        made = ExtGRPOTrainer(policy, lambda completions, **_: rewards, config, prompts, processing_class=tokenizer)
    made.add_callback(watch)
    return made


def measure(args: argparse.Namespace, work: Workload) -> dict[str, Any]:
    """Seconds of each step of both ways, the graphs that were compiled, and how far the gradients are apart."""
    clock = time.process_time if args.cpu_time else time.perf_counter
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    gradients: dict[str, torch.Tensor] = {}
    graphs: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        watch = Watch(clock, args.every)
        trainer = trainer_of(args, work, watch, Path(scratch))
        for place in range(args.repeats + 2):  # the first warms up, the last one is not timed: its gradient is kept
            watch.weighs = place > args.repeats
            for way in WAYS if place % 2 else reversed(WAYS):
                with uncompiled() if way == WAYS[0] else nullcontext():
                    trainer.train()
                if watch.weighs:
                    assert watch.gradient is not None
                    gradients[way] = watch.gradient
                else:
                    seconds[way].append(watch.seconds[-1])
                    print(f"{way:<12} {watch.seconds[-1]:8.2f} s", flush=True)
            graphs.append(counters["stats"]["unique_graphs"])
    plain, compiled = (seconds[way][1:] for way in WAYS)
    ratios = [a / b for a, b in zip(plain, compiled, strict=True)]
    apart = (gradients["compiled"] - gradients[WAYS[0]]).abs().max() / gradients[WAYS[0]].abs().max()
    return {
        "seconds": seconds, "medians": {way: median(of_way[1:]) for way, of_way in seconds.items()},
        "times_as_fast": median(ratios), "lowest": min(ratios), "highest": max(ratios),
        "compiling": seconds["compiled"][0] - median(compiled), "graphs": graphs, "gradients_apart": apart.item(),
    }  # fmt: skip


def main() -> None:
    """Measure, print, and write the file asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a GGUF file or smollm2 (default: smollm2)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="(default: float32)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: inductor)")
    parser.add_argument("--rollouts", type=int, default=16, help="(default: 16)")
    parser.add_argument("--group", type=int, default=4, help="(default: 4)")
    parser.add_argument("--mean_length", type=float, default=48, help="of completions, in tokens (default: 48)")
    parser.add_argument("--max_length", type=int, default=96, help="(default: 96)")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--cpu_time", action="store_true", help="CPU seconds of one thread, where other programs run")
    saving = "of the gradients compare one of so many elements, to save memory (default: 1)"
    parser.add_argument("--every", type=int, default=1, help=saving)
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs (default: 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.cpu_time:
        torch.set_num_threads(1)
    else:
        use_all_cores()
    work = Workload(args.rollouts, args.group, 16, args.mean_length, args.max_length, 0.0)
    found = measure(args, work)
    print(
        f"{found['times_as_fast']:.2f} times as fast ({found['lowest']:.2f} to {found['highest']:.2f} in "
        f"{args.repeats} pairs), {found['compiling']:.0f} s to compile {found['graphs'][0]} graphs, "
        f"{found['graphs'][-1] - found['graphs'][0]} more later; gradients {found['gradients_apart']:.1e} apart"
    )
    if args.json:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("json", "model")}
        args.json.write_text(json.dumps({**settings, **found, **provenance()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
