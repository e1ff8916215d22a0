"""The states of the generators that sampling may draw from, to be put back as if it had not."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RngStates:
    """Of Python, numpy and torch, whose states `Trainer` saves, when this was made."""

    of_python: Any = field(default_factory=random.getstate)
    of_numpy: Any = field(default_factory=np.random.get_state)
    of_torch: torch.Tensor = field(default_factory=torch.get_rng_state)
    of_gpu: torch.Tensor | None = field(
        default_factory=lambda: torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    )

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)
        if self.of_gpu is not None:
            torch.cuda.set_rng_state(self.of_gpu)
