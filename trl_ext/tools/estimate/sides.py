"""What samples and what trains: which of the two waits, and which use of two GPUs takes the least time.

A step is here a rollout with all optimizer steps on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sides:
    """Seconds of a rollout with its optimizer steps, by the side that has the work."""

    sampling: float  # the engine's: prompts and decoding
    training: float  # the policy's: rewards, scoring and optimizer steps
    push: float  # of the weights, during which both sides wait
    ahead: bool = False  # whether the next rollout is sampled in the meantime (`rollout_ahead`)

    @property
    def policy_waits(self) -> float:
        """What the policy waits for samples."""
        return max(0.0, self.sampling - self.training) if self.ahead else self.sampling

    @property
    def engine_waits(self) -> float:
        """What the engine waits for the policy's steps."""
        return max(0.0, self.training - self.sampling) if self.ahead else self.training

    @property
    def seconds(self) -> float:
        """Of the whole: the sum, or with rollouts ahead the longer side, and the push."""
        return self.training + self.policy_waits + self.push

    def of_server(self) -> str:
        """A line that says which side waits, where they have GPUs of their own."""
        how = "rollouts ahead" if self.ahead else "in turn"
        waits = [f"the policy waits {self.policy_waits:.2f} s"] * (self.policy_waits > 0)
        waits += [f"the server {'' if waits else 'waits '}{self.engine_waits:.2f} s"] * (self.engine_waits > 0)
        return (
            f"a rollout with its optimizer steps, {how}: {self.seconds:.2f} s of {self.sampling:.2f} s sampling and "
            f"{self.training:.2f} s training; {', '.join(waits) or 'neither side waits'}"
        )


@dataclass(frozen=True)
class TwoGpus:
    """Two ways to use two GPUs: both sample and then both train, or one samples for the other one."""

    colocated: Sides
    served: Sides

    @property
    def ratio(self) -> float:
        """Of sampling to training, each on one GPU."""
        return self.served.sampling / self.served.training

    def sides(self, ratio: float | None = None) -> dict[str, Sides]:
        """The modes by their names.

        Args:
            ratio: as if sampling took so many times the training on one GPU, with what two GPUs save of it as it is.
        """
        times = 1.0 if ratio is None else ratio / self.ratio
        colocated = replace(self.colocated, sampling=self.colocated.sampling * times)
        served = replace(self.served, sampling=self.served.sampling * times)
        return {
            "2 colocated": replace(colocated, ahead=False),
            "1 + 1, server": replace(served, ahead=False),
            "1 + 1, rollout_ahead 1": replace(served, ahead=True),
        }

    def turns(self) -> tuple[float, float] | None:
        """The ratios of sampling to training between which 1 + 1 with rollouts ahead is the fastest; None: at none."""
        of, one, two = self.served.training, self.served, self.colocated
        pushed = (two.push - one.push) / of
        return turning_ratios(two.sampling / one.sampling, two.training / of, pushed)

    def table(self) -> str:
        """The modes, a line each, and where it turns."""
        lines = [f"{'seconds per rollout':<24}{'sampling':>10}{'training':>10}{'push':>8}{'in all':>10}  waits"]
        for name, side in self.sides().items():
            waits = {} if name == "2 colocated" else {"policy": side.policy_waits, "server": side.engine_waits}
            said = ", ".join(f"{who} {seconds:.2f}" for who, seconds in waits.items() if seconds > 0)
            numbers = f"{side.sampling:>10.2f}{side.training:>10.2f}{side.push:>8.2f}{side.seconds:>10.2f}"
            lines.append(f"{name:<24}{numbers}  {said or '-'}")
        return "\n".join([*lines, "", self.verdict()])

    def verdict(self) -> str:
        """Which mode is the fastest, and at which ratio that turns."""
        modes = {name: side.seconds for name, side in self.sides().items()}
        best, now = min(modes, key=modes.__getitem__), f"on one GPU each, sampling takes {self.ratio:.2f} of training"
        between = self.turns()
        if between is None:
            turning = "1 + 1 is the fastest at no ratio"
        else:
            end = "on" if math.isinf(between[1]) else f"to {between[1]:.2f}"
            turning = f"1 + 1 with rollout_ahead 1 is the fastest from {between[0]:.2f} {end}"
        return f"the fastest: {best}. {now[0].upper()}{now[1:]}; {turning}"


def turning_ratios(sampling: float, training: float, push: float = 0.0) -> tuple[float, float] | None:
    """Between which ratios of sampling to training 1 + 1 with rollouts ahead takes less time than 2 colocated.

    In units of the training on one GPU and with x for the ratio, colocated takes s x + t + p, where perfect halving is
    s = t = 1/2, and rollouts ahead max(x, 1). Below x = 1 they are equal at (1 - t - p) / s, above (t + p) / (1 - s):
    with perfect halving at 1 only, so that colocated is never slower. The more s, t and p are, the wider the interval;
    with s = 1, decoding that reads weights for however few rows, it has no upper end.

    Args:
        sampling: s, what two GPUs take of one GPU's time.
        training: t, likewise.
        push: p, what a colocated push takes more than one to a server, by the training on one GPU.

    Returns:
        The lower end, not below 0, and the upper one, `inf` if there is none; None where colocated is never slower.
    """
    fixed = training + push
    if sampling + fixed <= 1:
        return None
    low = max(0.0, (1 - fixed) / sampling)
    return low, fixed / (1 - sampling) if sampling < 1 else math.inf
