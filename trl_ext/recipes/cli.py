"""What every recipe does with its command line: settings from YAML and flags, and errors in one line."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from accelerate import PartialState
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from transformers.trainer import TRAINER_STATE_NAME
from trl import TrlParser

from trl_ext.compat import install
from trl_ext.errors import InputError, NotSavedError, PushError, ServerError, SettingsError, Stopped
from trl_ext.generation.engine_choice import choosing_by_model, note_model
from trl_ext.hosts.launch import check_launch, warning_of_locks
from trl_ext.hosts.process_group import explain_network_error, join, learn_hosts, leave_at_exit
from trl_ext.hosts.shared_folder import refuse_different, refuse_unshared
from trl_ext.io import read_json, read_yaml, write_json
from trl_ext.recipes.optional import check_kinds, is_none, resolve_none, shapes_of, take_words_for_none
from trl_ext.recipes.settings_help import help_on, other_words, page_of, settings_in, topic_of
from trl_ext.recipes.user_errors import lines_of_user_files, summary_of
from trl_ext.redaction import masked_names, redact, redact_text
from trl_ext.registry import unknown
from trl_ext.runs.checkpoints import checkpoints
from trl_ext.runs.layout import PARTS
from trl_ext.training.settings import OF_COLOCATED


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and leaves the line breaks of the description alone."""


class _Parser(TrlParser):
    """TRL's parser, whose errors are one line instead of the usage of some hundred flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._shapes = shapes_of(self.dataclass_types)
        self.left_out: Sequence[str] = ()  # of a YAML file's settings
        take_words_for_none(self, self._shapes)
        # argparse knows -0.1 as a number and takes -1e-5 for a flag
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise SettingsError(f"{redact_text(message)} (--help all lists every flag)")

    def check_names(self, flags: Iterable[str], fields: Iterable[str], config: Path) -> None:
        """Refuse flags and YAML fields that do not exist, with the nearest existing name."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        fields = [f"--{name}" for name in fields if name != "env"]
        words = other_words(self.dataclass_types)
        for name, where in [*((flag, "") for flag in flags), *((field, f" in {config}") for field in fields)]:
            if name not in known:
                nearest = words.get(name[2:]) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
                hint = f" Did you mean {nearest}?" if nearest else ""
                raise ValueError(f"unknown setting {name}{where}.{hint} --help all lists every one")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if value is not None:  # none of the choices is a word for none
            super()._check_value(action, value)

    def parse_known_args(self, *args: object, **kwargs: object) -> Any:
        """As argparse's, with None and empty lists where the words for them are given."""
        namespace, rest = super().parse_known_args(*args, **kwargs)
        resolve_none(namespace, self._shapes)
        self.has_folder = not is_none(getattr(namespace, "output_dir", None))
        note_model(getattr(namespace, "model_name_or_path", None))  # settings are made of the namespace next
        return namespace, rest

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        """Take a YAML file's settings, also by the name that another recipe has for one."""
        names_by_setting: dict[str, list[str]] = {}
        for name in settings:
            option = self._option_string_actions.get(f"--{name}")
            names_by_setting.setdefault(name if option is None else option.dest, []).append(name)
        for names in names_by_setting.values():
            if len(names) > 1:
                raise ValueError(f"{' and '.join(names)} are one setting, and the file has both: leave one out")
        settings = {
            setting: settings[name] for setting, (name,) in names_by_setting.items() if setting not in self.left_out
        }
        check_kinds(settings, self._shapes)
        for action in self._actions:  # argparse checks those of the command line only
            value = settings.get(action.dest)
            if action.choices and isinstance(value, str) and value not in action.choices and not is_none(value):
                raise unknown(action.dest, value, list(map(str, action.choices)))
        return list(super().set_defaults_with_config(**settings))


