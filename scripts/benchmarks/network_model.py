"""Bytes and seconds on the network per optimizer step of GRPO, from the sizes of a training: arithmetic only.

Collectives are rings: of a message of S bytes, each of n ranks sends 2 (n - 1) / n S for an all-reduce, and half of
that for an all-gather (S is what all have afterwards) or a reduce-scatter. `network_bytes.py` holds this to what real
ranks send; `network_growth.py` extends it to more hosts than there were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Per completion: its length and its prompt's (int64), whether it was truncated, the reward of one function.
ROW_BYTES = 8 + 8 + 1 + 4
# The other collectives of a step, of a few bytes each: counts, totals, metrics, signals, the logged loss.
SMALL_COLLECTIVES, SMALL_BYTES = 24, 20


def sent_per_rank(op: str, contributed: float, ranks: int, reduces_by_all: bool = False) -> float:
    """Bytes that a rank sends on average in one collective.

    Args:
        op: torch's name of the operation.
        contributed: bytes of a rank's input.
        reduces_by_all: a reduce-scatter is done as an all-reduce, as gloo does.
    """
    share = (ranks - 1) / ranks
    if op.startswith("allgather"):
        return (ranks - 1) * contributed
    if op.startswith("allreduce") or (op.startswith("reduce_scatter") and reduces_by_all):
        return 2 * share * contributed
    return share * contributed  # reduce-scatter, broadcast, gather


@dataclass(frozen=True)
class Training:
    """The sizes of an optimizer step on one rollout."""

    parameters: float  # of the policy
    stage: int  # of ZeRO; 0 is DDP
    rows: int  # completions per rank
    micro_batches: float  # that a rank computes per step, on average
    trained: float | None = None  # parameters that have a gradient; None for all
    gradient_bytes: int = 4  # of one number
    weight_bytes: int = 4
    gathers: int = 2  # of the weights per micro-batch under ZeRO-3, for forward and backward

    def collectives(self) -> dict[str, tuple[str, float, float]]:
        """By what is sent: the operation, the bytes of the whole message, and how often per step."""
        trained = self.parameters if self.trained is None else self.trained
        gradients, weights = trained * self.gradient_bytes, self.parameters * self.weight_bytes
        if self.stage == 0:
            return {"gradients": ("allreduce", gradients, 1)}
        if self.stage < 3:  # DeepSpeed all-reduces, from stage 2 on after every micro-batch
            times = 1 if self.stage == 1 else self.micro_batches
            return {
                "gradients": ("allreduce", gradients, times),
                "weights": ("allgather", trained * self.weight_bytes, 1),
            }
        return {
            "gradients": ("reduce_scatter", gradients, self.micro_batches),
            "weights": ("allgather", weights, self.micro_batches * self.gathers),
            "weights for the rollout": ("allgather", weights, 1),
        }

    def bytes_per_rank(self, ranks: int, reduces_by_all: bool = False) -> dict[str, float]:
        """Sent per step, by what it is."""
        sent = {}
        for name, (op, message, times) in self.collectives().items():
            contributed = message / ranks if op == "allgather" else message
            sent[name] = times * sent_per_rank(op, contributed, ranks, reduces_by_all)
        sent["rows"] = sent_per_rank("allgather", self.rows * ROW_BYTES, ranks)
        sent["other"] = sent_per_rank("allgather", SMALL_COLLECTIVES * SMALL_BYTES, ranks)
        return sent


@dataclass(frozen=True)
class Network:
    """Hosts that are alike."""

    gpus: int  # per host
    between: float  # bytes per second out of a host, of all its network cards together
    within: float = 450e9  # bytes per second out of a GPU to the others of its host
    latency: float = 10e-6  # seconds of one message

    def seconds(self, training: Training, hosts: int, tensors: int) -> float:
        """Of a step's collectives one after the other; nothing is hidden behind the computation.

        A ring over all GPUs enters and leaves each host once, so a host's cards carry what one rank sends.

        Args:
            tensors: of the policy; ZeRO-3 gathers them one by one.
        """
        ranks = hosts * self.gpus
        if ranks == 1:
            return 0.0
        sent = sum(training.bytes_per_rank(ranks).values())
        parts = tensors if training.stage == 3 else 1
        times = sum(n * (parts if op == "allgather" else 1) for op, _, n in training.collectives().values())
        starts = (SMALL_COLLECTIVES + times) * math.ceil(math.log2(ranks))
        return sent / (self.between if hosts > 1 else self.within) + starts * self.latency
