"""Seconds of a rollout with its steps: `--rollout_ahead 1` against 0, a vLLM server and the trainer on a core each.

A workload is a number of epochs on each rollout: with more, training takes longer, sampling does not. Its runs
alternate between 0 and 1, so that what else the machine does falls on both. Seconds of sampling, sync and training are
those of the runs with 0. The model has random weights (6 million). Interrupted, it resumes when it is started again.

    python -m scripts.benchmarks.rollouts_ahead
    python -m scripts.benchmarks.rollouts_ahead --epochs 1 --rounds 1 --server_core 0 --trainer_core 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from trl_ext.io import markdown_table, read_jsonl, write_json
from trl_ext.plots import figure
from trl_ext.runs.layout import METRICS, finished
from trl_ext.runs.provenance import provenance

from .random_model import save_random_model
from .server_push import serving
from .staleness import train

WARM_UP = 2  # rollouts that are left out; with `rollout_ahead 1` the first of a run is sampled with current weights
REWARD = f"{Path(__file__).with_name('gpu_rank.py')}:length_matters"
SETTINGS = {
    "reward": REWARD, "rollout_batch_size": "64", "train_batch_size": "64", "group_size": "8",
    "micro_train_batch_size": "16", "sampling_max_tokens": "64", "learning_rate": "1e-5", "validation_problems": "8",
    "validate_every": "1000", "log_generations_every": "1000",
}  # fmt: skip


@dataclass(frozen=True)
class RolloutSeconds:
    """One rollout with its optimizer steps: wall-clock, and of it waiting for responses and pushing weights."""

    total: float
    sampling: float
    sync: float

    @property
    def training(self) -> float:
        """The rest."""
        return self.total - self.sampling - self.sync


def rollouts_in(rows: Sequence[Mapping[str, Any]], steps: int) -> list[RolloutSeconds]:
    """The rollouts of a run's metrics after the first, with a row for each optimizer step.

    Args:
        steps: of a rollout.
    """
    firsts, ends = rows[::steps], [row["wall_clock_s"] for row in rows[steps - 1 :: steps]]
    return [
        RolloutSeconds(end - begin, row["rollout_time"], row["sync_time"])
        for (begin, end), row in zip(pairwise(ends), firsts[1:], strict=False)
    ]


def gained(together: float, ahead: float, least: float) -> float:
    """Which share of what could be saved was saved: 1 where `ahead` is the longer side alone, 0 where it is the sum."""
    return (together - ahead) / (together - least)


def summary(synchronous: Sequence[RolloutSeconds], ahead: Sequence[RolloutSeconds]) -> dict[str, float]:
    """Medians of a workload, the quartiles of its totals, and what was gained."""
    sampling = median(rollout.sampling for rollout in synchronous)
    training = median(rollout.training for rollout in synchronous)
    totals = {"synchronous": [r.total for r in synchronous], "ahead": [r.total for r in ahead]}
    figures = {"sampling": sampling, "training": training, "sync": median(r.sync for r in synchronous)}
    for name, seconds in totals.items():
        figures[f"{name}_low"], figures[name], figures[f"{name}_high"] = quantiles(seconds, n=4)
    figures["waits"] = median(rollout.sampling for rollout in ahead)
    return {**figures, "gained": gained(figures["synchronous"], figures["ahead"], max(sampling, training))}


def table(workloads: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Workloads in Markdown."""
    heads = [
        "epochs", "sampling", "training", "sync", "`rollout_ahead 0` (quartiles)", "`rollout_ahead 1` (quartiles)",
        "max(sampling, training)", "0 / 1", "gained",
    ]  # fmt: skip
    rows = []
    for name, of in workloads.items():
        totals = [f"{of[m]:.2f} ({of[f'{m}_low']:.2f} to {of[f'{m}_high']:.2f})" for m in ("synchronous", "ahead")]
        longer, ratio = max(of["sampling"], of["training"]), of["synchronous"] / of["ahead"]
        parts = [f"{of[part]:.2f}" for part in ("sampling", "training", "sync")]
        rows.append([name, *parts, *totals, f"{longer:.2f}", f"{ratio:.2f}", f"{of['gained']:.2f}"])
    return markdown_table(heads, rows)


