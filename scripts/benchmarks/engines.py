"""Tokens/s of HF generate and of vLLM on the same prompts, in alternation: what `use_vllm: auto` chooses by on a CPU.

    python -m scripts.benchmarks.engines
    python -m scripts.benchmarks.engines --models SmolLM2-135M Qwen2.5-0.5B --json engines.json
    python -m scripts.benchmarks.engines --models Qwen2.5-0.5B --dtypes bfloat16 --engines vLLM LLM.generate
    python -m scripts.benchmarks.engines --models Qwen2.5-0.5B --dtypes bfloat16 --threads 1 --in_turn --ceilings

Each engine is a process of its own, since vLLM binds threads to cores, and waits while another samples. Every
completion has all its tokens, so both decode equally many. The start of an engine is apart: a run has it once.
`LLM.generate` is vLLM by itself, one call with one `SamplingParams`, without seeds and log-probabilities. Tokens per
CPU second are next to those of the wall clock, for a machine that has other work. `--in_turn` starts an engine anew for
each round, where memory has no room for all of them, and `--ceilings` says how much one thread could decode at most.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from trl_ext.compat.startup import use_all_cores
from trl_ext.data.dataset import DatasetSettings
from trl_ext.generation.completion import Sampling
from trl_ext.generation.engine_choice import parameters_of
from trl_ext.generation.model_source import locate
from trl_ext.mini.policy import make_base_policy
from trl_ext.runs.provenance import provenance

from .cpu_ceilings import decoding_ceilings

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
        began, computed = time.perf_counter(), cpu_seconds()
        assert sample(prompts) == tokens * len(prompts)
        calls.send((time.perf_counter() - began, cpu_seconds() - computed))


def cpu_seconds() -> float:
    """Of this process and of those that it has started, an engine's own."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


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


class Engine:
    """An engine in a process of its own, which is started, and asked as soon as it is ready."""

    def __init__(self, engine: str, model: str, dtype: str, args: argparse.Namespace) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.calls, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(engine, model, dtype, args.tokens, args.threads, theirs))
        self.process.start()
        theirs.close()  # else a process that is lost is waited for
        self.ready_s = round(self.calls.recv(), 1)

    def seconds(self, prompts: list[str]) -> tuple[float, float]:
        """Of sampling a completion for each, by the wall clock and of the CPU."""
        self.calls.send(prompts)
        wall, cpu = self.calls.recv()
        return wall, cpu

    def close(self) -> None:
        """End the process, and what it has started."""
        for left in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            left.kill()  # an engine may wait for what it has started
        self.process.join()


def measure(model: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By engine and dtype: seconds until it is ready, and tokens/s by the number of completions."""
    problems = DatasetSettings().read("validation", max(args.completions), seed=0).rows["prompt"]
    named = {f"{engine}, {dtype}": (engine, dtype) for engine in args.engines for dtype in args.dtypes}
    figures: dict[str, dict[str, Any]] = {name: {"tokens_per_s": {}} for name in named}
    kept: dict[str, Engine] = {}
    for completions in args.completions:
        prompts = [problems[i // args.group] for i in range(completions)]
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
        for _ in tqdm(range(args.repeats), desc=f"{completions} completions", leave=False):
            for name, (engine, dtype) in named.items():
                one = kept.pop(name, None) or Engine(engine, model, dtype, args)
                figures[name].setdefault("ready_s", one.ready_s)
                if args.in_turn or not rates[name]:
                    one.seconds(prompts[: args.group] if args.in_turn else prompts)  # warms up
                rates[name].append(tuple(completions * args.tokens / taken for taken in one.seconds(prompts)))
                if args.in_turn:
                    one.close()
                else:
                    kept[name] = one
        for name, values in rates.items():
            figures[name]["tokens_per_s"][completions] = round(median(wall for wall, _ in values), 1)
            for kind, of_clock in zip(("rounds", "rounds_per_cpu_s"), zip(*values, strict=True), strict=True):
                figures[name].setdefault(kind, {})[completions] = [round(value, 1) for value in of_clock]
    for one in kept.values():
        one.close()
    return figures


def matrices(model: str) -> Counter[tuple[int, int]]:
    """The shapes of those that a token is multiplied by, (outputs, inputs), to their number; no weights are loaded."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(locate(model).base))
    return Counter(tuple(one.weight.shape) for one in network.modules() if isinstance(one, torch.nn.Linear))


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
    parser.add_argument("--in_turn", action="store_true", help="one engine at a time, started for each round")
    parser.add_argument("--ceilings", action="store_true", help="also what a thread could decode, by its CPU seconds")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    made_by = provenance()  # with the threads of the engines, not of the ceilings
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
        if args.ceilings:
            torch.set_num_threads(1)
            ceilings = {
                f"{rows}, {dtype}": decoding_ceilings(matrices(model), rows, getattr(torch, dtype))
                for rows in args.completions for dtype in args.dtypes
            }  # fmt: skip
            results[name]["ceilings"] = ceilings
            for of, ceiling in ceilings.items():
                print(f"at most, {of}: " + ", ".join(f"{kind} {value:,.0f}" for kind, value in ceiling.items()))
    if args.json:
        settings = {name: getattr(args, name) for name in ("tokens", "group", "threads", "in_turn")}
        record = {"models": results, **settings, **made_by}
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
