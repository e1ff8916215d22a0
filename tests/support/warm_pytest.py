"""Run pytest again and again, each run in a fork of a process that has imported the libraries but nothing of ours.

It reads lines of JSON, `[arguments of pytest, file for the output]`, and answers each with pytest's exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import pytest

LIBRARIES = (
    "accelerate", "datasets", "matplotlib.pyplot", "peft", "psutil", "sympy", "torch", "transformers",
    "transformers.models.qwen3.modeling_qwen3", "trl", "trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "yaml",
)  # fmt: skip


def run_in_a_fork(arguments: list[str], output: str) -> int:
    """Pytest's exit status; minus a signal's number if that ended it."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    status = 3  # pytest's word for an error of its own
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    for library in LIBRARIES:
        importlib.import_module(library)
    for line in sys.stdin:
        print(run_in_a_fork(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
