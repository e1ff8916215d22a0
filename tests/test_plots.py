"""Several seeds as a median and a band, named where they end, with the figures next to the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from trl_ext.plots import COLORS, band_of, figure, plot_bands, spread_out, write_bands

CURVES = [[(0.0, 0.0), (10.0, 1.0)], [(0.0, 0.2), (5.0, 0.2), (12.0, 0.9)], [(0.0, 0.4), (10.0, 0.6)]]


def test_a_band_is_the_median_and_quartiles_where_all_curves_are() -> None:
    band = band_of(CURVES)
    assert band.x == [0.0, 5.0, 10.0]  # 12 is beyond the others
    assert band.median == pytest.approx([0.2, 0.5, 0.7])  # at 10 the second is at 0.2 + 5/7 * 0.7 = 0.7
    assert band.low == pytest.approx([0.1, 0.35, 0.65])
    assert band.high == pytest.approx([0.3, 0.5, 0.85])
    assert band.curves == 3


def test_labels_keep_their_order_and_distance() -> None:
    assert spread_out({"a": 0.5, "b": 0.1}, 0.1) == {"a": 0.5, "b": 0.1}
    moved = spread_out({"a": 0.5, "b": 0.5, "c": 0.48}, 0.1)
    assert sorted(moved.values()) == pytest.approx([0.3933, 0.4933, 0.5933], abs=1e-3)
    assert min(moved, key=moved.__getitem__) == "c"
    assert spread_out({}, 0.1) == {}


def test_bands_are_named_at_their_ends_in_colors_all_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda made, path, dpi: (figures.append((made, dpi)), path.touch()))
    with figure(tmp_path / "a.png", (4, 3)) as (panel,):
        plot_bands(panel, {"one": band_of(CURVES), "two": band_of(CURVES[:1])})
        (drawn,) = panel.plot([0, 1], [0, 1])
    ((made, dpi),) = figures
    (axes,) = made.axes
    assert dpi == 200
    assert [(text.get_text(), text.get_color()) for text in axes.texts] == [("one", COLORS[0]), ("two", COLORS[1])]
    assert [text.xy[0] for text in axes.texts] == [10.0, 10.0]
    assert axes.texts[1].xy[1] > axes.texts[0].xy[1]
    assert len(axes.collections) == 2
    assert to_hex(drawn.get_color()).upper() in COLORS
    assert axes.get_xlim()[0] == 0


def test_figures_of_the_bands_are_next_to_the_plot(tmp_path: Path) -> None:
    write_bands(tmp_path / "a.csv", {"steps": {"one": band_of(CURVES)}})
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert lines[:2] == ["panel,curve,x,median,low,high,seeds", "steps,one,0.0,0.2,0.1,0.3,3"]
    assert len(lines) == 4
