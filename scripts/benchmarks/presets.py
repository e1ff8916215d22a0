"""Every preset, and every member of an axis that is in none, trains for a few steps as a user would start it: with
`accelerate launch` and colocated vLLM, on one rank and on two, on the embedded task.

A row says whether the run ended well with finite losses, whether the weights moved, and what it took. The exit status
is 0 only if all of them did.

    python -m scripts.benchmarks.presets                      all of them: about an hour on two CPU cores
    python -m scripts.benchmarks.presets --only gspo --ranks 2
    python -m scripts.benchmarks.presets --json docs/results/presets.json
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trl_ext import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, PRESETS
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS
from trl_ext.algorithms.selection import SELECTIONS
from trl_ext.runs.provenance import provenance
from trl_ext.training.preemption import patient_environment

ROOT = Path(__file__).parents[2]
CONFIGS = {1: "one_cpu", 2: "two_cpu_ranks_ddp"}
AXES = {
    "advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "aggregation": AGGREGATIONS, "kl_estimator": KL_ESTIMATORS,
    "sampler_weight": SAMPLER_WEIGHTS, "sampler_rejection": SAMPLER_REJECTIONS, "rollout_selection": SELECTIONS,
}  # fmt: skip
# Two optimizer steps per rollout, so that ratios differ from 1.
SETTINGS = {
    "use_vllm": "true", "vllm_mode": "colocate", "vllm_max_model_length": 256, "rollout_batch_size": 32,
    "train_batch_size": 16, "micro_train_batch_size": 8, "sampling_max_tokens": 64, "max_steps": 4,
    "validation_problems": 8, "validate_every": 4, "save_strategy": "no", "report_to": "none",
}  # fmt: skip


def cases() -> Iterator[dict[str, str]]:
    """Flags of each run: the presets, then members that no preset has, next to the default one."""
    used = {(axis, getattr(preset, axis, None)) for preset in PRESETS.values() for axis in AXES}
    yield from ({"preset": name} for name in PRESETS)
    for axis, registry in AXES.items():
        for name in registry:
            if (axis, name) not in used:
                yield {axis: name, **({"beta": "0.05"} if axis == "kl_estimator" else {})}


def trained(flags: dict[str, str], ranks: int) -> dict[str, Any]:
    """What one run came to."""
    with tempfile.TemporaryDirectory() as scratch:
        given = SETTINGS | flags | {"output_dir": str(Path(scratch) / "run")}
        config = ROOT / "accelerate_configs" / f"{CONFIGS[ranks]}.yaml"
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        recipe = [str(ROOT / "recipes" / "grpo_math.py"), "--config", str(ROOT / "recipes" / "grpo_math.yaml")]
        command = [*launch, *recipe, *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
        began = time.perf_counter()
        done = subprocess.run(
            command, env=patient_environment(), capture_output=True, text=True, check=False, cwd=scratch
        )
        seconds = round(time.perf_counter() - began, 1)
        metrics = Path(scratch) / "run" / "metrics.jsonl"
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    steps = [row for row in map(json.loads, lines) if "loss" in row]
    error = (done.stderr.strip().splitlines() or ["no output"])[-1][:300] if done.returncode else None
    return {
        **flags, "ranks": ranks, "status": done.returncode, "error": error, "steps": len(steps),
        "finite": all(math.isfinite(row["loss"]) for row in steps), "seconds": seconds,
        "grad_norm": max((row["grad_norm"] for row in steps), default=0.0),
        "sampling": {name: value for row in steps[:1] for name, value in row.items() if name.startswith("sampling/")},
    }  # fmt: skip


def is_well(run: dict[str, Any]) -> bool:
    """Whether it took all its steps, with finite losses and a gradient."""
    return run["status"] == 0 and run["steps"] == SETTINGS["max_steps"] and run["finite"] and run["grad_norm"] > 0


def main() -> None:
    """Run all, print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose preset or member contains this")
    parser.add_argument("--ranks", type=int, nargs="+", choices=CONFIGS, default=list(CONFIGS), help="default: 1 2")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--resume", action="store_true", help="run only what that file lacks")
    args = parser.parse_args()
    chosen = [(flags, ranks) for ranks in args.ranks for flags in cases() if args.only in next(iter(flags.values()))]
    if not chosen:
        parser.error(f"no preset or member contains {args.only!r}")
    if args.resume and not (args.json and args.json.is_file()):
        parser.error("--resume needs the file of the runs that are there: --json FILE")
    runs = json.loads(args.json.read_text(encoding="utf-8"))["runs"] if args.resume else []
    chosen = [
        (flags, ranks)
        for flags, ranks in chosen
        if not any({**flags, "ranks": ranks}.items() <= run.items() for run in runs)
    ]
    for flags, ranks in tqdm(chosen, unit="run"):
        run = trained(flags, ranks)
        runs.append(run)
        name = " ".join(f"{key} {value}" for key, value in flags.items())
        result = "well" if is_well(run) else f"NOT WELL: {run['error'] or run}"
        tqdm.write(f"{name:<45} {ranks} rank{'s' * (ranks > 1):<2} {run['seconds']:6.1f} s  {result}", file=sys.stdout)
        if args.json:
            result_so_far = {"settings": SETTINGS, "runs": runs, **provenance()}
            args.json.write_text(json.dumps(result_so_far, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(not is_well(run) for run in runs))


if __name__ == "__main__":
    main()
