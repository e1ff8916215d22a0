"""Run a program as on macOS, with the environment of `as_on_macos`: python -m tests.support.on_macos FILE ARGUMENT ..."""

from __future__ import annotations

import runpy
import sys

# What loads libraries by the platform's name, before the name changes.
import datasets  # noqa: F401
import psutil  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401

if __name__ == "__main__":
    sys.platform = "darwin"
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
