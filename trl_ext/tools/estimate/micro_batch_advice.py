"""Time that a run would waste, with the setting to change: micro-batches so small that the GPU waits for Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_ext.tools.estimate.planned import PlannedRun
    from trl_ext.tools.estimate.timing import Phase, Timing

_TOKENS = (8192, 16_384, 32_768)
_NEARLY = 1.05  # times the least seconds, for which a smaller micro-batch is as good
_WORTH = 1.1  # times as fast, from which on it is said


def larger_micro_batches(
    run: PlannedRun, timing: Timing, time: Callable[[PlannedRun], Timing], fits: Callable[[PlannedRun], bool]
) -> str | None:
    """What larger micro-batches would save where they wait for Python, or None.

    Args:
        timing: of the run as it is.
        time: of another one.
        fits: whether another one fits into the GPU's memory; called once or a few times.
    """
    now = _micro_batches(timing)
    if now.bound != "host" or not run.packs:
        return None
    others = {tokens: run.with_settings(micro_batch_tokens=tokens) for tokens in _TOKENS}
    seconds = {tokens: _micro_batches(time(other)).seconds for tokens, other in others.items()}
    good = [tokens for tokens in _TOKENS if seconds[tokens] <= _NEARLY * min(seconds.values())]
    for tokens in [good[0], *(t for t in reversed(_TOKENS) if t < good[0])]:
        if now.seconds < _WORTH * seconds[tokens]:
            return None
        if fits(others[tokens]):
            return (
                f"micro-batches wait for Python: micro_batch_tokens {tokens} would have a step's {now.seconds:.2f} s "
                f"in {seconds[tokens]:.2f}, and fits"
            )
    return None


def _micro_batches(timing: Timing) -> Phase:
    return next(phase for phase in timing.phases if phase.name == "micro-batches")
