"""Seconds of rollout, sync and optimizer step with a recipe's settings: TRL's own `GRPOTrainer` next to ours.

    python -m scripts.benchmarks.stock_step --json stock_step.json -- --config recipes/grpo_gsm8k_laptop.yaml
    python -m scripts.benchmarks.stock_step --sides "TRL by vLLM" -- --config recipes/grpo_gsm8k_laptop.yaml

What follows `--` are settings of recipes/grpo_math.py. Model, adapter, problems, prompts, reward and seed are the same,
and so are the completions of both that sample by HF generate. Each side is a process of its own with one optimizer
step, the first one; starting is not counted. One runs after the other, in alternation. CPU seconds tell what a side
computes where other programs have the core too; wall-clock seconds are next to them.
"""

from __future__ import annotations

from trl_ext.compat.startup import use_all_cores

# isort: split
import argparse
import functools
import json
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from trl_ext import ExtGRPOTrainer
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.model_settings import loaded_as
from trl_ext.recipes.preflight import Prepared, prepare
from trl_ext.runs.provenance import provenance

from .stock_trl import SAME, YAML

STOCK, OURS, BARE, STOCK_VLLM = "TRL", "ours by HF generate", "ours", "TRL by vLLM"
ENGINES = {STOCK: "false", OURS: "false", BARE: "auto", STOCK_VLLM: "true"}  # `use_vllm` by side
ALSO_SAME = ("bf16", "model_init_kwargs", "lr_scheduler_kwargs", "dataloader_pin_memory", "seed", "use_cpu", "top_p")
PARTS = ("sampling", "sync", "rewards", "step")


class Laps(TrainerCallback):
    """CPU and wall-clock seconds of a trainer's parts, each without those inside of it."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.seconds: dict[str, list[float]] = {part: [0.0, 0.0] for part in PARTS}
        self.tokens = 0
        self._inside = [0.0, 0.0]
        self._began: tuple[float, float] = (0.0, 0.0)
        self._time(trainer, "_generate_and_score_completions", "rewards")
        self._time(trainer, "_generate_single_turn", "sampling")
        if trainer.use_vllm:
            self._time(trainer.vllm_generation, "sync_weights", "sync")
        trainer.add_callback(self)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self._began = _clocks()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """What the rollout did not take is the optimizer step's."""
        self._add("step", self._began, [0.0, 0.0])

    def _time(self, owner: Any, name: str, part: str) -> None:
        called: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(called)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside, began = self._inside, [0.0, 0.0], _clocks()
            found = called(*args, **kwargs)
            self._add(part, began, outer)
            if part == "sampling":
                self.tokens += sum(map(len, found[0]))
            return found

        setattr(owner, name, timed)

    def _add(self, part: str, began: tuple[float, float], outer: list[float]) -> None:
        for clock, (start, end) in enumerate(zip(began, _clocks(), strict=True)):
            self.seconds[part][clock] += end - start - self._inside[clock]
            outer[clock] += end - start
        self._inside = outer


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def stock_trainer(made: Prepared, folder: Path, uses_vllm: bool) -> GRPOTrainer:
    """TRL's own, with the loss that `dr_grpo` names and what else of the settings TRL has."""
    config = made.config
    if config.preset != "dr_grpo":
        raise SystemExit(f"preset {config.preset!r}: only dr_grpo has been looked up in TRL's settings here")
    settings = {name: getattr(config, name) for name in (*SAME, *ALSO_SAME)}
    settings |= {
        "output_dir": str(folder), "report_to": "none", "save_strategy": "no", "max_steps": 1, "disable_tqdm": True,
        "loss_type": "dr_grpo", "scale_rewards": "none", "logging_steps": 1,
    }  # fmt: skip
    if uses_vllm:
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": config.engine_context}
    rewards = made.task.reward_functions()
    return GRPOTrainer(
        reward_funcs=rewards, args=GRPOConfig(**settings), train_dataset=made.data.train, **loaded_as(made.model)
    )


def one_step(side: str, flags: list[str], results: Connection) -> None:
    """Train for a step and send what it took, or what it failed with."""
    use_all_cores()
    with tempfile.TemporaryDirectory() as folder:
        more = ["--max_steps", "1", "--save_strategy", "no", "--disable_tqdm", "true", "--output_dir", folder]
        task, model, config = parse(GRPO_SETTINGS, None, YAML, [*flags, *more, "--use_vllm", ENGINES[side]])
        made = prepare(task, model, config, task.data)
        model.model_name_or_path = made.policy
        try:
            if side in (OURS, BARE):
                rewards, data = task.reward_functions(), made.data.train
                trainer = ExtGRPOTrainer(reward_funcs=rewards, args=config, train_dataset=data, **loaded_as(model))
            else:
                trainer = stock_trainer(made, Path(folder), side == STOCK_VLLM)
            laps = Laps(trainer)
            set_seed(config.seed)
            trainer.train()
        except Exception as error:
            results.send({"failed": f"{type(error).__name__}: {error}"[:300]})
            return
        reward = trainer.state.log_history[0].get("reward")
        cpu, wall = ({part: round(laps.seconds[part][clock], 2) for part in PARTS} for clock in (0, 1))
        chosen = {"use_vllm": config.use_vllm, "bf16": config.bf16}
        results.send({"cpu_s": cpu, "wall_s": wall, "tokens": laps.tokens, "reward": reward, **chosen})


def main() -> None:
    """Measure, print, and write the JSON asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides = ", ".join(ENGINES)
    parser.add_argument("--sides", nargs="+", choices=ENGINES, default=[STOCK, OURS, BARE], help=f"some of {sides}")
    parser.add_argument("--repeats", type=int, default=1, help="processes of each side (default: 1)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, after each step")
    parser.add_argument("settings", nargs="*", help="of recipes/grpo_math.py, after --")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(args.repeats):
        for side in args.sides:
            mine, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=one_step, args=(side, args.settings, theirs))
            process.start()
            theirs.close()  # else a process that is lost is waited for
            found[side].append(mine.recv())
            process.join()
            print(f"{side}: {found[side][-1]}", flush=True)
            if args.json:
                args.json.write_text(json.dumps({"found": found, **provenance()}, indent=2) + "\n", encoding="utf-8")
    show(found)


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    """Print each side's median CPU seconds by part."""
    print(f"\n{'CPU seconds':<22}{'tokens':>8}" + "".join(f"{part:>10}" for part in PARTS))
    for side, steps in found.items():
        done = [step for step in steps if "failed" not in step]
        if done:
            seconds = "".join(f"{median(step['cpu_s'][part] for step in done):>10.1f}" for part in PARTS)
            print(f"{side:<22}{median(step['tokens'] for step in done):>8.0f}{seconds}")
        else:
            print(f"{side:<22} failed: {steps[0]['failed']}")


if __name__ == "__main__":
    main()
