"""TRL's own `GRPOTrainer` on mini-MATH within a wall-clock budget: what the leaderboard is compared with.

    python -m scripts.benchmarks.stock_trl --settings defaults --time_budget 300 --output_dir runs/stock
    python -m scripts.benchmarks.stock_trl --settings recipe --time_budget 300 --output_dir runs/stock_tuned

`defaults` are TRL's, `recipe` those of recipes/grpo_math.yaml as far as TRL has them. Base policy, problems, prompt and
reward are the recipe's. The budget counts from the start of the process and covers the final validation.
"""

from __future__ import annotations

from trl_ext.compat.startup import START, use_all_cores

# isort: split
import argparse
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_ext import REWARDS
from trl_ext.evaluation.evaluator import evaluate
from trl_ext.generation.completion import Sampling
from trl_ext.generation.samplers import HFSampler
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.rewards.graders import GRADERS
from trl_ext.runs.layout import SUMMARY
from trl_ext.runs.provenance import provenance
from trl_ext.runs.summary import write_summary

YAML = Path(__file__).parents[2] / "recipes" / "grpo_math.yaml"
SAME = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "optim",
        "lr_scheduler_type", "warmup_steps", "max_completion_length", "temperature", "max_grad_norm",
        "gradient_checkpointing", "beta", "num_iterations", "epsilon")  # fmt: skip
_END = 4.0  # seconds for saving and reading the model, and for the summary
_MARGIN = 1.2


class Budget(TrainerCallback):
    """Ends training as soon as the budget does not cover another step and the final validation."""

    def __init__(self, seconds: float, end: float) -> None:
        self.seconds, self.end = seconds, end
        self.longest, self.last = 0.0, time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the time that is left with the longest step so far."""
        self.longest, self.last = max(self.longest, time.time() - self.last), time.time()
        control.should_training_stop = time.time() - START + self.longest + self.end >= self.seconds


def measure(model: str, problems: list[dict[str, Any]], max_tokens: int, step: int) -> dict[str, Any]:
    """A validation's entry, by the sampler and the grader that the recipe is validated with."""
    began = time.time()
    sampler = HFSampler(model, Sampling(max_tokens=max_tokens), 256)
    grader = GRADERS.build("compatible", answer_format="r1_zero")
    report = evaluate(problems, lambda prompts: sampler(prompts, range(len(prompts))), grader)
    seconds = time.time() - began
    return {
        "step": step,
        "wall_clock_s": round(time.time() - START, 2),
        "seconds": round(seconds, 2),
        **report.summary(),
    }


def main() -> None:
    """Measure, train, measure on all problems, write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", choices=("defaults", "recipe"), required=True)
    parser.add_argument("--time_budget", type=float, required=True, metavar="S", help="seconds, start-up included")
    parser.add_argument("--problems", type=int, default=5000, help="of the final validation (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--resume", help="accepted and ignored: a run always restarts")
    args = parser.parse_args()
    use_all_cores()
    task, _, config = parse(GRPO_SETTINGS, None, YAML, ["--seed", str(args.seed)])
    policy = str(make_base_policy(seed=args.seed))
    held_out = list(task.load("validation", args.problems, args.seed))
    most = config.max_completion_length
    before = measure(policy, held_out[: task.validation_problems], most, 0)
    end = _MARGIN * before["seconds"] / before["problems"] * args.problems + _END
    settings: dict[str, Any] = {
        "output_dir": str(args.output_dir / "run"), "seed": args.seed, "bf16": False, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "max_steps": 100_000,
    }  # fmt: skip
    if args.settings == "recipe":
        settings |= {name: getattr(config, name) for name in SAME} | {"loss_type": "grpo"}
    problems = task.load("train", task.train_problems, args.seed)
    trainer = GRPOTrainer(policy, task.build(REWARDS, task.reward), GRPOConfig(**settings), problems)
    trainer.add_callback(Budget(args.time_budget, end))
    trainer.train()
    trainer.save_model(str(args.output_dir / "model"))
    after = measure(str(args.output_dir / "model"), held_out, most, trainer.state.global_step)
    more = {"settings": args.settings, "seed": args.seed, "time_budget": args.time_budget, **provenance()}
    summary = write_summary(args.output_dir / SUMMARY, [before, after], time.time() - START, more)
    print(f"{summary['validation_accuracy_before']:.3f} before, {summary['validation_accuracy_after']:.3f} after "
          f"{after['step']} steps, {summary['wall_clock_s']:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
