"""What every recipe does with its command line: settings from YAML and flags, and errors in one line."""

from __future__ import annotations

from trl_ext._startup import START as START

# isort: split
import argparse
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from torch.distributed.elastic.multiprocessing.errors import record
from trl import TrlParser


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
    except KeyboardInterrupt:
        if not PartialState().process_index:
            print(f"\ninterrupted; what there is of the run is in {parsed[-1].output_dir}", file=sys.stderr)
        sys.exit(130)  # as a shell reports SIGINT


class InputError(ValueError):
    """The user's input cannot be used; the message says what, where, and what to do."""


def as_yaml(settings: dict[str, Any]) -> str:
    """Settings in a form that a YAML file can hold and `--config` reads."""
    return str(yaml.safe_dump(_plain(settings), sort_keys=True, allow_unicode=True))


def _plain(value: Any) -> Any:
    """`value` in YAML's own types."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
