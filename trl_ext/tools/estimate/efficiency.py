"""How much of its ceilings a machine reaches, and what Python takes, until a pilot or a check says better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_ext.tools.estimate.plan import Rates
    from trl_ext.tools.estimate.timing import Timing

_PACED = {  # a rate -> the name by which its measured pace is kept
    "completion_token": "rollout",
    "trained_token": "training",
    "sync": "sync",
    "step": "step",
    "problem": "validation",
    "save": "save",
}


@dataclass(frozen=True)
class Efficiency:
    """Assumptions by default, but for `op_seconds`, see docs/results/gpu.md; fractions are of a device's peaks."""

    compute: float = 0.6  # what cuBLAS's large products in bfloat16 reach
    memory: float = 0.8  # what a copy reaches
    interconnect: float = 0.7  # what NCCL's rings reach
    network: float = 12.5e9  # bytes/s between hosts, 100 Gbit/s
    op_seconds: float = 20e-6  # Python and dispatch of an operation of eager PyTorch
    engine_step_seconds: float = 3e-3  # of vLLM's scheduler and sampler, per decoding step
    token_seconds: float = 1e-3  # of HF `generate` around the model, per token
    logit_seconds: float = 0.0  # of drawing a token, per entry of the vocabulary; a GPU's is in the bytes moved
    reward_seconds: float = 1e-3  # per completion
    tensor_seconds: float = 1e-4  # of a weight sync, per tensor
    step_seconds: float = 0.05  # of an optimizer step outside rollout and training, such as logging
    start_seconds: float = 120.0  # imports, weights, the engine's start
    disk: float = 1e9  # bytes/s of a checkpoint
    pace: Mapping[str, float] = field(default_factory=dict)  # measured seconds by estimated ones, by `_PACED`'s names

    def measured(self, estimated: Timing, rates: Rates) -> Efficiency:
        """With the pace of a pilot.

        Args:
            estimated: of the pilot's own settings, with this efficiency.
            rates: as `plan.measured` reads them from the pilot.
        """
        pace = dict(self.pace)
        for rate, part in _PACED.items():
            before, after = getattr(estimated.rates, rate), getattr(rates, rate)
            if before > 0 and after > 0:
                pace[part] = self.pace.get(part, 1.0) * after / before
        return replace(self, pace=pace, start_seconds=rates.start)

    def checked(self, estimated: Timing, figures: Mapping[str, Any]) -> Efficiency:
        """With the pace of `python -m scripts.benchmarks.gpu --json`.

        Args:
            estimated: of the check's settings, with this efficiency.
            figures: the content of its file.

        Raises:
            ValueError: a figure is missing.
        """
        missing = [name for name in ("rollout_tokens_per_s", "training_tokens_per_s", "start_s") if name not in figures]
        if missing:
            raise ValueError(f"no {', '.join(missing)}; python -m scripts.benchmarks.gpu --json writes them")
        rates = replace(
            estimated.rates,
            start=figures["start_s"],
            completion_token=1 / figures["rollout_tokens_per_s"],
            trained_token=estimated.tokens_computed_per_trained / figures["training_tokens_per_s"],
            sync=figures.get("sync_s") or 0.0,
        )
        return self.measured(estimated, rates)