def draw(path: Path, workloads: Mapping[str, Mapping[str, float]]) -> None:
    """Seconds of a rollout by the ratio of sampling to training: both modes with quartiles, and the longer side."""
    ordered = sorted(workloads.values(), key=lambda of: of["sampling"] / of["training"])
    ratios = [of["sampling"] / of["training"] for of in ordered]
    with figure(path, (7, 4.5)) as (panel,):
        for mode, label in (("synchronous", "rollout_ahead 0"), ("ahead", "rollout_ahead 1")):
            middle = [of[mode] for of in ordered]
            ends = [[abs(of[f"{mode}_{end}"] - of[mode]) for of in ordered] for end in ("low", "high")]
            panel.errorbar(ratios, middle, ends, marker="o", capsize=3, label=label)
        longer = [max(of["sampling"], of["training"]) for of in ordered]
        panel.plot(ratios, longer, "--", color="gray", label="max(sampling, training)")
        panel.set(xlabel="sampling / training", ylabel="seconds of a rollout with its steps")
        panel.set_ylim(bottom=0)
        panel.legend()


def main() -> None:
    """Run what has not run, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", nargs="+", type=int, default=[1, 2, 4], help="of a workload each (default: 1 2 4)")
    parser.add_argument("--rollouts", type=int, default=12, help="of a run (default: 12)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode and workload (default: 2)")
    parser.add_argument("--server_core", type=int, default=1, help="(default: 1)")
    parser.add_argument("--trainer_core", type=int, default=0, help="(default: 0)")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for the server (default: 600)")
    parser.add_argument("--runs", type=Path, default=Path("runs/rollouts_ahead"), help="where the runs go")
    parser.add_argument("--json", type=Path, default=Path("docs/results/rollouts_ahead.json"), help="where figures go")
    parser.add_argument("--plot", type=Path, help="write the plot to this file")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the server's
    seconds: dict[int, dict[int, list[RolloutSeconds]]] = {epochs: {0: [], 1: []} for epochs in args.epochs}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        model = save_random_model(Path(scratch) / "model", "6m")
        os.sched_setaffinity(0, {args.server_core})  # which the server inherits
        servers = stack.enter_context(serving(model, args.patience))
        os.sched_setaffinity(0, {args.trainer_core})
        for turn in range(args.rounds):
            for epochs in args.epochs:
                for ahead in (0, 1):
                    folder = args.runs / f"epochs_{epochs}" / f"ahead_{ahead}_round_{turn}"
                    run: dict[str, Any] = {
                        "epochs_per_rollout_batch": epochs,
                        "rollout_ahead": ahead,
                        "model_name_or_path": model,
                    }
                    run["max_steps"] = args.rollouts * epochs
                    settings = {**SETTINGS, **{name: str(value) for name, value in run.items()}}
                    if not finished(folder):
                        train(folder, servers.each[0].client.base_url, settings)
                    done = finished(folder)
                    assert done is not None
                    rows = [row for row in read_jsonl(done.path / METRICS) if "loss" in row]
                    seconds[epochs][ahead] += rollouts_in(rows, epochs)[WARM_UP - 1 :]
                    loads.append(os.getloadavg()[0])
    workloads = {str(epochs): summary(of[0], of[1]) for epochs, of in seconds.items()}
    print(*table(workloads), sep="\n")
    each = {
        epochs: {ahead: [asdict(one) for one in rollouts] for ahead, rollouts in of.items()}
        for epochs, of in seconds.items()
    }
    write_json(args.json, {"workloads": workloads, "rollouts": each, "load": loads, **provenance()})
    if args.plot:
        draw(args.plot, workloads)


if __name__ == "__main__":
    main()
