"""Loading files to cpu:0, which `torch.load` does not know."""

from __future__ import annotations

import re

import torch


def load_to_numbered_cpus() -> None:
    """Let `torch.load` map to cpu:0, the device of a CPU rank, to which `Trainer` loads the optimizer."""
    torch.serialization.register_package(
        100, lambda storage: None, lambda storage, location: storage if re.fullmatch(r"cpu:\d+", location) else None
    )
