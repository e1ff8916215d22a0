"""`Clock`: the seconds of a run, over all processes that it took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trl_ext.compat.startup import START


@dataclass
class Clock:
    """Wall-clock of a run: since this process started, and what earlier processes of the same run used."""

    spent: float = 0.0

    def seconds(self) -> float:
        """Seconds so far."""
        return time.time() - START + self.spent
