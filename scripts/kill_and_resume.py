"""Kill a training run with SIGKILL again and again, resume it each time, and compare it with an uninterrupted run.

    python scripts/kill_and_resume.py                                    every case, 10 kills each
    python scripts/kill_and_resume.py --cases off_policy --kills 100
    python scripts/kill_and_resume.py --cases zero2 --json kills.json

The run is recipes/grpo_math.py on a policy of a few thousand parameters. It is killed after a random number of steps
since it was last resumed and a random part of a step's time, so in the middle of rollouts, optimizer steps and
checkpoints, or while it starts; after its end, or without a checkpoint to resume, another one begins. Metrics,
generations, validations and weights must then be bit-identical to those of the uninterrupted run; seconds are not
compared. The exit status is 0 only if they are.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "grpo_math.py"
STEPS = 24
REWARD = """
def vowels(prompts, completions, **kwargs):
    return [sum(letter in "aeiou0123" for letter in text) / 4 for text in completions]
"""
SETTINGS: dict[str, Any] = {
    "preset": "grpo_clip", "reward": "vowels.py:vowels", "learning_rate": 0.01, "max_steps": STEPS,
    "rollout_batch_size": 16, "group_size": 4, "train_batch_size": 16, "micro_train_batch_size": 4,
    "sampling_max_tokens": 8, "train_problems": 12, "validation_problems": 16, "validate_every": 4,
    "log_generations_every": 3, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2,
    "gradient_checkpointing": False, "dataloader_pin_memory": False, "report_to": "none",
}  # fmt: skip
OFF_POLICY = {"rollout_batch_size": 32, "epochs_per_rollout_batch": 2}  # four optimizer steps per rollout
VLLM = {"use_vllm": True, "vllm_max_model_length": 128, "vllm_enforce_eager": True}
CASES: dict[str, tuple[dict[str, Any], str | None]] = {  # further settings, and the launcher's configuration
    "on_policy": ({}, None),
    "off_policy": (OFF_POLICY, None),
    "synced_reference": (OFF_POLICY | {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}, None),
    "vllm": (VLLM, "one_cpu"),
    "two_ranks": (OFF_POLICY, "two_cpu_ranks_ddp"),
    "zero2": (OFF_POLICY, "two_cpu_ranks_zero2"),
}
SECONDS = {"wall_clock_s", "seconds", "validation/seconds", "step_time", "rollout_time", "sync_time", "train_runtime",
           "train_samples_per_second", "train_steps_per_second"}  # fmt: skip
WAIT = 200  # seconds for a step


class Attempt:
    """One process, or one per rank, that trains until it ends or is killed."""

    def __init__(self, folder: Path, name: str, launcher: str | None) -> None:
        self.log = folder / f"{name}.log"
        arguments = ["--config", str(folder / "run.yaml"), "--output_dir", str(folder / name), "--resume", "auto"]
        self._said_before = self._said()
        self._process: Any
        if launcher is None:  # forked from a process that has imported everything, which saves most of the start
            self._process = multiprocessing.get_context("forkserver").Process(
                target=_train, args=(arguments, self.log, folder), daemon=True
            )
            self._process.start()
            return
        by = ["accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs" / f"{launcher}.yaml")]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *by, str(RECIPE), *arguments],
                cwd=folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _said(self) -> int:
        """Times that the run has said where it starts from."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text.count("resumed from") + text.count("nothing to resume")

    def has_started(self) -> bool:
        """Whether it has found its checkpoint."""
        return self._said() > self._said_before

    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        is_forked = isinstance(self._process, multiprocessing.process.BaseProcess)
        exit_code: int | None = self._process.exitcode if is_forked else self._process.poll()
        return exit_code

    def kill(self) -> None:
        """Kill its process group with SIGKILL."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join() if hasattr(self._process, "join") else self._process.wait()


def _train(arguments: list[str], log: Path, folder: Path) -> None:
    os.setsid()  # so that it can be killed with what it starts
    os.chdir(folder)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(RECIPE), *arguments]
    runpy.run_path(str(RECIPE), run_name="__main__")


def wait_until(condition: Callable[[], bool], attempt: Attempt, seconds: float = WAIT) -> bool:
    """Whether the condition came true while the attempt was running.

    Raises:
        TimeoutError: neither happened; with the end of what the run has printed.
    """
    end = time.monotonic() + seconds
    while not condition():
        if attempt.status() is not None:
            return False
        if time.monotonic() > end:
            attempt.kill()
            raise TimeoutError(attempt.log.read_text(errors="replace")[-3000:])
        time.sleep(0.01)
    return True


def last_step(run: Path) -> int:
    """Step of the last complete line of the metrics; -1 without any."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else -1


def seconds_per_step(run: Path) -> float:
    """A run's seconds from its first line of metrics to its last, for each step, with rollouts and checkpoints."""
    first, *_, last = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return float((last["wall_clock_s"] - first["wall_clock_s"]) / (last["step"] - first["step"]))


def newest_step(run: Path) -> int:
    """Step of the newest checkpoint; 0 without any."""
    return max((int(path.name.partition("-")[2]) for path in run.glob("checkpoint-*[0-9]")), default=0)


