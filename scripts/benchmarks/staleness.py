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
from trl_ext.plots import figure
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.runs.layout import METRICS, RunFolder, finished
from trl_ext.runs.provenance import provenance

from .server_push import serving

RECIPE = Path(grpo_math.__file__).with_suffix(".yaml")
SETTINGS = {"base_policy_seed": "0", "validation_problems": "256", "validate_every": "8"}
MEANS = (
    "sampling/staleness", "sampling/sampling_logp_difference/mean", "sampling/masked_frac",
    "sampling/effective_sample_size", "rollout_time",
)  # fmt: skip
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
REGIMES: dict[str, dict[str, str]] = {  # the recipe's, unless they say otherwise
    "recipe": {"max_steps": "24"},
    "four_steps": {
        "train_batch_size": "32",
        "micro_train_batch_size": "32",
        "learning_rate": "1e-3",
        "max_steps": "32",
    },
}


def train(folder: Path, url: str, settings: Mapping[str, str]) -> None:
    """One run of the recipe in this process, with a server."""
    served = {"use_vllm": "true", "vllm_mode": "server", "vllm_server_base_url": url}
    quiet = {"save_strategy": "no", "disable_tqdm": "true", "output_dir": str(folder)}
    flags = [word for name, value in {**served, **quiet, **settings}.items() for word in (f"--{name}", value)]
    grpo_math.main(*parse(GRPO_SETTINGS, None, RECIPE, flags))


def outcome(run: RunFolder) -> dict[str, Any]:
    """A run's accuracy by optimizer step, and means of what says how old and how far off its samples were."""
    steps = read_jsonl(run.path / METRICS)
    found = {name: [row[name] for row in steps if row.get(name) is not None] for name in MEANS}
    accuracy = {str(entry["step"]): entry["accuracy"] for entry in run.summary()["validations"]}
    return {"accuracy": accuracy, **{name: round(mean(values), 6) for name, values in found.items() if values}}


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


def means(runs: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
    """The mean accuracy of several seeds by optimizer step."""
    steps = sorted({int(step) for run in runs.values() for step in run["accuracy"]})
    return {step: mean(run["accuracy"][str(step)] for run in runs.values()) for step in steps}


def table(arms: Mapping[str, Mapping[str, Mapping[str, Any]]], rows_per_step: int) -> list[str]:
    """A regime's arms in Markdown: means over seeds by responses, and differences to the synchronous runs.

    Args:
        rows_per_step: responses of an optimizer step.
    """
    rows: list[list[str]] = []
    heads: list[str] = []
    for name, runs in arms.items():
        if not runs:
            continue
        curve = means(runs)
        heads = heads or [str(step * rows_per_step) for step in curve]
        apart = [difference(runs, arms[SYNCHRONOUS], i) for i in (0, 1)] if name != SYNCHRONOUS else ["", ""]
        rows.append([name, str(len(runs)), *(f"{value:.3f}" for value in curve.values()), *apart])
    return markdown_table(["", "seeds", *heads, "mean less synchronous", "end less synchronous"], rows)


def draw(path: Path, figures: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> None:
    """A panel for each regime: the mean accuracy of each arm against responses."""
    with figure(path, (5.5 * len(figures), 4.2), (1, len(figures)), sharey=True) as panels:
        for panel, (regime, arms) in zip(panels, figures.items(), strict=True):
            for name, runs in arms.items():
                if runs:
                    curve = means(runs)
                    style = {"color": "black", "linewidth": 2.5} if name == SYNCHRONOUS else {"linewidth": 1.3}
                    at = [step * rows_in(regime) for step in curve]
                    panel.plot(at, list(curve.values()), marker="o", markersize=3, label=name, **style)
            panel.set(title=regime, xlabel="responses trained on")
        panels[0].set(ylabel="validation accuracy, mean over seeds")
        panels[-1].legend(loc="lower right", fontsize=8)


def rows_in(regime: str) -> int:
    """Responses of an optimizer step."""
    return int(REGIMES[regime].get("train_batch_size", 128))


def serve(stack: contextlib.ExitStack, patience: float) -> str:
    """The address of a server of the base policy, which runs until the stack is closed."""
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model = shutil.copytree(make_base_policy(seed=0), scratch / "model")  # a log of the server goes there, too
    return str(stack.enter_context(serving(model, patience)).each[0].client.base_url)


def main() -> None:
    """Run what has not run, print tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES), help="(default: all)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="(default: 0 1 2 3 4)")
    parser.add_argument("--only_finished", action="store_true", help="start no runs; figures of those that there are")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for the server (default: 600)")
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness"), help="where the runs go")
    parser.add_argument("--json", type=Path, default=Path("docs/results/staleness.json"), help="where figures go")
    parser.add_argument("--plot", type=Path, help="write the plot to this file")
    args = parser.parse_args()
    folders = {
        (regime, arm, seed): args.runs / regime / arm.translate(str.maketrans(" ", "_", ",()")) / f"seed_{seed}"
        for seed in args.seeds for regime in args.regimes for arm in args.arms
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        url = None
        for (regime, arm, seed), folder in folders.items():
            if not (args.only_finished or finished(folder)):
                url = url or serve(stack, args.patience)
                train(folder, url, {**SETTINGS, **REGIMES[regime], **ARMS[arm], "seed": str(seed)})
    figures: dict[str, Any] = {regime: {arm: {} for arm in args.arms} for regime in args.regimes}
    for (regime, arm, seed), folder in folders.items():
        if (run := finished(folder)) is not None:
            figures[regime][arm][str(seed)] = outcome(run)
    for regime, arms in figures.items():
        print(f"\n{regime}: {REGIMES[regime]}\n", *table(arms, rows_in(regime)), sep="\n")
    write_json(args.json, {"settings": SETTINGS, "regimes": REGIMES, "arms": ARMS, "runs": figures, **provenance()})
    if args.plot:
        draw(args.plot, figures)


if __name__ == "__main__":
    main()
