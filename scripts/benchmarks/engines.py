"""Tokens/s of HF generate and of vLLM on the same prompts, in alternation: what `use_vllm: auto` chooses by on a CPU.

    python -m scripts.benchmarks.engines
    python -m scripts.benchmarks.engines --models SmolLM2-135M Qwen2.5-0.5B --json engines.json
    python -m scripts.benchmarks.engines --models Qwen2.5-0.5B --dtypes bfloat16 --engines vLLM LLM.generate

Each engine is a process of its own, since vLLM binds threads to cores, and waits while another samples. Every
completion has all its tokens, so both decode equally many. The start of an engine is apart: a run has it once.
`LLM.generate` is vLLM by itself, one call with one `SamplingParams`, without seeds and log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from tqdm import tqdm

from trl_ext.compat.startup import use_all_cores
from trl_ext.data.dataset import DatasetSettings
from trl_ext.generation.completion import Sampling
from trl_ext.generation.engine_choice import parameters_of
from trl_ext.mini.policy import make_base_policy
from trl_ext.runs.provenance import provenance

HF, VLLM, BARE = "HF generate", "vLLM", "LLM.generate"
CONTEXT = 512  # tokens of prompts, of which each has some 150, and completions


def serve(engine: str, model: str, dtype: str, tokens: int, threads: int | None, calls: Connection) -> None:
    """Load a model into an engine, and answer lists of prompts with the seconds that sampling took."""
    from trl_ext.generation.samplers import HFSampler, Sampler, VLLMSampler

    if threads is None:
        use_all_cores()
    else:  # fewer, where other programs have cores of the machine
        torch.set_num_threads(threads)
        os.environ |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    began = time.perf_counter()
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=tokens, min_tokens=tokens, stop=(), seed=0)
    sample: Callable[[list[str]], int]  # the number of tokens of their completions
    if engine == BARE:
        sample = bare_vllm(model, dtype, tokens)
    else:
        sampler: Sampler
        if engine == HF:
            sampler = HFSampler(model, sampling, batch_size=2**30, dtype=dtype)
        else:
            sampler = VLLMSampler(model, sampling, dtype=dtype, max_model_len=CONTEXT)
        sample = lambda prompts: sum(one.tokens for one in sampler(prompts, range(len(prompts))))  # noqa: E731
    calls.send(time.perf_counter() - began)
    while True:
        prompts = calls.recv()
        began = time.perf_counter()
        assert sample(prompts) == tokens * len(prompts)
        calls.send(time.perf_counter() - began)


def bare_vllm(model: str, dtype: str, tokens: int) -> Callable[[list[str]], int]:
    """One call of vLLM's `LLM.generate`, with the settings that the engine needs on this device and no others."""
    from trl_ext.compat.lazy_vllm import load_vllm

    load_vllm()
    from vllm import LLM, SamplingParams

    from trl_ext.generation.merging import whole_model
    from trl_ext.generation.vllm_start import device_settings

    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    llm = LLM(whole_model(model), **{**device_settings(CONTEXT), "dtype": dtype, "max_model_len": CONTEXT})
    params = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens)

    def sample(prompts: list[str]) -> int:
        return sum(len(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False))

    return sample


def measure(model: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By engine and dtype: seconds until it is ready, and tokens/s by the number of completions."""
    problems = DatasetSettings().read("validation", max(args.completions), seed=0).rows["prompt"]
    figures: dict[str, dict[str, Any]] = {}
    processes, spawn = {}, multiprocessing.get_context("spawn")
    for engine in args.engines:
        for dtype in args.dtypes:
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(engine, model, dtype, args.tokens, args.threads, theirs))
            process.start()
            theirs.close()  # else a process that is lost is waited for
            processes[f"{engine}, {dtype}"] = process, mine
            figures[f"{engine}, {dtype}"] = {"ready_s": round(mine.recv(), 1), "tokens_per_s": {}}
    for completions in args.completions:
        prompts = [problems[i // args.group] for i in range(completions)]
        rates: dict[str, list[float]] = {}
        for round_ in tqdm(range(args.repeats + 1), desc=f"{completions} completions", leave=False):
            for name, (_, calls) in processes.items():
                calls.send(prompts)
                seconds = calls.recv()
                if round_:  # the first warms up
                    rates.setdefault(name, []).append(completions * args.tokens / seconds)
        for name, values in rates.items():
            figures[name]["tokens_per_s"][completions] = round(median(values), 1)
            figures[name].setdefault("rounds", {})[completions] = [round(value, 1) for value in values]
    for process, _ in processes.values():
        for left in [*psutil.Process(process.pid).children(recursive=True), process]:
            left.kill()  # an engine may wait for what it has started
    return figures


def main() -> None:
    """Measure, print, and write the JSON asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[""], help="folders or Hub ids (default: the base policy)")
    parser.add_argument("--engines", nargs="+", default=[HF, VLLM], help=f"{HF}, {VLLM}, {BARE} (default: two)")
    parser.add_argument("--completions", nargs="+", type=int, default=[16, 64], help="at a time (default: 16 64)")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt (default: 8)")
    parser.add_argument("--tokens", type=int, default=64, help="of a completion (default: 64)")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="of the weights (default: float32)")
    parser.add_argument("--threads", type=int, help="of an engine (default: all cores)")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    results = {}
    for named in args.models:
        model = named or str(make_base_policy(seed=0))
        parameters = parameters_of(model)
        engines = measure(model, args)
        name = Path(named).name or "the base policy"
        results[name] = {"parameters": parameters, "engines": engines}
        print(f"\n{name}, {parameters / 1e6:,.1f} million parameters, completions of {args.tokens} tokens")
        for engine, figures in engines.items():
            rates = ", ".join(f"{rate:,.0f} tokens/s of {n}" for n, rate in figures["tokens_per_s"].items())
            print(f"{engine:<24} {rates}; ready after {figures['ready_s']} s")
    if args.json:
        record = {
            "models": results,
            "tokens": args.tokens,
            "group": args.group,
            "threads": args.threads,
            **provenance(),
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
