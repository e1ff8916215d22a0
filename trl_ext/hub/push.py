"""Push a finished run to the Hugging Face Hub: model, tokenizer, card, figures.

    python -m trl_ext.hub push runs/grpo_math --repo_id me/my-model --private
    python -m trl_ext.hub card runs/grpo_math
    python -m trl_ext.hub merge runs/grpo_math runs/grpo_math-merged

The token comes from `hf auth login` or HF_TOKEN; it is not an argument here, so that no shell remembers it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from trl_ext.errors import InputError, PushError
from trl_ext.generation.model_source import locate
from trl_ext.hub.card import base_of, is_hub_id, write_model_card
from trl_ext.io import print_line
from trl_ext.runs.layout import RESOLVED, SUMMARY, RunFolder

_LEFT_OUT = ["_*", "checkpoint-*", "training_args.bin", "nonfinite_*", "*.log", ".*", RESOLVED]
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


def check(repo_id: str | None) -> None:
    """Refuse, before a run, an invalid repository id, no token, or a Hub that cannot be reached at its end either."""
    _check_name(repo_id)
    if get_token() is None:
        raise ValueError("push_to_hub: no token; `hf auth login`, or set HF_TOKEN")
    try:
        HfApi().whoami()
    except Exception as error:  # of whatever the client's transport raises
        raise ValueError(
            f"push_to_hub: {_in_short(error)}; check the network and the token (`hf auth whoami`)"
        ) from error


def _check_name(repo_id: str | None) -> None:
    if not repo_id:
        raise ValueError("push_to_hub needs --hub_model_id NAME or OWNER/NAME")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"hub_model_id {repo_id!r}: {error}") from error


def push(run: Path, repo_id: str, private: bool | None = None, merge_adapter: bool = False) -> str:
    """Upload a run's model, tokenizer, card, metrics and plots; returns the repository's address.

    Files that are there already are not uploaded again, so a push that failed half-way resumes where it stopped.

    Args:
        private: of a repository that is made now; None for the owner's default.
        merge_adapter: upload the base model with the adapter's change in it instead of the adapter.

    A `PushError` has the command that tries again; a `ValueError` says that the folder holds no finished run.
    """
    _check_name(repo_id)
    if not any((run / name).exists() for name in _WEIGHTS) or not RunFolder(run).is_finished:
        raise ValueError(f"{str(run)!r} holds no finished run: it needs {SUMMARY} and one of {', '.join(_WEIGHTS)}")
    base = None if merge_adapter else base_of(run)
    if base is not None and not is_hub_id(base):
        print_line(f"the adapter's base model is a folder here, {base}, --merge_adapter pushes it as well")
    try:
        api = HfApi()
        full_name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        write_model_card(run, full_name)
        with tempfile.TemporaryDirectory(dir=run, prefix="_merged_") as scratch:
            folder = merged(run, Path(scratch), full_name) if merge_adapter else run
            api.upload_folder(
                repo_id=full_name,
                folder_path=folder,
                ignore_patterns=_LEFT_OUT,
                commit_message="trl_ext: model, card and figures of a run",
            )
        return f"{api.endpoint}/{full_name}"
    except Exception as error:
        flags = {"--private": private, "--merge_adapter": merge_adapter}
        command = ["python", "-m", "trl_ext.hub", "push", str(run), "--repo_id", repo_id, *filter(flags.get, flags)]
        raise PushError(
            f"{_in_short(error)}. Everything is still in {run}; to push it later:\n  {shlex.join(command)}"
        ) from error


def merged(run: Path, scratch: Path, name: str) -> Path:
    """A copy of the run's folder with the whole model in the place of its adapter."""
    if not (run / "adapter_config.json").exists():
        raise ValueError(f"merge_adapter: {str(run)!r} holds no adapter")
    from trl_ext.generation.merging import merge_into

    for path in run.iterdir():
        if path.is_file() and not path.name.startswith(("_", "adapter_")):
            shutil.copy(path, scratch / path.name)
    merge_into(locate(str(run)), scratch)
    if (run / "generation_config.json").exists():
        shutil.copy(run / "generation_config.json", scratch)
    write_model_card(scratch, name)
    return scratch


def merge(adapter: Path, folder: Path) -> str:
    """Write the whole model that an adapter makes with its base into a new folder; a line that says so.

    Raises:
        InputError: there is no adapter, it cannot be merged, or the folder is not empty.
    """
    from trl_ext.generation.merging import merge_into

    source = locate(str(adapter))
    if source.adapter is None:
        raise InputError(f"{str(adapter)!r} holds a whole model already, and no adapter to merge")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{str(folder)!r} is there and not empty; name a new folder")
    merge_into(source, folder)
    return f"{folder}: {source.base} with the adapter {adapter}"


def hide_token(config: Any) -> None:
    """Move a token out of settings that are saved with every checkpoint, to where the client looks for it."""
    if config.hub_token:
        os.environ["HF_TOKEN"] = config.hub_token
        config.hub_token = None


def _in_short(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return f"the Hub answered {error.response.status_code} ({str(error).splitlines()[0]})"
    return f"the Hub cannot be used ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trl_ext.hub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pushing = commands.add_parser("push", help="upload a finished run")
    pushing.add_argument("run", type=Path, help="its folder")
    pushing.add_argument("--repo_id", required=True, metavar="NAME", help="NAME or OWNER/NAME on the Hub")
    pushing.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    pushing.add_argument("--merge_adapter", action="store_true", help="upload a whole model instead of an adapter")
    merging = commands.add_parser("merge", help="write the whole model that an adapter and its base make")
    merging.add_argument("run", type=Path, help="the adapter's folder, of a run or a checkpoint")
    merging.add_argument("folder", type=Path, help="a new folder")
    writing = commands.add_parser("card", help="write README.md into a run's folder and upload nothing")
    writing.add_argument("run", type=Path, help="its folder")
    args = parser.parse_args(arguments)
    try:
        if args.command == "push":
            print(push(args.run, args.repo_id, args.private, args.merge_adapter))
        elif args.command == "merge":
            print(merge(args.run, args.folder))
        else:
            write_model_card(args.run)
            print(args.run / "README.md")
    except (ValueError, OSError, PushError) as error:
        sys.exit(f"error: {error}")