def kill_once(run: Path, launcher: str | None, step_seconds: float, rng: random.Random) -> str | None:
    """Resume the run, kill it at a random moment, and return what it was doing; None if it had reached its end.

    Of ten kills one comes while the run starts, three in the middle of a checkpoint and six outside of one, however
    long checkpoints take here.
    """
    is_saving = (run / "_saving").exists
    attempt = Attempt(run.parent, run.name, launcher)
    when = rng.choices(["starting", "saving", "training"], [1, 3, 6])[0]
    if when == "starting":
        time.sleep(rng.random() * 2)
    elif wait_until(attempt.has_started, attempt):
        target = newest_step(run) + rng.choice([0, 1, 2, 3, 4])
        wait_until(lambda: last_step(run) >= min(target, STEPS), attempt)
        time.sleep(rng.random() * step_seconds)
        wait_until(lambda: is_saving() == (when == "saving"), attempt)
        if when == "saving":
            time.sleep(rng.random() * 0.02)
    if attempt.status() is not None:
        if attempt.status():
            raise RuntimeError(attempt.log.read_text(errors="replace")[-3000:])
        return None
    attempt.kill()
    if not attempt.has_started():
        return "starting"
    return "saving" if is_saving() else "training"


def outcome(run: Path) -> dict[str, list[str]]:
    """What must be the same: logs and validations without seconds, and the hash of the weights."""

    def rows(name: str) -> list[dict[str, Any]]:
        lines = (run / name).read_text(encoding="utf-8").split("\n")[:-1]
        return [{k: v for k, v in json.loads(line).items() if k not in SECONDS} for line in lines]

    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    validations = [{k: v for k, v in entry.items() if k not in SECONDS} for entry in summary["validations"]]
    return {
        "metrics": [json.dumps(row) for row in rows("metrics.jsonl")],  # as text, in which NaN equals NaN
        "generations": [json.dumps(row) for row in rows("generations.jsonl")],
        "validations": [json.dumps(entry) for entry in validations],
        "weights": [hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()],
    }


def try_case(name: str, kills: int, seed: int, folder: Path, policy: str) -> dict[str, Any]:
    """The figures of one case."""
    settings, launcher = CASES[name]
    folder.mkdir()
    (folder / "vowels.py").write_text(REWARD, encoding="utf-8")
    run_settings = {**SETTINGS, **settings, "model_name_or_path": policy, "seed": seed}
    (folder / "run.yaml").write_text(yaml.safe_dump(run_settings), encoding="utf-8")
    rng = random.Random(seed)

    def to_its_end(run: str) -> None:
        attempt = Attempt(folder, run, launcher)
        wait_until(lambda: False, attempt, 2 * WAIT)
        if attempt.status():
            raise RuntimeError(attempt.log.read_text(errors="replace")[-3000:])

    to_its_end("uninterrupted")
    uninterrupted = outcome(folder / "uninterrupted")
    step_seconds = seconds_per_step(folder / "uninterrupted")
    same = dict.fromkeys(uninterrupted, True)

    def compare(run: str) -> None:
        to_its_end(run)
        killed = outcome(folder / run)
        for key, lines in uninterrupted.items():
            pairs = itertools.zip_longest(lines, killed[key])
            first = next(((a, b) for a, b in pairs if a != b), None)
            if first:
                same[key] = False
                print(f"{name}: first difference in the {key} of {run}:\n  {first[0]}\n  {first[1]}")

    counts: Counter[str] = Counter()
    names = (f"killed_{n}" for n in itertools.count(1))
    runs = [next(names)]
    with tqdm(total=kills, desc=name, unit="kill", file=sys.stderr) as bar:
        while counts.total() < kills:
            moment = kill_once(folder / runs[-1], launcher, step_seconds, rng)
            if moment is not None:
                counts[moment] += 1
                bar.update()
            if moment is None:
                compare(runs[-1])
            if moment is None or not newest_step(folder / runs[-1]):  # without a checkpoint there is nothing to resume
                runs.append(next(names))
    compare(runs[-1])
    return {"case": name, "kills": dict(counts), "runs": len(runs), "same": same}


def tiny_policy(folder: Path) -> str:
    """A policy that trains in milliseconds."""
    from trl_ext.mini.policy import make_base_policy
    from trl_ext.mini.task import BasePolicyConfig

    shape = BasePolicyConfig(hidden=32, layers=1, heads=1, intermediate=32, steps=3, batch=4)
    return str(make_base_policy(0, folder, shape, progress=False))


def main() -> int:
    """Try the cases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="(default: all)")
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="of each case (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the run and of the moments (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    args = parser.parse_args()
    preloaded = ["trl_ext.grpo.trainer", "trl_ext.recipes.run", "trl_ext.mini.policy", "matplotlib.pyplot"]
    multiprocessing.set_forkserver_preload(preloaded)
    results = []
    with tempfile.TemporaryDirectory(prefix="kill_and_resume_") as scratch:
        context = multiprocessing.get_context("forkserver")
        with context.Pool(1) as pool:  # torch computes there, and this process stays free of its threads
            policy = pool.apply(tiny_policy, (Path(scratch) / "policy",))
        for name in args.cases:
            figures = try_case(name, args.kills, args.seed, Path(scratch) / name, policy)
            results.append(figures)
            kills = ", ".join(f"{n} {moment}" for moment, n in figures["kills"].items())
            differing = [key for key, same in figures["same"].items() if not same]
            kills += f", in {figures['runs']} runs" if figures["runs"] > 1 else ""
            print(f"{name:<12} {kills}: {'identical' if not differing else 'DIFFERENT ' + ', '.join(differing)}")
    if args.json:
        from trl_ext.runs.provenance import provenance

        args.json.write_text(json.dumps({"results": results, **provenance()}, indent=2) + "\n", encoding="utf-8")
    return int(not all(all(figures["same"].values()) for figures in results))


if __name__ == "__main__":
    sys.exit(main())
