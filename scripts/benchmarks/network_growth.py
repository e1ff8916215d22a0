"""To 64 hosts on paper: seconds on the network per optimizer step against those of rollout and training.

Bytes are those of `network_model.py`, which real ranks confirm on one machine; bandwidths and the GPU's rates are
assumptions, all of them in this file. Nothing of the network is hidden behind the computation, and all GPUs sample as
long as the longest completion.

    python -m scripts.benchmarks.network_growth
    python -m scripts.benchmarks.network_growth --csv docs/results/growth.csv --plot docs/results/growth.png
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trl_ext.io import markdown_table
from trl_ext.plots import figure

from .network_model import Network, Training

HOSTS = (1, 2, 4, 8, 16, 32, 64)
GPUS = (1, 2, 8)  # per host
GBIT = (25, 100, 400, 3200)  # per host: Ethernet, fast Ethernet, one InfiniBand NDR card, one of those per GPU
ENOUGH = 0.8  # efficiency
ROWS_PER_GPU, ROWS_IN_ALL, ROWS_PER_MICRO_BATCH = 32, 1024, 2
# Tokens of a prompt and of a completion, and of the longest completion of a rollout.
PROMPT, COMPLETION, LONGEST = 200, 600, 1024

# An H100 SXM: its data sheet's dense bf16 rate and memory bandwidth, and the parts of them that we assume are reached.
FLOPS, MEMORY = 0.4 * 989e12, 0.6 * 3.35e12
SECONDS_PER_TOKEN = 3e-3  # of the engine itself, for every token of the longest completion


@dataclass(frozen=True)
class Policy:
    """Sizes of a Qwen2.5-Math policy."""

    name: str
    parameters: float
    tensors: int
    cache: float  # bytes of keys and values per token
    lora: float  # parameters of adapters of rank 32 on all linear layers

    def rollout_seconds(self, rows: float) -> float:
        """A GPU reads all weights for every token of the longest completion, and the caches of the rows."""
        cached = rows * COMPLETION * (PROMPT + COMPLETION / 2) * self.cache
        return LONGEST * (SECONDS_PER_TOKEN + 2 * self.parameters / MEMORY) + cached / MEMORY

    def training_seconds(self, rows: float) -> float:
        """Forward, backward, and forward again for the checkpointed activations: 8 operations a token and parameter."""
        return 8 * self.parameters * rows * (PROMPT + COMPLETION) / FLOPS


POLICIES = (
    Policy("1.5B", 1.54e9, 338, 2 * 28 * 2 * 128 * 2, 36.9e6),
    Policy("7B", 7.62e9, 339, 2 * 28 * 4 * 128 * 2, 80.7e6),
)


def trainings(policy: Policy, rows: float) -> dict[str, Training]:
    """By name; `rows` are of a micro-batch. ZeRO sends bf16, DDP float32, which at 7B does not fit on 80 GB."""
    many = max(rows / ROWS_PER_MICRO_BATCH, 1)
    half = Training(policy.parameters, 1, int(rows), many, gradient_bytes=2, weight_bytes=2)
    by_name = {
        "DDP": Training(policy.parameters, 0, int(rows), many),
        "ZeRO-1": half,
        "ZeRO-2": replace(half, stage=2),
        f"ZeRO-2, {4 * ROWS_PER_MICRO_BATCH} rows": replace(half, stage=2, micro_batches=max(many / 4, 1)),
        "ZeRO-3": replace(half, stage=3),
        f"ZeRO-3, {4 * ROWS_PER_MICRO_BATCH} rows": replace(half, stage=3, micro_batches=max(many / 4, 1)),
        "LoRA, DDP": Training(policy.parameters, 0, int(rows), many, trained=policy.lora),
    }
    return by_name if policy.parameters < 4e9 else {name: one for name, one in by_name.items() if name != "DDP"}


@dataclass(frozen=True)
class Point:
    """An optimizer step on some hosts; `fixed` is what does not grow with the hosts."""

    policy: str
    training: str
    fixed: str
    gpus: int
    gbit: int
    hosts: int
    gigabytes_per_rank: float
    network_s: float
    rollout_s: float
    training_s: float
    efficiency: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.network_s + self.rollout_s + self.training_s


def points(rows_per_gpu: int) -> Iterator[Point]:
    """All combinations: with as many rows per GPU everywhere, and with as many in all, down to one micro-batch each.

    The efficiency is the rows per second and GPU, relative to one GPU.
    """
    for policy in POLICIES:
        for gpus in GPUS:
            for gbit in GBIT:
                for hosts in HOSTS:
                    yield from _points(policy, gpus, gbit, hosts, "rows per GPU", rows_per_gpu)
                    if ROWS_IN_ALL / (hosts * gpus) >= ROWS_PER_MICRO_BATCH:
                        yield from _points(policy, gpus, gbit, hosts, "rows in all", ROWS_IN_ALL / (hosts * gpus))


def _points(policy: Policy, gpus: int, gbit: int, hosts: int, fixed: str, rows: float) -> Iterator[Point]:
    ranks, network = hosts * gpus, Network(gpus, gbit * 1e9 / 8)
    alone = rows if fixed == "rows per GPU" else rows * ranks
    one_gpu = (policy.rollout_seconds(alone) + policy.training_seconds(alone)) / alone
    rollout, training_s = policy.rollout_seconds(rows), policy.training_seconds(rows)
    for name, training in trainings(policy, rows).items():
        sent = sum(training.bytes_per_rank(ranks).values()) / 1e9
        seconds = network.seconds(training, hosts, policy.tensors)
        efficiency = one_gpu * rows / (rollout + training_s + seconds)
        yield Point(policy.name, name, fixed, gpus, gbit, hosts, sent, seconds, rollout, training_s, efficiency)


def tables(grid: list[Point]) -> Iterator[str]:
    """How many hosts are efficient, a step's seconds on 64 of them, and what rows and faster GPUs change."""
    grown = [point for point in grid if point.fixed == "rows per GPU"]
    for policy in POLICIES:
        mine = [point for point in grown if point.policy == policy.name]
        rows = [
            (name, *(_limit(mine, name, gpus, gbit) for gpus in GPUS for gbit in GBIT))
            for name in dict.fromkeys(point.training for point in mine)
        ]
        yield f"\n{policy.name}: hosts up to an efficiency of {ENOUGH}; GPUs x Gbit/s per host:\n"
        yield from markdown_table(["", *(f"{gpus} x {gbit}" for gpus in GPUS for gbit in GBIT)], rows)
    yield f"\nSeconds per step, 64 hosts of 8 GPUs, {ROWS_PER_GPU} rows per GPU:\n"
    yield from markdown_table(
        ["", "", "GB sent by a rank", *(f"{gbit} Gbit/s" for gbit in GBIT), "rollout", "training"], _seconds(grown)
    )
    kinds = {f"{rows} rows per GPU": list(points(rows)) for rows in (8, 32, 128)}
    yield "\nEfficiency on 64 hosts of 8 GPUs and 100 Gbit/s, by the size of the rollout:\n"
    yield from markdown_table(["", "", *kinds], _efficiencies(list(kinds.values())))


