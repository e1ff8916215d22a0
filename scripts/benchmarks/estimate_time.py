"""Estimates against measured seconds on this CPU, for several shapes: an optimizer step, and a rollout by HF generate.

    python -m scripts.benchmarks.estimate_time --json docs/results/estimate_time.json
    python -m scripts.benchmarks.estimate_time --steps docs/results/gpu_h200.json --gpu h200

With `--steps` nothing is measured: it compares with what `bench_step.py --bf16 --json` has measured on a GPU. Else the
ceilings of the CPU are measured first, in a few seconds. Then each shape is estimated twice: from those ceilings
alone, and with the pace of one of the shapes as a pilot. Steps replay the rollouts of `step.py` through our trainer
with its defaults; rollouts end at random, at one of several end tokens. Rounds alternate between the shapes. Seconds
are those of one thread on its core, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import ModelConfig

from trl_ext import ExtGRPOConfig
from trl_ext.generation.hf import hf_generate
from trl_ext.recipes.grpo import GRPOTask
from trl_ext.runs.provenance import provenance
from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.hardware import Gpu, gpu_by_name
from trl_ext.tools.estimate.plan import Rates
from trl_ext.tools.estimate.planned import Launch, Lengths, PlannedRun
from trl_ext.tools.estimate.roofline import count_costs, estimate_time
from trl_ext.tools.estimate.timing import Timing

from .cpu_ceilings import measure_cpu, seconds_of
from .random_model import SHAPES, network_of, save_random_model
from .step import STOCK, WAYS, Workload, trainers

_WAYS = ("all", "all but share_prompts")  # of `step.py`
_LONGEST = 128  # tokens of a completion that is rolled out
_ENDS = 1 / 48  # fraction of the vocabulary that ends a completion, and so the chance per token


def replayed(network: Any, work: Workload, lengths: Lengths, **settings: Any) -> PlannedRun:
    """The run that `step.py` replays, on one CPU, with HF generate for its rollouts."""
    config = ExtGRPOConfig(
        output_dir="replayed", use_cpu=True, use_vllm=False, report_to="none", save_strategy="no", preset="grpo_clip",
        per_device_train_batch_size=work.micro, gradient_accumulation_steps=work.rollouts // work.micro,
        num_generations=work.group, **{"bf16": False, "gradient_checkpointing": False} | settings,
    )  # fmt: skip
    task, model = GRPOTask(validate_every=1, validation_problems=1), ModelConfig(dtype="float32")
    return PlannedRun(task, model, config, network, Launch(), lengths, trained_fraction=1 - work.idle)


class CoreSeconds(TrainerCallback):
    """A step's seconds on the core, before the optimizer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self.began = time.process_time()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stop."""
        self.seconds.append(time.process_time() - self.began)


