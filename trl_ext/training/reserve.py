"""The seconds that the end of a run needs; without torch, since the planner of budgets needs none."""

_MARGIN = 1.2  # on what was measured
_REPORT = 2.0  # seconds for curve, card and summary


def reserve_seconds(validation: float, saving: float) -> float:
    """Seconds that the end of a run needs, from the slowest final validation and saving so far (seconds)."""
    return _MARGIN * (validation + saving) + _REPORT
