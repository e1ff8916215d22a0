"""Seconds of an optimizer step on replayed rollouts: TRL's own `GRPOTrainer`, and ours with each saving and with all.

    python scripts/bench_step.py --json docs/results/step_speed.json
    python scripts/bench_step.py --correction           # with the correction for the sampler's mismatch
    python scripts/bench_step.py --scaling docs/results/step_scaling.png
    python scripts/bench_step.py --cpu_time             # where other programs run: CPU seconds of one thread
    python scripts/bench_step.py --shape qwen2.5-math-1.5b --max_length 1024 --mean_length 400 --micro 4 --bf16

All get the same completions, rewards and sampler log-probabilities; rounds alternate between them, so that a machine
that slows down slows all of them down. The learning rate is 0: every gradient is of the same weights. The ideal counts
the tokens that must be computed: no padding, no zero-advantage row, each prompt once per group where prompts are
shared; a forward pass counts 1, a backward pass 2, and with gradient checkpointing another forward pass, 1. Both sides
run without gradient checkpointing and then both with it. Memory is that of a round of its own, which is not timed: for
it everything that the process has kept is given back first, which a step then takes again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import NormalDist, median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.compat.startup import use_all_cores
from trl_ext.runs.provenance import provenance
from trl_ext.step import attention

from .peak_memory import peak, start_peak
from .random_model import SHAPES, save_random_model

STOCK = "TRL"
OFF = {
    "skip_zero_advantage_rows": False,
    "dynamic_micro_batches": False,
    "share_prompt_prefix": False,
    "reuse_log_probs": False,
}
ON = dict.fromkeys(OFF, True)
# By the names that the result pages know them by.
WAYS: dict[str, dict[str, Any]] = {
    "ours, nothing saved": OFF,
    "skip_idle_rows": {**OFF, "skip_zero_advantage_rows": True},
    "compact_micro_batches": {**OFF, "dynamic_micro_batches": True},
    "reuse_log_probs": {**OFF, "reuse_log_probs": True},
    "share_prompts": {**OFF, "dynamic_micro_batches": True, "share_prompt_prefix": True},
    "all but share_prompts": {**ON, "share_prompt_prefix": False},
    "all": ON,
    "all, 2048 tokens each": {**ON, "micro_batch_tokens": 2048},
    "all, 8192 tokens each": {**ON, "micro_batch_tokens": 8192},
    "all, 16384 tokens each": {**ON, "micro_batch_tokens": 16_384},
    "all, attention row by row": ON,
}
ROW_BY_ROW = "all, attention row by row"  # not by one operation for the rows of a micro-batch
EVERY = 16  # one of so many elements of a large model's gradient is kept


@dataclasses.dataclass(frozen=True)
class Workload:
    """A rollout's shape; lengths in tokens."""

    rollouts: int = 64
    group: int = 8
    prompt: int = 64
    mean_length: float = 95
    max_length: int = 256
    idle: float = 0.5  # fraction of zero-variance groups
    micro: int = 2

    def lengths(self) -> np.ndarray:
        """(N,) completion lengths: the quantiles of a log-normal with sigma 0.6, capped, in random order."""
        log_length = NormalDist(np.log(self.mean_length) - 0.6**2 / 2, 0.6)
        quantiles = np.exp([log_length.inv_cdf((i + 0.5) / self.rollouts) for i in range(self.rollouts)])
        return np.random.default_rng(0).permutation(np.clip(quantiles, 2, self.max_length).astype(int))

    def rewards(self) -> np.ndarray:
        """(N,) 0 or 1: a fraction of the groups has zero variance, at even distances; the others have some of each."""
        groups = self.rollouts // self.group
        outcomes = np.random.default_rng(1).integers(0, 2, (groups, self.group)).astype(float)
        outcomes[:, 0], outcomes[:, 1] = 0, 1
        outcomes[np.diff(np.floor(np.arange(groups + 1) * self.idle)) > 0] = 0
        return outcomes.ravel()

    def units(self, correction: bool, checkpointing: bool) -> dict[str, float]:
        """What TRL computes, and the least there is to compute, without and with shared prompts; forward tokens."""
        passes = 3 + checkpointing
        useful = np.repeat(self.rewards().reshape(-1, self.group).std(axis=1) > 0, self.group)
        lengths = self.lengths()
        completions = lengths[useful].sum()
        return {
            STOCK: (passes + correction) * self.rollouts * (self.prompt + lengths.max()),
            "alone": passes * (completions + useful.sum() * self.prompt),
            "shared": passes * (completions + useful.sum() / self.group * self.prompt),
        }