def parse(
    settings: Sequence[type], description: str | None, default_config: Path, arguments: Sequence[str] | None = None
) -> tuple[Any, ...]:
    """`read_settings` for a program: prints help, or an error in one line, and then ends the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if (topic := topic_of(given)) == "all":
        given = ["--help"]  # which argparse answers
    elif topic is not None:
        listed = settings_in(settings, _fields(default_config))
        print(help_on(topic, listed) if topic else page_of(description, f"{default_config.stem}.py", listed))
        sys.exit(0)
    try:
        with choosing_by_model():
            return read_settings(settings, description, default_config, given)
    except SettingsError as error:
        print(f"{error.frames}error: {error}", file=sys.stderr)
        sys.exit(2)


def read_settings(
    settings: Sequence[type], description: str | None, default_config: Path, arguments: Sequence[str] | None = None
) -> tuple[Any, ...]:
    """Arguments from a YAML file, then from the command line, into dataclasses, or a `SettingsError`.

    The last of the dataclasses has `output_dir`, by default `runs/` and the YAML file's name.
    """
    install()
    config, args = _config_file(list(sys.argv[1:] if arguments is None else arguments), default_config)
    parser = _Parser(
        tuple(settings),
        description=description,
        epilog=f"--config FILE reads any of these from a YAML file; the default is {default_config.name}.",
        formatter_class=_HelpFormatter,
    )
    try:
        flags = [arg.partition("=")[0] for arg in args if arg.startswith("--")]
        given = {flag[2:].replace("-", "_") for flag in flags}
        fields = _fields(config)
        if not {"-h", "--help"} & set(args):
            parser.check_names(flags, fields, config)
            _refuse_masked(config, {name: value for name, value in fields.items() if name not in given})
            parser.left_out = _of_another_engine(config, fields, args, given)
        parsed: tuple[Any, ...] = parser.parse_args_and_config(["--config", str(config), *args])
    except SettingsError:
        raise
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise SettingsError(redact_text(str(error)), redact_text(lines_of_user_files(error))) from error
    except Exception as error:
        message, own = _message_of(error)
        raise SettingsError(redact_text(message), redact_text(own)) from error
    if not parser.has_folder:
        parsed[-1].output_dir = f"runs/{config.stem}"
    return parsed


def _config_file(args: list[str], default: Path) -> tuple[Path, list[str]]:
    """The YAML file that `--config FILE` or `--config=FILE` names, and the other arguments."""
    parser = _Parser(add_help=False)
    parser.add_argument("--config", type=Path, default=default)
    known, rest = parser.parse_known_args(args)
    if not known.config.is_file():
        raise SettingsError(f"--config {known.config}: there is no such file (working directory: {Path.cwd().name!r})")
    return known.config, rest


def _of_another_engine(
    config: Path, fields: Mapping[str, Any], args: Sequence[str], given: Collection[str]
) -> list[str]:
    """What a YAML file says of a colocated engine, where the command line asks for a server in its place."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--vllm_mode")
    asked = parser.parse_known_args(args)[0].vllm_mode
    if asked != "server" or fields.get("vllm_mode") == "server":
        return []
    names = [name for name in fields if name in OF_COLOCATED and name not in given]
    if names and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{', '.join(names)} of {config.name} left out: a vLLM server's own command line sets this", flush=True)
    return names


def _refuse_masked(config: Path, settings: Mapping[str, Any]) -> None:
    """Refuse settings whose secrets were masked when the file was written."""
    if names := list(dict.fromkeys(masked_names(settings))):
        raise ValueError(
            f"{config}: {', '.join(names)}: the secret was masked when this file was written; give it again, in the "
            f"file or as --{names[0].partition('.')[0]}"
        )


def _fields(config: Path) -> dict[str, Any]:
    content = read_yaml(config)
    return {str(k): v for k, v in content.items()} if isinstance(content, dict) else {}  # TRL's parser refuses others


