"""How every plot is made: without pyplot, time and steps from 0, written atomically as PNG.

Several seeds are a median and a band, named where they end; their figures go into a CSV file next to the plot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trl_ext.io import replacing, write_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's, which people with any kind of color vision tell apart (jfly.uni-koeln.de/color), yellow left out.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DPI = 200  # twice that of a page
QUARTILES = (25, 75)  # the band's ends


@contextlib.contextmanager
def figure(
    path: Path, size: tuple[float, float], shape: tuple[int, int] = (1, 1), title: str | None = None, **kwargs: Any
) -> Iterator[list[Axes]]:
    """The panels of a figure, row by row, to draw into; the PNG is written when the block ends.

    `size` is in inches, `shape` rows and columns of panels, and `kwargs` are for `Figure.subplots`, such as `sharey`.
    """
    import matplotlib
    from matplotlib.figure import Figure  # pyplot would choose a backend, and a notebook show no plot from then on

    open_frame = {"axes.spines.top": False, "axes.spines.right": False}  # room for names where curves end
    with matplotlib.rc_context({"axes.prop_cycle": f"cycler(color={COLORS})", **open_frame}):
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
            made.savefig(scratch, dpi=_DPI)


@dataclass(frozen=True)
class Band:
    """Several curves as one: at each x their median and quartiles."""

    x: list[float]
    median: list[float]
    low: list[float]
    high: list[float]
    curves: int


def band_of(curves: Sequence[Sequence[tuple[float, float]]]) -> Band:
    """The band of curves as (x, y), each linear between its points, over the range that all of them have."""
    start, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    x = sorted({start, end, *(at for curve in curves for at, _ in curve if start <= at <= end)})
    rows = [np.interp(x, [at for at, _ in curve], [value for _, value in curve]) for curve in curves]
    low, median, high = np.percentile(rows, [QUARTILES[0], 50, QUARTILES[1]], axis=0).tolist()
    return Band(x, median, low, high, len(curves))


def plot_bands(panel: Axes, bands: Mapping[str, Band]) -> None:
    """Medians with their bands, each named at its end, in the order of their last values and not over one another."""
    for number, band in enumerate(bands.values()):
        color = COLORS[number % len(COLORS)]
        panel.plot(band.x, band.median, color=color, linewidth=1.6)
        panel.fill_between(band.x, band.low, band.high, color=color, alpha=0.2, linewidth=0)
    low, high = panel.get_ylim()
    places = spread_out({name: band.median[-1] for name, band in bands.items()}, 0.06 * (high - low))
    for number, (name, band) in enumerate(bands.items()):
        panel.annotate(
            name, (band.x[-1], places[name]), (4, 0), textcoords="offset points", va="center", size=8,
            color=COLORS[number % len(COLORS)], annotation_clip=False,
        )  # fmt: skip


def spread_out(places: Mapping[str, float], gap: float) -> dict[str, float]:
    """Places moved as little as keeps them in order and `gap` apart, around their common center."""
    names = sorted(places, key=places.__getitem__)
    spread: dict[str, float] = {}
    for name in names:
        spread[name] = max([places[name], *(spread[other] + gap for other in list(spread)[-1:])])
    shift = sum(spread[name] - places[name] for name in names) / max(len(names), 1)
    return {name: place - shift for name, place in spread.items()}


def write_bands(path: Path, panels: Mapping[str, Mapping[str, Band]]) -> None:
    """The bands' figures as CSV, a row for each point."""
    rows = (
        [panel, name, *(round(value, 6) for value in point), band.curves]
        for panel, bands in panels.items()
        for name, band in bands.items()
        for point in zip(band.x, band.median, band.low, band.high, strict=True)
    )
    write_csv(path, ["panel", "curve", "x", "median", "low", "high", "seeds"], rows)


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
