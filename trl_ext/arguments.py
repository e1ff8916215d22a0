"""What every recipe does with its command line: settings from YAML and flags, and errors in one line."""

from __future__ import annotations

from trl_ext._startup import START as START

# isort: split
import argparse
import json
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from accelerate import PartialState
from torch.distributed.elastic.multiprocessing.errors import record
from trl import TrlParser

from trl_ext.checkpoints import checkpoints
from trl_ext.hub import PushError
from trl_ext.saving import NotSavedError


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and leaves the line breaks of the description alone."""


def parse(
    settings: Sequence[type], description: str | None, default_config: Path, arguments: Sequence[str] | None = None
) -> tuple[Any, ...]:
    """Arguments from a YAML file, then from the command line, into dataclasses.

    Ends the process with one readable line, not a traceback, when they do not fit together.

    Args:
        settings: the dataclasses; the last has `output_dir`, by default `runs/` and the YAML file's name.
    """
    args = list(sys.argv[1:] if arguments is None else arguments)
    if "--config" not in args:
        args = ["--config", str(default_config), *args]
    parser = TrlParser(
        tuple(settings),
        description=description,
        epilog=f"--config FILE reads any of these from a YAML file; the default is {default_config.name}.",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    try:
        parsed: tuple[Any, ...] = parser.parse_args_and_config(args)
    except (ValueError, OSError, yaml.YAMLError) as error:
        parser.exit(2, f"error: {error}\n")
    if "output_dir" not in _named(args):
        parsed[-1].output_dir = f"runs/{Path(args[args.index('--config') + 1]).stem}"
    return parsed


def _named(args: Sequence[str]) -> set[str]:
    """The fields that the YAML file or the command line sets."""
    path = args[args.index("--config") + 1]
    in_file = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    return {a[2:].partition("=")[0].replace("-", "_") for a in args if a.startswith("--")} | set(in_file)


@record  # a launcher of several ranks then shows the error of the rank that failed first
def start(run: Callable[..., Any], settings: Sequence[type], description: str | None, default_config: Path) -> None:
    """Parse the arguments and run; what a recipe's last line calls."""
    parsed = parse(settings, description, default_config)
    try:
        run(*parsed)
        PartialState().wait_for_everyone()  # a rank that leaves while another still works can take it down
        PartialState().destroy_process_group()
    except InputError as error:
        sys.exit(f"error: {error}")
    except (PushError, NotSavedError) as error:
        sys.exit(f"error: {error}")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        sys.exit(f"error: out of memory. {_LESS_MEMORY}")
    except KeyboardInterrupt:
        _leave(f"interrupted; {_what_there_is(parsed[-1].output_dir)}", signal.SIGINT)
    except Stopped as stopped:
        PartialState().wait_for_everyone()
        _leave(f"{stopped}; {_what_there_is(parsed[-1].output_dir)}", stopped.signal)


def _leave(message: str, by: int) -> NoReturn:
    """End the process as a shell reports a signal."""
    if not PartialState().process_index:
        print(f"\n{message}", file=sys.stderr)
    sys.exit(128 + by)


def _what_there_is(folder: str) -> str:
    if not checkpoints(Path(folder)):
        return f"what there is of the run is in {folder}; it has no checkpoint to go on from"
    return f"the run is in {folder}; go on with the same command, --output_dir {folder} and --resume auto"


_LESS_MEMORY = (
    "Lower --micro_train_batch_size (rows of a forward pass), --sampling_max_tokens (longest completion) or, with "
    "vLLM, --vllm_gpu_memory_utilization (what its cache takes); --gradient_checkpointing true helps as well"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory left, in the words of torch, vLLM or Python."""
    words = ("out of memory", "not enough memory", "can't allocate memory", "No available memory for the cache blocks")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)


class Stopped(Exception):
    """A signal asked the run to stop; it has saved a checkpoint and done so.

    Attributes:
        signal: its number.
    """

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.signal = number


class InputError(ValueError):
    """The user's input cannot be used; the message says what, where, and what to do."""


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a recipe's command line has them."""
    args: list[str] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            values = [json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            values = [str(item) for item in value]
        else:
            values = [str(value).lower() if isinstance(value, bool) else str(value)]
        args += [f"--{name}", *values]
    return args


def as_yaml(settings: dict[str, Any]) -> str:
    """Settings in a form that a YAML file can hold and `--config` reads."""
    return str(yaml.safe_dump(plain(settings), sort_keys=True, allow_unicode=True))


def plain(value: Any) -> Any:
    """`value` in the types of YAML and JSON; what they do not know, as text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
