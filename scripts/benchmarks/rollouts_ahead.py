"""Seconds of a rollout with its steps: `--rollout_ahead 1` against 0, a vLLM server and the trainer on a core each.

A workload is a number of epochs on each rollout: with more, training takes longer for the same sampling. Its runs
alternate between 0 and 1, so that what else the machine does falls on both. Seconds of sampling, sync and training are
those of the runs with 0. The model has random weights. Interrupted, it resumes when it is started again.

    python -m scripts.benchmarks.rollouts_ahead --plot docs/results/rollouts_ahead.png
    python -m scripts.benchmarks.rollouts_ahead --epochs 1 --rounds 1 --server_core 0 --trainer_core 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from trl_ext.io import markdown_table, read_jsonl, write_json
from trl_ext.plots import figure
from trl_ext.runs.layout import METRICS, finished
from trl_ext.runs.provenance import provenance

from .random_model import SHAPES, save_random_model
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
class Rollout:
    """Seconds of a rollout with its steps: wall-clock, and of it until there are rewards, and for pushing weights."""

    total: float
    sampling: float
    sync: float

    @property
    def training(self) -> float:
        """The rest."""
        return self.total - self.sampling - self.sync


def rollouts_in(rows: Sequence[Mapping[str, Any]], steps: int) -> list[Rollout]:
    """The rollouts of a run after the first, by its metrics: a row for each step, with the time at which it ended.

    Args:
        steps: of a rollout; the metrics of its first have the seconds of sampling and sync.
    """
    return [
        Rollout(last["wall_clock_s"] - before["wall_clock_s"], first["rollout_time"], first["sync_time"])
        for before, first, last in zip(
            rows[steps - 1 :: steps], rows[steps::steps], rows[2 * steps - 1 :: steps], strict=False
        )
    ]


def gained(together: float, ahead: float, longer: float) -> float:
    """Which share of what could be saved was saved: 1 where only the longer side is left, 0 where it is the sum."""
    return (together - ahead) / (together - longer)


def summary(synchronous: Sequence[Rollout], ahead: Sequence[Rollout]) -> dict[str, float]:
    """Medians of a workload, quartiles of its totals, and what was gained."""
    parts = {name: median(getattr(one, name) for one in synchronous) for name in ("sampling", "training", "sync")}
    figures = parts
    for name, rollouts in (("synchronous", synchronous), ("ahead", ahead)):
        low, middle, high = quantiles((one.total for one in rollouts), n=4)
        figures |= {f"{name}_low": low, name: middle, f"{name}_high": high}
    longer = max(parts["sampling"], parts["training"])
    return {**figures, "gained": gained(figures["synchronous"], figures["ahead"], longer)}


def table(workloads: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Workloads in Markdown."""
    heads = ["epochs", "sampling", "training", "sync", "ahead 0", "ahead 1", "longer side", "0 / 1", "gained"]
    rows = []
    for name, of in workloads.items():
        parts = [f"{of[part]:.2f}" for part in ("sampling", "training", "sync")]
        totals = [f"{of[m]:.2f} ({of[f'{m}_low']:.2f} to {of[f'{m}_high']:.2f})" for m in ("synchronous", "ahead")]
        longer, ratio = max(of["sampling"], of["training"]), of["synchronous"] / of["ahead"]
        rows.append([name, *parts, *totals, f"{longer:.2f}", f"{ratio:.2f}", f"{of['gained']:.2f}"])
    return markdown_table(heads, rows)


def draw(path: Path, workloads: Mapping[str, Mapping[str, float]]) -> None:
    """Seconds of a rollout by the ratio of sampling to training: both modes with quartiles, and the longer side."""
    ordered = sorted(workloads.values(), key=lambda of: of["sampling"] / of["training"])
    ratios = [of["sampling"] / of["training"] for of in ordered]
    with figure(path, (7, 4.5)) as (panel,):
        for mode, label in (("synchronous", "rollout_ahead 0"), ("ahead", "rollout_ahead 1")):
            ends = [[abs(of[f"{mode}_{end}"] - of[mode]) for of in ordered] for end in ("low", "high")]
            panel.errorbar(ratios, [of[mode] for of in ordered], ends, marker="o", capsize=3, label=label)
        longer = [max(of["sampling"], of["training"]) for of in ordered]
        panel.plot(ratios, longer, "--", color="gray", label="the longer of sampling and training")
        panel.set(xlabel="sampling / training", ylabel="seconds of a rollout with its steps")
        panel.set_ylim(bottom=0)
        panel.legend()


def main() -> None:
    """Run what has not run, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", nargs="+", type=int, default=[1, 2, 4], help="of a workload (default: 1 2 4)")
    parser.add_argument("--shape", choices=SHAPES, default="1m", help="of the model (default: 1m)")
    parser.add_argument("--rollouts", type=int, default=7, help="of a run (default: 7)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode and workload (default: 2)")
    parser.add_argument("--server_core", type=int, default=1, help="(default: 1)")
    parser.add_argument("--trainer_core", type=int, default=0, help="(default: 0)")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for the server (default: 600)")
    parser.add_argument("--runs", type=Path, default=Path("runs/rollouts_ahead"), help="where the runs go")
    parser.add_argument("--json", type=Path, default=Path("docs/results/rollouts_ahead.json"), help="where figures go")
    parser.add_argument("--plot", type=Path, help="write the plot to this file")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the server's
    seconds: dict[str, dict[str, list[Rollout]]] = {str(epochs): {"0": [], "1": []} for epochs in args.epochs}
    loads = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        model = save_random_model(Path(scratch) / "model", args.shape)
        os.sched_setaffinity(0, {args.server_core})  # which the server inherits
        url = stack.enter_context(serving(model, args.patience)).each[0].client.base_url
        os.sched_setaffinity(0, {args.trainer_core})
        for turn in range(args.rounds):
            for epochs in args.epochs:
                for ahead in ("0", "1"):
                    own = {"epochs_per_rollout_batch": str(epochs), "max_steps": str(args.rollouts * epochs)}
                    folder = args.runs / f"{args.shape}_epochs_{epochs}" / f"ahead_{ahead}_round_{turn}"
                    if not finished(folder):
                        train(
                            folder, url, {**SETTINGS, **own, "model_name_or_path": str(model), "rollout_ahead": ahead}
                        )
                    run = finished(folder)
                    assert run is not None
                    rows = [row for row in read_jsonl(run.path / METRICS) if "loss" in row]
                    seconds[str(epochs)][ahead] += rollouts_in(rows, epochs)[WARM_UP - 1 :]
                    loads.append(os.getloadavg()[0])
    workloads = {epochs: summary(of["0"], of["1"]) for epochs, of in seconds.items()}
    print(*table(workloads), sep="\n")
    each = {epochs: {ahead: [asdict(one) for one in of[ahead]] for ahead in of} for epochs, of in seconds.items()}
    write_json(args.json, {"workloads": workloads, "rollouts": each, "load": loads, **provenance()})
    if args.plot:
        draw(args.plot, workloads)


if __name__ == "__main__":
    main()
