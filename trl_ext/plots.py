"""How every plot is made: without pyplot, time and steps from 0, written atomically as PNG."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trl_ext.io import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@contextlib.contextmanager
def figure(
    path: Path, size: tuple[float, float], shape: tuple[int, int] = (1, 1), title: str | None = None, **kwargs: Any
) -> Iterator[list[Axes]]:
    """The panels of a figure, row by row, to draw into; the PNG is written when the block ends.

    `size` is in inches, `shape` rows and columns of panels, and `kwargs` are for `Figure.subplots`, such as `sharey`.
    """
    from matplotlib.figure import (
        Figure,  # pyplot would choose a backend, which in a notebook shows no plot from then on
    )

    made = Figure(figsize=size, layout="constrained")
    panels = made.subplots(*shape, squeeze=False, **kwargs)
    yield list(panels.flat)
    for panel in panels.flat:
        if not panel.axison:
            continue
        panel.grid(alpha=0.3)
        if not np.isfinite(panel.dataLim.get_points()).all():  # nothing was drawn, or NaN only
            panel.set(xticks=[], yticks=[])
            panel.text(0.5, 0.5, "nothing to show", ha="center", color="gray", transform=panel.transAxes)
        elif panel.get_xscale() == "linear":
            panel.set_xlim(left=0)
    made.suptitle(title or "")
    with replacing(path) as scratch:
        made.savefig(scratch, dpi=120)


def plot_accuracy(panel: Axes, history: Sequence[Mapping[str, Any]], key: str, **style: Any) -> None:
    """Validation accuracy against `key`; a measurement on other problems than the first is a point off the line."""
    problems = history[0].get("problems") if history else None
    same = [entry for entry in history if entry.get("problems") == problems]
    other = [entry for entry in history if entry.get("problems") != problems]
    (line,) = panel.plot([e[key] for e in same], [e["accuracy"] for e in same], **style)
    for entry in other:
        panel.plot(entry[key], entry["accuracy"], "D", fillstyle="none", color=line.get_color())
        text = f"{entry['accuracy']:.3f} on {entry['problems']}"
        panel.annotate(text, (entry[key], entry["accuracy"]), (-6, -14), textcoords="offset points", ha="right", size=8)
