"""`Clock`: the seconds of a run, over all processes that it took, and those that its end needs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trl_ext.compat.startup import START

_MARGIN = 1.2  # on what was measured
_REPORT = 2.0  # seconds for curve, card and summary


@dataclass
class Clock:
    """Wall-clock of a run: since this process started, and what earlier processes of the same run used."""

    spent: float = 0.0

    def seconds(self) -> float:
        """Seconds so far."""
        return time.time() - START + self.spent


def reserve_seconds(validation: float, saving: float) -> float:
    """Seconds that the end of a run needs, from the slowest final validation and saving so far (seconds)."""
    return _MARGIN * (validation + saving) + _REPORT