class Rollouts:
    """A model's rollouts by HF generate; each call takes another seed."""

    def __init__(self, folder: Path, work: Workload) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        vocabulary = self.model.config.vocab_size
        ends = list(range(1, max(2, int(vocabulary * _ENDS))))
        self.model.generation_config.update(
            do_sample=True, top_k=0, max_new_tokens=_LONGEST, eos_token_id=ends, pad_token_id=0
        )
        prompts = np.random.default_rng(4).integers(3, vocabulary, (work.rollouts // work.group, work.prompt))
        self.prompts = prompts.repeat(work.group, axis=0).tolist()
        self.seed, self.mean_lengths = 0, list[float]()

    def __call__(self) -> None:
        """One rollout."""
        torch.manual_seed(self.seed)
        self.seed += 1
        completions = hf_generate(self.model, self.tokenizer, self.prompts, self.model.generation_config)
        self.mean_lengths.append(sum(map(len, completions)) / len(completions))


@dataclasses.dataclass
class Measured:
    """A shape, its costs, and its seconds."""

    costs: ModelCosts
    run: dict[str, PlannedRun]  # by what is measured
    seconds: dict[str, list[float]]


def measure(args: argparse.Namespace, work: Workload, folder: Path) -> dict[str, Measured]:
    """All shapes, in alternation; the first round warms up."""
    runs: dict[str, Any] = {}
    for name in args.shapes:
        settings = argparse.Namespace(shape=name, correction=False, bf16=False, cpu_time=True, ways=list(_WAYS))
        made = trainers(settings, work, False, folder)
        watches = {way: CoreSeconds() for way in _WAYS}
        for way, watch in watches.items():
            made[way][0].add_callback(watch)
            made[way][0].remove_callback(PrinterCallback)
        runs[name] = (
            {way: (made[way][0], watches[way]) for way in _WAYS},
            Rollouts(save_random_model(folder / name, name), work),
        )
        del made[STOCK]
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    for round_ in tqdm(range(args.repeats + 1), desc="rounds", leave=False):
        for name, (made, rollouts) in runs.items():
            for way, (trainer, watch) in made.items():
                trainer.train()
                if round_:
                    seconds[name].setdefault(way, []).append(watch.seconds[-1])
            took = seconds_of(rollouts, least=0.0, fewest=1)
            if round_:
                seconds[name].setdefault("rollout", []).append(took)
    measurements = {}
    for name, (_, rollouts) in runs.items():
        network, lengths = rollouts.model.config, work.lengths()
        trained = Lengths(work.prompt, work.prompt, float(lengths.mean()), int(lengths.max()))
        rolled = Lengths(work.prompt, work.prompt, float(np.mean(rollouts.mean_lengths)), _LONGEST)
        planned = {way: replayed(network, work, trained, **WAYS[way]) for way in _WAYS}
        planned["rollout"] = replayed(network, work, rolled)
        measurements[name] = Measured(count_costs(planned["rollout"]), planned, seconds[name])
    return measurements


def estimate(one: Measured, what: str, gpu: Gpu, reached: Efficiency) -> tuple[float, Timing]:
    """Seconds of what was measured, and the whole timing."""
    timing = estimate_time(one.run[what], gpu, reached, one.costs)
    parts = ("prompts", "decoding") if what == "rollout" else ("micro-batches",)
    return sum(phase.seconds for phase in timing.phases if phase.name in parts), timing


def pilot(one: Measured, gpu: Gpu, reached: Efficiency) -> Efficiency:
    """With the pace of this shape's measured step and rollout."""
    rolled, rollout = estimate(one, "rollout", gpu, reached)
    stepped, step = estimate(one, "all", gpu, reached)
    rates: Rates = dataclasses.replace(
        rollout.rates,
        completion_token=rollout.rates.completion_token * median(one.seconds["rollout"]) / rolled,
    )
    efficiency = reached.measured(rollout, rates)
    trained = step.rates.trained_token * median(one.seconds["all"]) / stepped
    return efficiency.measured(step, dataclasses.replace(step.rates, trained_token=trained))


def against_steps(files: list[Path], gpu: Gpu) -> None:
    """Print what a GPU took for the steps of these files of `bench_step.py`, and the estimate of it."""
    read = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for given in [run for one in read for run in ([one] if "workload" in one else one.values()) if "workload" in run]:
        work, network = Workload(**given["workload"]), network_of(given["shape"])
        lengths = Lengths(work.prompt, work.prompt, float(work.lengths().mean()), int(work.lengths().max()))
        for key, checkpointing in {"found": False, "found_with_checkpointing": True}.items():
            settings = {"bf16": True, "gradient_checkpointing": checkpointing}
            ways = {way: WAYS[way] | settings for way in given.get(key, {}) if way != STOCK}
            planned = {way: replayed(network, work, lengths, **own) for way, own in ways.items()}
            one = Measured(count_costs(next(iter(planned.values()))), planned, {}) if planned else None
            for way in planned if one else ():
                took, estimated = given[key][way]["seconds"], estimate(one, way, gpu, Efficiency())[0]
                print(f"{work.micro} rows, {'with' if checkpointing else 'without'} checkpointing, {way}: "
                      f"{took:.2f} s, estimated {estimated:.2f} s, {estimated / took - 1:+.0%}")  # fmt: skip


def main() -> None:
    """Measure, estimate, print, and write the JSON asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1m", "6m", "60m"], help="(default: 1m 6m 60m)")
    parser.add_argument("--pilot", choices=SHAPES, default="6m", help="the shape that gives the pace (default: 6m)")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--steps", type=Path, nargs="+", metavar="FILE", help="compare with runs of bench_step.py")
    parser.add_argument("--gpu", default="h100", help="that the steps were measured on (default: h100)")
    args = parser.parse_args()
    if args.steps:
        against_steps(args.steps, gpu_by_name(args.gpu))
        return
    if args.pilot not in args.shapes:
        parser.error(f"--pilot {args.pilot} is none of --shapes {' '.join(args.shapes)}")
    torch.set_num_threads(1)
    work, origin = Workload(), provenance()
    with tempfile.TemporaryDirectory() as scratch:
        gpu, reached = measure_cpu(Path(scratch))
        measured = measure(args, work, Path(scratch))
    paced = pilot(measured[args.pilot], gpu, reached)
    rows = []
    print(f"{'shape':<7}{'':<24}{'measured':>9}{'estimated':>10}{'off':>7}{'with pilot':>12}{'off':>7}  bound by")
    for name, one in measured.items():
        for what, seconds in one.seconds.items():
            took, (alone, timing), (with_pilot, _) = (
                median(seconds), estimate(one, what, gpu, reached), estimate(one, what, gpu, paced),
            )  # fmt: skip
            phase = "decoding" if what == "rollout" else "micro-batches"
            bound = next(p.bound for p in timing.phases if p.name == phase)
            off, off_with_pilot = alone / took - 1, with_pilot / took - 1
            rows.append({"shape": name, "what": what, "measured": seconds, "estimated": alone, "bound": bound,
                         "off": off, "with_pilot": with_pilot, "off_with_pilot": off_with_pilot})  # fmt: skip
            print(f"{name:<7}{what:<24}{took:>8.3f}s{alone:>9.3f}s{off:>+7.0%}{with_pilot:>11.3f}s"
                  f"{off_with_pilot:>+7.0%}  {bound}")  # fmt: skip
    if args.json:
        record = {"device": dataclasses.asdict(gpu), "efficiency": dataclasses.asdict(reached),
                 "pace": dict(paced.pace), "pilot": args.pilot, "workload": dataclasses.asdict(work), "rows": rows,
                 **origin}  # fmt: skip
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