class Replay:
    """In place of the engine: the same completions for every rollout, with the sampler's log-probabilities."""

    def __init__(self, work: Workload, vocabulary: int) -> None:
        random = np.random.default_rng(2)
        self.completions = [[*random.integers(3, vocabulary, n - 1).tolist(), 1] for n in work.lengths()]
        self.logps = [[[float(-np.log(vocabulary))]] * len(ids) for ids in self.completions]

    def sync_weights(self) -> None:
        """The weights do not matter here."""

    def seed_requests(self, *_: Any) -> None:
        """Nothing is drawn."""

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, Any, Any, Any]:
        """What vLLM would return."""
        return prompts, self.completions, self.logps, None


class Watch(TrainerCallback):
    """Seconds of a step, or its memory, and its gradient.

    Args:
        every: one element of so many is kept of the gradient; more are left out of a model above 10^9 parameters.
    """

    def __init__(self, clock: Callable[[], float], every: int = 1) -> None:
        self.clock, self.every = clock, every
        self.seconds: list[float] = []
        self.weighs = False  # the next step's memory, instead of timing it
        self.extra_mib = 0.0
        self.gradient: torch.Tensor | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.before, self.began = start_peak() if self.weighs else 0, self.clock()

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        """Keep the gradient, before the optimizer."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.weighs:
            self.extra_mib = (peak() - self.before) / 2**20
            every = EVERY if sum(p.numel() for p in model.parameters()) > 10**9 else self.every
            self.gradient = torch.cat([p.grad.flatten()[::every].float().cpu() for p in model.parameters()])
        else:
            self.seconds.append(self.clock() - self.began)


@contextmanager
def replaying(engine: Replay) -> Iterator[None]:
    """While configurations and trainers are made: their engine is the replay, vLLM or not."""
    with (
        patch("trl_ext.generation.engine_choice.is_vllm_available", lambda: True),
        patch("trl.trainer.grpo_trainer.VLLMGeneration", lambda **_: engine),
        patch("trl_ext.generation.vllm.ColocatedEngine", lambda **_: engine),
        patch("trl_ext.generation.vllm.load_vllm", lambda: None),
    ):
        yield


def trainers(
    args: argparse.Namespace, work: Workload, checkpointing: bool, folder: Path
) -> dict[str, tuple[Any, Watch]]:
    """TRL's and ours, each with its watch."""
    model = save_random_model(folder / args.shape, args.shape)
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = np.random.default_rng(3).integers(3, len(tokenizer), (work.rollouts // work.group, work.prompt))
    prompts = Dataset.from_list([{"prompt": " ".join(f"w{i}" for i in row)} for row in words])
    rewards = work.rewards().tolist()
    common: dict[str, Any] = {
        "max_steps": 1, "per_device_train_batch_size": work.micro, "num_generations": work.group,
        "gradient_accumulation_steps": work.rollouts // work.micro, "max_completion_length": work.max_length,
        "learning_rate": 0.0, "optim": "sgd", "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "bf16": args.bf16,
        "use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": args.correction,
        "vllm_importance_sampling_mode": "sequence_mask",  # TRL's default, which is not ours
        "gradient_checkpointing": checkpointing, "logging_steps": 1000, "loss_type": "grpo", "max_grad_norm": 0.0,
    }  # fmt: skip
    watched: dict[str, tuple[Any, Watch]] = {}
    clock = time.process_time if args.cpu_time else time.perf_counter
    ways = {name: WAYS[name] for name in WAYS if not args.ways or name in args.ways}
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base.to("cuda" if torch.cuda.is_available() else "cpu")
    with replaying(Replay(work, len(tokenizer))):
        for name, savings in {STOCK: None, **ways}.items():
            watch, settings = Watch(clock), {**common, "output_dir": str(folder / "run")}
            policy = copy.deepcopy(base)
            if savings is None:
                kind, config = GRPOTrainer, GRPOConfig(**settings)
            else:
                del settings["loss_type"]
                axes = {"preset": "grpo_clip", "advantage_options": {"eps": 1e-4}}  # TRL's eps
                kind, config = ExtGRPOTrainer, ExtGRPOConfig(**settings, **axes, **savings)
            made = kind(policy, lambda completions, **_: rewards, config, prompts, processing_class=tokenizer)
            made.add_callback(watch)
            watched[name] = made, watch
    return watched


def measure(args: argparse.Namespace, work: Workload, checkpointing: bool = False) -> dict[str, Any]:
    """Per way: median seconds, ratios to TRL's in the same round, ideal ratio, memory, difference of the gradient."""
    with tempfile.TemporaryDirectory() as scratch:
        made = trainers(args, work, checkpointing, Path(scratch))
        # The first round warms up, the last one weighs.
        for place in tqdm(range(args.repeats + 2), desc="rounds", leave=False):
            for name, (trainer, watch) in made.items():
                watch.weighs = place > args.repeats
                patches = {"kernel_of_rows": lambda *_: None} if name == ROW_BY_ROW else {}
                with patch.multiple(attention, **patches) if patches else nullcontext():
                    trainer.train()
        watches = {name: watch for name, (_, watch) in made.items()}
    stock, units = watches[STOCK], work.units(args.correction, checkpointing)
    assert stock.gradient is not None
    figures = {}
    for name, watch in watches.items():
        ratios = [a / b for a, b in zip(stock.seconds[1:], watch.seconds[1:], strict=True)]
        ratio = median(ratios)
        ideal = units[STOCK] / units["shared" if WAYS.get(name, OFF)["share_prompt_prefix"] else "alone"]
        assert watch.gradient is not None
        difference = (watch.gradient - stock.gradient).abs().max() / stock.gradient.abs().max()
        figures[name] = {"seconds": median(watch.seconds[1:]), "ratio": ratio, "lowest": min(ratios),
                       "highest": max(ratios), "ideal": ideal,
                       "of_ideal": ratio / ideal, "fastest": min(watch.seconds[1:]),
                       "fastest_of_ideal": min(stock.seconds[1:]) / min(watch.seconds[1:]) / ideal,
                       "extra_mib": watch.extra_mib,
                       "gradient_difference": difference.item()}  # fmt: skip
    return figures


SCALING: dict[str, tuple[str, list[Any]]] = {
    "rollouts": ("rollouts per step", [16, 32, 64, 128]),
    "mean_length": ("mean length, tokens", [32, 64, 95, 128]),
    "idle": ("fraction of zero-variance groups", [0.0, 0.25, 0.5, 0.75]),
    "group": ("group size", [2, 4, 8, 16]),
}


def scaling(args: argparse.Namespace, work: Workload, path: Path) -> dict[str, Any]:
    """Seconds of a step against the workload's shape, as a plot and as figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    args.ways = ["all but share_prompts", "all"]
    by_field: dict[str, Any] = {}
    figure, panels = pyplot.subplots(1, len(SCALING), figsize=(15, 3.6), layout="constrained")
    for panel, (field, (label, values)) in zip(panels, SCALING.items(), strict=True):
        points = [measure(args, dataclasses.replace(work, **{field: value})) for value in tqdm(values, desc=field)]
        by_field[field] = dict(zip(map(str, values), points, strict=True))
        for name in points[0]:
            panel.plot(values, [point[name]["seconds"] for point in points], marker="o", markersize=4, label=name)
        panel.set_xlabel(label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("seconds per optimizer step")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return by_field


def show(title: str, rows: dict[str, Any]) -> None:
    """Print a table of what `measure` has found."""
    print(f"\n{title:<26}{'seconds':>9}{'ratio':>8}{'rounds':>13}{'ideal':>8}{'of ideal':>10}{'fastest':>9}"
          f"{'extra MiB':>11}{'gradient':>11}")  # fmt: skip
    for name, row in rows.items():
        rounds = f"{row['lowest']:.2f}-{row['highest']:.2f}x"
        print(f"{name:<26}{row['seconds']:>9.3f}{row['ratio']:>7.2f}x{rounds:>13}{row['ideal']:>7.2f}x"
              f"{row['of_ideal']:>10.2f}{row['fastest_of_ideal']:>9.2f}{row['extra_mib']:>11.0f}"
              f"{row['gradient_difference']:>11.1e}")  # fmt: skip


def main() -> None:
    """Measure, print, and write the files asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Workload):
        kind = type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default, help=f"(default: {field.default})")
    parser.add_argument("--shape", choices=SHAPES, default="6m", help="of a model with random weights (default: 6m)")
    parser.add_argument("--correction", action="store_true", help="correct for the sampler's mismatch")
    parser.add_argument("--checkpointing", choices=("off", "on"), help="gradient checkpointing; by default both")
    parser.add_argument("--cpu_time", action="store_true", help="CPU seconds of one thread")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--ways", nargs="*", choices=WAYS, metavar="WAY", help=f"some of: {', '.join(WAYS)}")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--scaling", type=Path, metavar="PNG", help="plot seconds against the workload's shape")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.cpu_time:
        torch.set_num_threads(1)
    else:
        use_all_cores()
    work = Workload(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Workload)})
    results: dict[str, Any]
    if args.scaling:
        results = {"found": scaling(args, work, args.scaling)}
    else:
        results = {}
        for name, title in {"off": "without checkpointing", "on": "with checkpointing"}.items():
            if args.checkpointing in (None, name):
                key = "found" if name == "off" else "found_with_checkpointing"
                results[key] = measure(args, work, name == "on")
                show(title, results[key])
    if args.json:
        settings = {"workload": dataclasses.asdict(work), "shape": args.shape, "correction": args.correction}
        settings |= {"cpu_time": args.cpu_time}
        args.json.write_text(json.dumps({**settings, **results, **provenance()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
