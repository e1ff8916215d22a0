"""What being one rollout old costs in accuracy: GRPO with a vLLM server, `--rollout_ahead 0` against 1.

Each run is `recipes/grpo_math.py` on mini-MATH with the embedded policy, sampling from one vLLM server over HTTP. Arms
differ in the correction for old samples, regimes in how far the policy moves within a rollout; runs of a seed have the
same policy, problems and validations. Interrupted, it resumes when it is started again: finished runs are kept.

    python -m scripts.benchmarks.staleness
    python -m scripts.benchmarks.staleness --regimes recipe --seeds 0 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from recipes import grpo_math
from trl_ext.evaluation.statistics import paired_interval
from trl_ext.io import markdown_table, read_jsonl, write_json
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.runs.layout import METRICS, finished
from trl_ext.runs.provenance import provenance

from .server_push import serving

RECIPE = Path(grpo_math.__file__).with_suffix(".yaml")
SETTINGS = {"base_policy_seed": "0", "validation_problems": "256", "validate_every": "8"}
SYNCHRONOUS = "synchronous"
DEFAULT = {"sampler_weight": "token", "sampler_rejection": "sequence_mean_k3"}
AHEAD: dict[str, dict[str, str]] = {
    "no correction": {"sampler_weight": "unweighted", "sampler_rejection": "keep_all"},
    "token, sequence_mean_k3 (default)": DEFAULT,
    "sequence, keep_all": {"sampler_weight": "sequence", "sampler_rejection": "keep_all"},
    "token, token_ratio (IcePop)": {
        "sampler_weight": "token", "sampler_weight_options": '{"clip_max": null}', "sampler_rejection": "token_ratio",
    },
    "old_log_probs sampler": {"old_log_probs": "sampler"},
}  # fmt: skip
ARMS = {SYNCHRONOUS: DEFAULT, **{name: {**correction, "rollout_ahead": "1"} for name, correction in AHEAD.items()}}
REGIMES: dict[str, dict[str, str]] = {
    # four optimizer steps on a rollout, each more than three times as large: samples are up to seven steps old
    "four_steps": {
        "train_batch_size": "32",
        "micro_train_batch_size": "32",
        "learning_rate": "1e-3",
        "max_steps": "32",
    },
    "recipe": {"max_steps": "24"},  # one step on a rollout of 128 responses
}


def train(folder: Path, url: str, settings: Mapping[str, str]) -> None:
    """One run of the recipe in this process, with a server, unless it has finished before."""
    if finished(folder):
        return
    served = {"use_vllm": "true", "vllm_mode": "server", "vllm_server_base_url": url}
    quiet = {"save_strategy": "no", "disable_tqdm": "true", "output_dir": str(folder)}
    flags = [word for name, value in {**served, **quiet, **settings}.items() for word in (f"--{name}", value)]
    grpo_math.main(*parse(GRPO_SETTINGS, None, RECIPE, flags))


def outcome(folder: Path) -> dict[str, Any] | None:
    """Accuracy by optimizer step of a finished run, and how old and how far off its samples were."""
    run = finished(folder)
    if run is None:
        return None
    steps = read_jsonl(run.path / METRICS)
    means = {
        name: mean(values)
        for name in ("sampling/staleness", "sampling/sampling_logp_difference/mean", "rollout_time", "step_time")
        if (values := [row[name] for row in steps if row.get(name) is not None])
    }
    return {"accuracy": {entry["step"]: entry["accuracy"] for entry in run.summary()["validations"]}, "mean": means}


def scores(run: Mapping[str, Any]) -> tuple[float, float]:
    """A run's mean accuracy over its validations after the first, which is before training, and the last one."""
    _, *trained = (value for _, value in sorted((int(step), value) for step, value in run["accuracy"].items()))
    return mean(trained), trained[-1]


def difference(runs: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]], which: int) -> str:
    """The mean of `scores(...)[which]` in `runs` less that in `other`, of the seeds that both have, with its interval.

    Args:
        runs, other: by seed.
    """
    apart = [scores(run)[which] - scores(other[seed])[which] for seed, run in runs.items() if seed in other]
    if len(apart) < 2:
        return ""
    low, high = paired_interval(apart)
    return f"{mean(apart):+.3f} ({low:+.3f} to {high:+.3f})"


def table(arms: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """A regime's arms in Markdown: means over seeds, and differences to the synchronous runs of the same seeds."""
    rows = []
    for name, runs in arms.items():
        area, last = zip(*map(scores, runs.values()), strict=True)
        less = ["", ""] if name == SYNCHRONOUS else [difference(runs, arms.get(SYNCHRONOUS, {}), i) for i in (0, 1)]
        rows.append([name, str(len(runs)), f"{mean(area):.3f}", less[0], f"{mean(last):.3f}", less[1]])
    return markdown_table(["rollouts ahead", "seeds", "mean", "less synchronous", "end", "less synchronous"], rows)


def main() -> None:
    """Run what has not run, print tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES), help="(default: all)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="(default: 0 1 2 3 4)")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for the server (default: 600)")
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness"), help="where the runs go")
    parser.add_argument("--json", type=Path, default=Path("docs/results/staleness.json"), help="where figures go")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the server's
    folders = {
        (regime, arm, seed): args.runs / regime / arm.translate(str.maketrans(" ", "_", ",()")) / f"seed_{seed}"
        for seed in args.seeds for regime in args.regimes for arm in args.arms
    }  # fmt: skip
    made = provenance()
    figures: dict[str, Any] = {regime: {arm: {} for arm in args.arms} for regime in args.regimes}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        model = Path(shutil.copytree(make_base_policy(seed=0), Path(scratch) / "model"))  # next to which a log goes
        servers = stack.enter_context(serving(model, args.patience))
        for (regime, arm, seed), folder in folders.items():
            settings = {**SETTINGS, **REGIMES[regime], **ARMS[arm], "seed": str(seed)}
            train(folder, servers.each[0].client.base_url, settings)
            figures[regime][arm][str(seed)] = outcome(folder)
            write_json(args.json, {"settings": SETTINGS, "regimes": REGIMES, "arms": ARMS, "runs": figures} | made)
    for regime, arms in figures.items():
        print(f"\n{regime}: {REGIMES[regime]}\n", *table(arms), sep="\n")


if __name__ == "__main__":
    main()