def start(run: Callable[..., Any], settings: Sequence[type], description: str | None, default_config: Path) -> None:
    """Parse the arguments and run; what a recipe's last line calls."""
    # before DeepSpeed is initialized, which compiles
    if os.environ.get("LOCAL_RANK", "0") == "0" and (warning := warning_of_locks()):
        print(warning, file=sys.stderr)
    try:
        check_launch()
    except InputError as error:
        sys.exit(f"error: {error}")
    parsed = parse(settings, description, default_config)  # joins the group of processes
    leave_at_exit()
    try:
        _check_hosts(parsed[-1])
        run(*parsed)
        PartialState().wait_for_everyone()  # a rank that leaves while another still works can take it down
    except (InputError, PushError, NotSavedError) as error:
        sys.exit(f"error: {redact_text(str(error))}")
    except KeyboardInterrupt:
        _leave("interrupted", signal.SIGINT, parsed[-1].output_dir)
    except Stopped as stopped:
        PartialState().wait_for_everyone()
        _leave(str(stopped), stopped.signal, parsed[-1].output_dir)
    except ServerError as error:
        _fail(str(error), parsed[-1].output_dir)
    except Exception as error:
        get_error_handler().record_exception(error)  # a launcher shows that of the rank that failed first
        report = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # of this rank, which torchrun prints
        if report.is_file():
            write_json(report, redact(read_json(report)))
        message, own = _message_of(error)
        _fail(message, parsed[-1].output_dir, own)


def _check_hosts(settings: Any) -> None:
    """Refuse, on every rank, what would end well and be wrong on several hosts, before anything is read or made."""
    join(settings.ddp_timeout)
    learn_hosts()
    refuse_unshared(Path(settings.output_dir), "output_dir")
    resume = getattr(settings, "resume", None) or getattr(settings, "resume_from_checkpoint", None)
    if resume not in (None, "auto"):
        refuse_different(Path(resume) / TRAINER_STATE_NAME, "the checkpoint")


def _message_of(error: Exception) -> tuple[str, str]:
    """An error of another host, or of the user's own files, in a line, and the lines of those files.

    Any other ends the process with its traceback, without secrets, since it may end in a log.
    """
    if (line := explain_network_error(error)) is not None:
        return line, ""
    advice = _LESS_MEMORY if is_out_of_memory(error) else ""
    if not advice and (own := lines_of_user_files(error)):
        return summary_of(error), own
    print(redact_text("".join(traceback.format_exception(error))) + advice, file=sys.stderr)
    sys.exit(1)


def _leave(message: str, by: int, folder: str) -> NoReturn:
    """End the process as a shell reports a signal."""
    if not PartialState().process_index:
        print(f"\n{message}; {_how_to_resume(folder)}", file=sys.stderr)
    sys.exit(128 + by)


def _fail(message: str, folder: str, frames: str = "") -> NoReturn:
    sys.exit(redact_text(f"\n{frames}error: {message}; {_how_to_resume(folder)}"))


def _how_to_resume(folder: str) -> str:
    saved = checkpoints(Path(folder))
    if graded := [part for part in Path(folder).glob(PARTS) if part.stat().st_size]:
        count = sum(len(part.read_bytes().splitlines()) for part in graded)
        return f"{count} graded samples are in {folder}; the same command with --output_dir {folder} draws the rest"
    if not saved:
        return f"partial output is in {folder}; there is no checkpoint to resume from"
    last = saved[0].name
    return f"the run is in {folder} up to {last}; resume with the same command, --output_dir {folder} and --resume auto"


_LESS_MEMORY = (
    "error: out of memory. Lower --micro_train_batch_size (rows of a forward pass), --sampling_max_tokens (longest "
    "completion) or, with vLLM, --vllm_gpu_memory_utilization (what its cache takes); --gradient_checkpointing true "
    "helps as well"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory left, in the words of torch, vLLM or Python."""
    words = ("out of memory", "not enough memory", "can't allocate memory", "No available memory for the cache blocks")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)
