"""Micro-batches that wait for Python: the smallest that do not, if it is worth it and fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.tools.estimate.runs import planned
from trl_ext.tools.estimate.micro_batch_advice import larger_micro_batches

SECONDS = {None: 10.0, 8192: 6.0, 16_384: 4.1, 32_768: 4.0}
RUN = planned()


def timing(run: Any, bound: str = "host", seconds: dict[Any, float] = SECONDS) -> Any:
    """With micro-batches of so many seconds."""
    phases = (SimpleNamespace(name="decoding", seconds=1.0, bound="compute"),
              SimpleNamespace(name="micro-batches", seconds=seconds[run.token_limit], bound=bound))  # fmt: skip
    return SimpleNamespace(phases=phases)


@pytest.mark.parametrize(("most", "tokens"), [(32_768, 16_384), (8192, 8192)])
def test_the_smallest_that_is_as_good_and_fits_is_said(most: int, tokens: int) -> None:
    said = larger_micro_batches(RUN, timing(RUN), timing, lambda other: (other.token_limit or 0) <= most)
    assert said is not None
    assert f"micro_batch_tokens {tokens} would have a step's 10.00 s in {SECONDS[tokens]:.2f}" in said


@pytest.mark.parametrize(
    ("run", "bound", "seconds", "fits"),
    [
        (RUN, "compute", SECONDS, True),
        (RUN.with_settings(dynamic_micro_batches=False), "host", SECONDS, True),
        (RUN, "host", {**SECONDS, None: 4.3}, True),
        (RUN, "host", SECONDS, False),
    ],
    ids=["computes", "not packed", "not worth it", "does not fit"],
)
def test_nothing_is_said_where_nothing_is_won(run: Any, bound: str, seconds: dict[Any, float], fits: bool) -> None:
    assert larger_micro_batches(run, timing(run, bound, seconds), timing, lambda _: fits) is None
