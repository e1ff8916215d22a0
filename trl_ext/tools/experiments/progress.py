"""What several runs are doing, live: a bar for all of them and a line for each that runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trl_ext.io import read_jsonl
from trl_ext.runs.layout import METRICS

_SHOWN = {"step": "step {:.0f}", "reward": "reward {:.2f}", "loss": "loss {:.2f}", "grad_norm": "gradient {:.2g}",
          "validation/accuracy": "accuracy {:.3f}", "wall_clock_s": "{:.0f} s"}  # fmt: skip


class ProgressDisplay:
    """On a terminal its lines are rewritten until it is closed, elsewhere a line is printed as a run ends.

    Args:
        folder: where each run has a folder of its name.
        total: runs in all.
        done: of them, before.
        lines: runs at a time.
    """

    def __init__(self, folder: Path, total: int, done: int, lines: int) -> None:
        self.folder = folder
        self._running: list[str] = []  # of all threads: append, remove and a copy are atomic
        live = sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, desc="runs", unit="run", disable=not live)
        self._lines = [tqdm(bar_format="  {desc}", position=1 + i, leave=False) for i in range(lines if live else 0)]

    def close(self) -> None:
        """Take its lines away."""
        for line in (*self._lines, self._bar):
            line.close()

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """A run has a line while the block runs; called in its thread."""
        self._running.append(name)
        try:
            yield
        finally:
            self._running.remove(name)

    def refresh(self) -> None:
        """Read how far the runs are."""
        running = list(self._running)
        for i, line in enumerate(self._lines):
            name = running[i] if i < len(running) else None
            line.set_description_str("" if name is None else f"{name}: {latest(self.folder / name / METRICS)}")

    def ended(self, name: str, failed: str | None) -> None:
        """Count a run, and say how it ended where there is no terminal to rewrite, or if it failed."""
        self._bar.update()
        if failed is not None or not self._lines:
            said = f"failed: {failed}" if failed else latest(self.folder / name / METRICS)
            self._bar.write(f"{name}: {said}", file=sys.stderr)


def latest(metrics: Path) -> str:
    """A run's newest figures in a line."""
    if not metrics.exists():
        return "starting"
    newest: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # its last line is being written
        for entry in read_jsonl(metrics):
            newest |= entry
    return ", ".join(text.format(newest[name]) for name, text in _SHOWN.items() if newest.get(name) is not None)
