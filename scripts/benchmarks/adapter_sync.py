"""An adapter merged for the colocated vLLM engine, or sent by itself: seconds, and how far log-probabilities are apart.

    python -m scripts.benchmarks.adapter_sync --model smollm2
    python -m scripts.benchmarks.adapter_sync --model smollm2 --dtype bfloat16 --quantized --json adapter_sync.json

Each way is a process of its own, and waits while another works. With `--quantized` the policy's base is in 4 bits (nf4,
by bitsandbytes), and a third way is measured: an engine that keeps the checkpoint's weights, as it loads them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from tqdm import tqdm

from trl_ext.data.dataset import DatasetSettings
from trl_ext.generation.model_source import loadable
from trl_ext.runs.provenance import provenance

MERGE, ADAPTER, UNSYNCED = "merge", "adapter", "adapter on the checkpoint's weights"


def serve(way: str, args: argparse.Namespace, calls: Connection) -> None:
    """Make a policy with an adapter and its engine, and answer requests for a sync or for a rollout."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    torch.set_num_threads(args.threads)
    from peft import LoraConfig
    from trl import ModelConfig, get_quantization_config

    from trl_ext import ExtGRPOConfig, ExtGRPOTrainer

    prompts = DatasetSettings().read("train", 64, seed=0).rows
    quantized = ModelConfig(use_peft=True, dtype=args.dtype, load_in_4bit=args.quantized, bnb_4bit_quant_type="nf4")
    trainer: Any = ExtGRPOTrainer(
        model=loadable(args.model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=ExtGRPOConfig(
            output_dir=tempfile.mkdtemp(), report_to="none", use_cpu=True, bf16=False, preset="grpo_clip",
            per_device_train_batch_size=args.rows, num_generations=8, max_completion_length=args.tokens,
            use_vllm=True, vllm_mode="colocate", vllm_dtype=args.dtype, vllm_max_model_length=args.tokens + 256,
            vllm_lora_sync=MERGE if way == MERGE else ADAPTER, model_init_kwargs={"dtype": args.dtype},
        ),
        train_dataset=prompts,
        peft_config=LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        quantization_config=get_quantization_config(quantized),
    )  # fmt: skip
    engine, model = trainer.vllm_generation, trainer.model
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which begins with zeros
                parameter.add_(args.update * torch.randn_like(parameter))
    if way == UNSYNCED:
        engine.has_base = True
    ids = [trainer.processing_class(row["prompt"])["input_ids"] for row in prompts.select(range(args.rows // 8))]
    asked = [prompt for prompt in ids for _ in range(8)]
    calls.send({"weights": sum(p.numel() for p in model.parameters() if not p.requires_grad),
                "adapter": sum(p.numel() for p in model.parameters() if p.requires_grad)})  # fmt: skip
    while True:
        request = calls.recv()
        began = time.perf_counter()
        if request == "sync":
            engine.sync_weights()
            calls.send(time.perf_counter() - began)
            continue
        _, completions, sampled, _ = engine.generate(prompts=asked, images=None, num_generations=8)
        seconds = time.perf_counter() - began
        calls.send((seconds, sum(map(len, completions)), apart(model, asked, completions, sampled)))


@torch.no_grad()
def apart(model: Any, prompts: Any, completions: Any, sampled: Any) -> dict[str, float]:
    """How far a sampled token's log-probability of the engine is from that of the policy's forward pass."""
    differences = []
    model.eval()
    for prompt, ids, logps in zip(prompts, completions, sampled, strict=True):
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
        mine = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        differences.append((mine - torch.tensor([logp for (logp,) in logps])).abs())
    every = torch.cat(differences)
    return {"mean": every.mean().item(), "max": every.max().item()}


def main() -> None:
    """Measure, print, and write the JSON asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a Hub id or smollm2 (default)")
    parser.add_argument("--dtype", default="float32", help="of policy and engine (default: float32)")
    parser.add_argument("--quantized", action="store_true", help="the policy's base is in 4 bits")
    parser.add_argument("--rows", type=int, default=32, help="of a rollout, in groups of 8 (default: 32)")
    parser.add_argument("--tokens", type=int, default=64, help="of a row (default: 64)")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA on all linear layers (default: 16)")
    parser.add_argument("--update", type=float, default=0.01, help="standard deviation of its B (default: 0.01)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    processes, figures = {}, {}
    for way in (MERGE, ADAPTER, *([UNSYNCED] if args.quantized else [])):
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(way, args, theirs))
        process.start()
        theirs.close()  # else a process that is lost is waited for
        figures[way] = {"parameters": mine.recv(), "sync_s": [], "rollout_s": [], "tokens": 0}
        processes[way] = process, mine
    for round_ in tqdm(range(args.repeats + 1)):
        for way, (_, calls) in processes.items():
            calls.send("sync")
            sync = calls.recv()
            calls.send("rollout")
            rollout, figures[way]["tokens"], figures[way]["logp_difference"] = calls.recv()
            if round_:  # the first warms up, and has the base model sent
                figures[way]["sync_s"].append(round(sync, 3))
                figures[way]["rollout_s"].append(round(rollout, 3))
    for process, _ in processes.values():
        for left in [*psutil.Process(process.pid).children(recursive=True), process]:
            left.kill()  # an engine may wait for what it has started
    print(
        f"\n{args.model}, {args.dtype}{', base in 4 bits' * args.quantized}, {args.rows} rows of {args.tokens} tokens"
    )
    for way, found in figures.items():
        differs = found["logp_difference"]
        seconds = f"sync {median(found['sync_s']):.2f} s, rollout {median(found['rollout_s']):.2f} s"
        print(
            f"{way}: {seconds}; log-probabilities differ by {differs['mean']:.2g} on average, "
            f"{differs['max']:.2g} at most"
        )
    if args.json:
        record = {"ways": figures, **{n: v for n, v in vars(args).items() if n != "json"}, **provenance()}
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