def _on_64_hosts(grid: list[Point], gbit: int) -> list[Point]:
    return [p for p in grid if (p.fixed, p.gpus, p.hosts, p.gbit) == ("rows per GPU", 8, 64, gbit)]


def _seconds(grid: list[Point]) -> Iterator[tuple[str, ...]]:
    for same in zip(*(_on_64_hosts(grid, gbit) for gbit in GBIT), strict=True):
        point = same[0]
        network = [f"{p.network_s:.2f}" for p in same]
        sent = f"{point.gigabytes_per_rank:.2f}"
        yield (point.policy, point.training, sent, *network, f"{point.rollout_s:.1f}", f"{point.training_s:.1f}")


def _efficiencies(kinds: list[list[Point]]) -> Iterator[tuple[str, ...]]:
    for same in zip(*(_on_64_hosts(grid, 100) for grid in kinds), strict=True):
        yield (same[0].policy, same[0].training, *(f"{p.efficiency:.2f}" for p in same))


def _limit(grid: list[Point], training: str, gpus: int, gbit: int) -> str:
    mine = [p for p in grid if (p.training, p.gpus, p.gbit) == (training, gpus, gbit)]
    short = next((i for i, point in enumerate(mine) if point.efficiency < ENOUGH), len(mine))
    return str(mine[short - 1].hosts) if short else "none"


def draw(path: Path, grid: list[Point], gpus: int = 8, gbit: int = 400) -> None:
    """A row of panels per policy: efficiency with as many rows per GPU, and seconds of a step with as many in all."""
    title = f"{gpus} GPUs and {gbit} Gbit/s per host"
    with figure(path, (11, 8), (2, 2), title) as panels:
        kinds = [(policy.name, fixed) for policy in POLICIES for fixed in ("rows per GPU", "rows in all")]
        for panel, (policy, fixed) in zip(panels, kinds, strict=True):
            mine = [p for p in grid if (p.policy, p.fixed, p.gpus, p.gbit) == (policy, fixed, gpus, gbit)]
            of_gpu = fixed == "rows per GPU"
            for number, name in enumerate(dict.fromkeys(point.training for point in grid)):
                line = [(p.hosts, p.efficiency if of_gpu else p.seconds) for p in mine if p.training == name]
                if line:
                    panel.plot(*zip(*line, strict=True), marker=".", label=name, color=f"C{number}")
            if of_gpu:
                panel.axhline(ENOUGH, color="gray", linestyle="--", linewidth=1)
                panel.set(title=f"{policy}, {ROWS_PER_GPU} rows per GPU", ylabel="efficiency", ylim=(0, 1.05))
            else:
                computed = {p.hosts: p.rollout_s + p.training_s for p in mine}
                panel.plot(*zip(*computed.items(), strict=True), "k--", label="rollout and training alone")
                panel.set(title=f"{policy}, {ROWS_IN_ALL} rows in all", ylabel="seconds per step", ylim=(0, None))
            panel.set_xscale("log", base=2)
            panel.set_xticks(HOSTS, [str(hosts) for hosts in HOSTS])
            panel.set_xlabel("hosts")
            panel.legend(fontsize=8)


def main() -> None:
    """Compute, print the tables, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="write all points to this file")
    parser.add_argument("--plot", type=Path, help="write the plot to this file")
    args = parser.parse_args()
    grid = list(points(ROWS_PER_GPU))
    print("\n".join(tables(grid)))
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(vars(grid[0]))
            table.writerows([f"{v:.4g}" if isinstance(v, float) else v for v in vars(p).values()] for p in grid)
    if args.plot:
        draw(args.plot, grid)


if __name__ == "__main__":
    main()
