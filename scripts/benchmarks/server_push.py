"""Seconds to give a vLLM server the policy's weights over HTTP, by the size of the model.

It starts a server on this machine for a model with random weights, pushes all of them a few times, and ends it.

    python -m scripts.benchmarks.server_push
    python -m scripts.benchmarks.server_push --shapes 1m 250m --json docs/results/server_push_speed.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trl_ext.generation.server import Servers, start_command
from trl_ext.runs.provenance import provenance

from .random_model import SHAPES, save_random_model


@contextlib.contextmanager
def serving(model: Path, seconds: float) -> Iterator[Servers]:
    """A server of the model on the loopback while the block runs."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    setting, _, *command = shlex.split(start_command(str(model)))
    name, _, value = setting.partition("=")
    flags = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ, name: value}
    with (model / "server.txt").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, *command, *flags, "--enforce-eager"], env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        yield Servers([f"http://127.0.0.1:{port}"], seconds, device)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def measure(shape: str, repeats: int, folder: Path, patience: float) -> dict[str, Any]:
    """Bytes of the model's weights, and seconds of the first push and of those after it."""
    path = save_random_model(folder / shape, shape)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seconds = []
    with serving(path, patience) as servers:
        for _ in range(repeats + 1):
            began = time.perf_counter()
            servers.push((name, parameter.data) for name, parameter in model.named_parameters())
            seconds.append(time.perf_counter() - began)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    first, *others = seconds
    return {
        "bytes": size, "tensors": len(list(model.parameters())), "first_seconds": first, "seconds": median(others),
        "slowest_seconds": max(others), "pushes": repeats,
    }  # fmt: skip


def main() -> None:
    """Measure, print, and write the JSON asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["1m", "250m"], help="of models (default: both)")
    parser.add_argument("--repeats", type=int, default=10, help="timed pushes after the first (default: 10)")
    parser.add_argument("--patience", type=float, default=600, help="seconds to wait for a server (default: 600)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        for shape in args.shapes:
            rows[shape] = row = measure(shape, args.repeats, Path(scratch), args.patience)
            print(
                f"{shape:<8} {row['bytes'] / 1e6:>8.1f} MB in {row['tensors']} tensors: median {row['seconds']:.3f} s "
                f"({row['bytes'] / 1e6 / row['seconds']:.0f} MB/s), first {row['first_seconds']:.3f} s, slowest "
                f"{row['slowest_seconds']:.3f} s"
            )
    if args.json:
        args.json.write_text(json.dumps({"shapes": rows, **provenance()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
