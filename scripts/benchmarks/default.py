"""The embedded default's whole training, TRL's own `GRPOTrainer` against ours: seconds, breakdown, accuracy.

    python -m scripts.benchmarks.default --json docs/results/default_speed.json --plot docs/results/default_speed.png
    python -m scripts.benchmarks.default --cpu_time   # where other programs run: CPU seconds of one thread

Both start from the same base policy and have the settings of recipes/grpo_math.yaml, the same problems and the same
reward; neither validates during training. The held-out accuracy at the end is measured with one sampler for both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from trl_ext import REWARDS, ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.compat.startup import use_all_cores
from trl_ext.data.dataset import DatasetSettings
from trl_ext.evaluation.evaluator import evaluate
from trl_ext.generation.completion import Sampling
from trl_ext.generation.samplers import HFSampler
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.rewards.graders import GRADERS
from trl_ext.runs.provenance import provenance

YAML = Path(__file__).parents[2] / "recipes" / "grpo_math.yaml"
SAME = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "optim",
        "lr_scheduler_type", "warmup_steps", "max_completion_length", "temperature", "max_grad_norm", "seed", "bf16",
        "gradient_checkpointing", "weight_decay", "adam_beta1", "adam_beta2", "max_steps", "beta",
        "num_iterations", "epsilon")  # fmt: skip


def timed(trainer: Any, names: dict[str, str], clock: Callable[[], float]) -> dict[str, float]:
    """Wrap methods of the trainer so that their seconds add up under the names given; returns the sums, live."""
    spent = dict.fromkeys(names.values(), 0.0)

    def wrap(method: str, label: str) -> None:
        inner = getattr(trainer, method)

        def outer(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[label] += clock() - began

        setattr(trainer, method, outer)

    for method, label in names.items():
        wrap(method, label)
    return spent


def train(kind: str, policy: str, seed: int, steps: int, folder: Path, clock: Callable[[], float]) -> dict[str, Any]:
    """One training run: seconds in all and by part, reward per step, accuracy on held-out problems."""
    task, _, config = parse(GRPO_SETTINGS, None, YAML, ["--seed", str(seed), "--max_steps", str(steps)])
    common = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
              "output_dir": str(folder / "run")}  # fmt: skip
    common |= {name: getattr(config, name) for name in SAME}
    if kind == "TRL":
        trainer_class, settings = GRPOTrainer, GRPOConfig(**common, loss_type="grpo")
    else:
        axes = {name: getattr(config, name) for name in ("preset", "stop", "sampling_min_tokens")}
        common |= {"steps_per_generation": config.steps_per_generation}
        trainer_class, settings = ExtGRPOTrainer, ExtGRPOConfig(**common, **axes)
    problems = task.data(seed).train
    torch.manual_seed(seed)
    trainer: Any = trainer_class(policy, task.build(REWARDS, task.reward), settings, problems)
    spent = timed(trainer, {"_generate": "rollout", "_calculate_rewards": "reward", "training_step": "all"}, clock)
    began = clock()
    trainer.train()
    seconds = clock() - began
    spent["micro-batches"] = spent.pop("all") - spent["rollout"] - spent["reward"]
    spent["optimizer and the rest"] = seconds - sum(spent.values())
    trainer.save_model(str(folder / "model"))
    held_out = DatasetSettings(prompt=task.prompt).read("validation", task.validation_problems, seed).rows
    sampler = HFSampler(str(folder / "model"), Sampling(max_tokens=config.max_completion_length), 256)
    grader = GRADERS.build("compatible", answer_format="r1_zero")
    report = evaluate(held_out, lambda prompts: sampler(prompts, range(len(prompts))), grader)
    reward = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {"seconds": seconds, "spent": spent, "reward": reward, "accuracy": report.accuracy}


def draw(path: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Reward of both against steps and against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for color, (kind, runs_of_kind) in zip(("C1", "C0"), runs.items(), strict=True):
        for number, run in enumerate(runs_of_kind):
            smooth = [mean(run["reward"][max(0, i - 9) : i + 1]) for i in range(len(run["reward"]))]
            per_step = run["seconds"] / len(smooth)
            style = {"color": color, "alpha": 0.7, "label": kind if number == 0 else None}
            panels[0].plot(range(1, len(smooth) + 1), smooth, **style)
            panels[1].plot([per_step * (i + 1) for i in range(len(smooth))], smooth, **style)
    for panel, label in zip(panels, ("optimizer steps", "seconds of training"), strict=True):
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("reward, mean of 10 steps")
    panels[0].legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train both for every seed, print, and write the files asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of a run (default: 120)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw the rewards into this PNG")
    parser.add_argument("--cpu_time", action="store_true", help="CPU seconds of one thread")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.cpu_time:
        torch.set_num_threads(1)
    else:
        use_all_cores()
    runs: dict[str, list[dict[str, Any]]] = {"TRL": [], "trl_ext": []}
    for seed in args.seeds:
        policy = str(make_base_policy(seed=seed))
        for kind, runs_of_kind in runs.items():
            with tempfile.TemporaryDirectory() as scratch:
                runs_of_kind.append(train(kind, policy, seed, args.steps, Path(scratch), clock))
            run = runs_of_kind[-1]
            print(f"seed {seed} {kind:<8} {run['seconds']:6.1f} s  accuracy {run['accuracy']:.3f}", flush=True)
    print(f"\n{'':<24}" + "".join(f"{kind:>10}" for kind in runs) + f"{'ratio':>9}")
    totals = {kind: [sum(run["seconds"] for run in runs_of_kind)] for kind, runs_of_kind in runs.items()}
    for part in runs["TRL"][0]["spent"]:
        seconds = [mean(run["spent"][part] for run in runs_of_kind) for runs_of_kind in runs.values()]
        print(f"{part:<24}" + "".join(f"{s:>9.1f}s" for s in seconds) + f"{seconds[0] / max(seconds[1], 1e-9):>8.1f}x")
    seconds = [total[0] / len(args.seeds) for total in totals.values()]
    print(f"{'in all':<24}" + "".join(f"{s:>9.1f}s" for s in seconds) + f"{seconds[0] / seconds[1]:>8.1f}x")
    if args.json:
        args.json.write_text(json.dumps({"runs": runs, **provenance()}, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        draw(args.plot, runs)


if __name__ == "__main__":
    main()
