"""Every preset, and every member of an axis that is in none, trains for a few steps: `recipes/grpo_math.py` under
`accelerate launch` with colocated vLLM, on one rank and on two, on the embedded task.

A launch makes several runs, one after the other, each with an engine of its own: starting takes most of the time. A row
says whether the run ended well with finite losses, whether the weights moved, and what it took. The exit status is 0
only if all of them did.

    python -m scripts.benchmarks.presets                      all of them: half an hour on two CPU cores
    python -m scripts.benchmarks.presets --only gspo --ranks 2 --per_launch 1
    python -m scripts.benchmarks.presets --json docs/results/presets.json --resume --minutes 8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trl_ext import ADVANTAGES, AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES, PRESETS
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS
from trl_ext.algorithms.selection import SELECTIONS
from trl_ext.hosts.shutdown_timeout import patient_environment
from trl_ext.runs.provenance import provenance

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
    yield from ({"preset": name} for name, preset in PRESETS.items() if not preset.needs_teacher)
    for axis, registry in AXES.items():
        for name in registry:
            if (axis, name) not in used:
                yield {axis: name, **({"beta": "0.05"} if axis == "kl_estimator" else {})}


def launched(chosen: Sequence[dict[str, str]], ranks: int) -> list[dict[str, Any]]:
    """What the runs of one launch came to, in order; up to the one in which it ended, if it did so early."""
    with tempfile.TemporaryDirectory() as scratch:
        config = ROOT / "accelerate_configs" / f"{CONFIGS[ranks]}.yaml"
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        command = [*launch, str(Path(__file__)), "--in_launch", json.dumps(chosen)]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**patient_environment(), "PYTHONPATH": paths}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=scratch)
        ended = list(map(json.loads, _lines(Path(scratch) / "ended.jsonl")))
        if len(ended) < len(chosen):
            error = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
            ended.append({"status": done.returncode or 1, "seconds": 0.0, "error": error})
        rows = enumerate(zip(chosen, ended, strict=False))
        commit = {"commit": provenance()["commit"]}
        return [
            {**flags, "ranks": ranks, **end, **_logged(Path(scratch) / str(n)), **commit} for n, (flags, end) in rows
        ]


def run_in_launch(chosen: Sequence[dict[str, str]]) -> None:
    """The recipe once with each of these flags, in a folder by number; how it ended goes into a line of a file."""
    recipe = ROOT / "recipes" / "grpo_math.py"
    for number, flags in enumerate(chosen):
        began, status, error = time.perf_counter(), 0, None
        given = SETTINGS | flags | {"config": str(recipe.with_suffix(".yaml")), "output_dir": str(number)}
        sys.argv = [str(recipe), *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
        try:
            runpy.run_path(str(recipe), run_name="__main__")
        except SystemExit as ending:
            status = int(ending.code or 0)
        except Exception as raised:
            status, error = 1, repr(raised)[:300]
        row = {"status": status, "seconds": round(time.perf_counter() - began, 1), "error": error}
        if os.environ.get("RANK", "0") == "0":
            with Path("ended.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _logged(folder: Path) -> dict[str, Any]:
    steps = [row for row in map(json.loads, _lines(folder / "metrics.jsonl")) if "loss" in row]
    return {
        "steps": len(steps), "finite": all(math.isfinite(row["loss"]) for row in steps),
        "grad_norm": max((row["grad_norm"] for row in steps), default=0.0),
        "sampling": {name: value for row in steps[:1] for name, value in row.items() if name.startswith("sampling/")},
    }  # fmt: skip


def _lines(file: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8").splitlines()
    return []


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
    parser.add_argument("--per_launch", type=int, default=5, help="default: 5, of whose engines each keeps 1.2 GB")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no launch after these")
    parser.add_argument("--in_launch", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_launch:
        return run_in_launch(args.in_launch)
    if args.resume and not (args.json and args.json.is_file()):
        parser.error("--resume needs the file of the runs that are there: --json FILE")
    named = [flags for flags in cases() if args.only in next(iter(flags.values()))]
    if not named:
        parser.error(f"no preset or member contains {args.only!r}")
    runs = json.loads(args.json.read_text(encoding="utf-8"))["runs"] if args.resume else []
    left = [
        (flags, ranks)
        for ranks in args.ranks
        for flags in named
        if not any({**flags, "ranks": ranks}.items() <= run.items() for run in runs)
    ]
    began = time.monotonic()
    while left and time.monotonic() - began < 60 * args.minutes:
        ranks = left[0][1]
        completed = launched([flags for flags, n in left if n == ranks][: args.per_launch], ranks)
        runs, left = runs + completed, left[len(completed) :]
        for run in completed:
            name = " ".join(f"{key} {run[key]}" for key in AXES | {"preset": None} if key in run)
            result = "well" if is_well(run) else f"NOT WELL: {run['error'] or run}"
            print(f"{name:<45} {ranks} rank{'s' * (ranks > 1):<2} {run['seconds']:6.1f} s  {result}", flush=True)
        if args.json:
            so_far = {"settings": SETTINGS, "runs": runs, **provenance()}
            args.json.write_text(json.dumps(so_far, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(left) or any(not is_well(run) for run in runs))


if __name__ == "__main__":
    main()
