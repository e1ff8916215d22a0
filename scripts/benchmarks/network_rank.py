"""One rank of `network_bytes.py`, which launches it: the GRPO recipe, with a note of every collective.

The first argument is the folder to write to; the others are flags of the recipe.
"""

from __future__ import annotations

import functools
import json
import linecache
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback, trainer

from trl_ext.rewards.hooks import REWARDS

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_math.py"
# Functions whose collectives are told apart: the innermost one counts, but a validation's are all its own.
PLACES = ("_measure", "_calculate_rewards", "_roll_out", "training_step")
# What only passes a collective on; the caller is the function before it.
_PLUMBING = (
    "torch", "accelerate", "typing_extensions", "contextlib", "functools", "__main__", "trl_ext.compat",
    "deepspeed.comm", "deepspeed.utils.nvtx",
)  # fmt: skip


def graded_by_length(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Graded and logged as `strict` does, with a reward that differs within a group: every row has a gradient."""
    REWARDS["strict"](completions, answer, **columns)
    return [float(sum(map(ord, text)) % 7) for text in completions]


def loopback_bytes() -> int:
    """Bytes that the kernel has sent over the loopback of this network namespace."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[8])


class Recorder(TorchDispatchMode):
    """Counts collectives, those of DDP and DeepSpeed too, by optimizer step, operation, size and caller.

    Every one of them is an operation `c10d::...` of torch's dispatcher, whoever starts it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.calls: Counter[tuple[Any, ...]] = Counter()
        self.micro_batches: Counter[int] = Counter()  # by step
        self.loopback: list[int] = []  # when each step begins

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective, and call it."""
        if func.namespace == "c10d":
            operation = func.overloadpacket.__name__.strip("_")
            # Outputs come first where there are any; what a rank contributes are the inputs.
            given = args[1] if "gather" in operation or "scatter" in operation else args[0]
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            ranks = dist.ProcessGroup.unbox(groups[0]).size() if groups else dist.get_world_size()
            elements, dtype = sum(t.numel() for t in tensors), tensors[0].dtype if tensors else torch.uint8
            key = (operation, elements, str(dtype).removeprefix("torch."), dtype.itemsize, ranks)
            self.calls[self.step, *key, *_caller(sys._getframe())] += 1
        return func(*args, **(kwargs or {}))

    def write(self, path: Path) -> None:
        """The counts as JSON."""
        names = ("step", "op", "elements", "dtype", "width", "ranks", "place", "function", "line")
        rows = [dict(zip(names, key, strict=True)) | {"calls": n} for key, n in self.calls.items()]
        counts = {"rows": rows, "micro_batches": self.micro_batches, "loopback": self.loopback}
        path.write_text(json.dumps(counts) + "\n", encoding="utf-8")


def _caller(frame: FrameType | None) -> tuple[str, str, str]:
    """Place, function and source line of a collective."""
    place = function = line = ""
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if not function and not module.startswith(_PLUMBING):
            function, line = f"{module}.{name}", linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if name in PLACES and module.startswith(("trl_ext.", "trl.")) and (not place or name == "_measure"):
            place = name
        frame = frame.f_back
    return place, function, line


def main() -> None:
    """Run the recipe and write what was counted."""
    recorder = Recorder()

    class Steps(TrainerCallback):
        """Tells the recorder where the training is."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            recorder.step = state.global_step + 1
            recorder.loopback.append(loopback_bytes())

    backward = accelerate.Accelerator.backward

    @functools.wraps(backward)
    def counted(*args: Any, **kwargs: Any) -> None:
        recorder.micro_batches[recorder.step] += 1
        backward(*args, **kwargs)

    accelerate.Accelerator.backward = counted
    trainer.DEFAULT_CALLBACKS.append(Steps)
    result = Path(sys.argv[1]) / f"rank{os.environ.get('RANK', 0)}.json"
    sys.argv = [str(RECIPE), *sys.argv[2:]]
    try:
        with recorder:
            runpy.run_path(str(RECIPE), run_name="__main__")
    finally:
        recorder.write(result)


if __name__ == "__main__":
    main()
