"""Verdicts on the disk, a file each, by a fingerprint of all that decides them; processes may share a folder."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

from trl_ext.rewards.judge.settings import Rubric
from trl_ext.rewards.judge.verdict import NoVerdict, Verdict, verdict_of


class VerdictCache:
    """Folders of at most some thousand files, which are complete or not there."""

    def __init__(self, folder: Path, rubric: Rubric) -> None:
        self.folder, self.rubric = folder, rubric

    def get(self, key: str) -> Verdict | None:
        """The verdict; None where there is none, or no whole one."""
        try:
            return verdict_of(json.loads(self._path(key).read_text(encoding="utf-8"))["verdict"], self.rubric)
        except (OSError, NoVerdict, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, verdict: Verdict, model: str) -> Verdict:
        """Keep a verdict, and return the one that holds: that of whoever was first."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
        kept = {"verdict": {"reason": verdict.reason, "scores": dict(verdict.scores)}, "model": model}
        scratch.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        try:
            with contextlib.suppress(OSError):  # it is there, or the file system has no links
                os.link(scratch, path)
            if (first := self.get(key)) is None:
                scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        return first or verdict

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key[2:]}.json"
