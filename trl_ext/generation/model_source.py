"""What a user names as a model -> what is loaded for it: a whole model, or an adapter and its base.

Every program that takes a model asks `locate`, so that each of them knows the same folders and refuses the others in
the same words, before anything is loaded.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.generation.gguf import CONVERTED, converted_folder, file_named
from trl_ext.io import read_json
from trl_ext.registry import unknown

CONFIG, ADAPTER = "config.json", "adapter_config.json"
MERGE = "python -m trl_ext.hub merge"
_INDEX = "*.index.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", _INDEX)
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_TOKENIZER = ("tokenizer_config.json", "tokenizer.json")
_RESOLVED = "resolved.json"  # the settings of the run that left a folder, as trl_ext.runs.layout has it
_BASE = "base_model_name_or_path"
_QUANTIZATION = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "dtype")


@dataclass(frozen=True)
class ModelSource:
    """A model as it was named, and what it is loaded from."""

    name: str  # as the user gave it
    base: str  # folder or Hub id of a whole model: this one, or the one that the adapter is of
    tokenizer: str  # folder or Hub id
    adapter: Path | None = None  # its folder
    revision: str | None = None  # of `base`
    dtype: str | None = None  # that the run which left the adapter had loaded the base in; None if it does not say
    quantization: tuple[tuple[str, Any], ...] = ()  # of the base in that run, by TRL's settings

    @property
    def known(self) -> dict[str, str]:
        """Arguments of `from_pretrained` for `base`."""
        return {"revision": self.revision} if self.revision else {}


def locate(name: str, revision: str | None = None) -> ModelSource:
    """What has to be loaded for a model of this name.

    Args:
        name: a folder of a whole model, of an adapter, or of a checkpoint of either; a GGUF file, a folder with one, or
            the name of a model in a package (`PACKAGED`); or a Hub id.
        revision: of the Hub's repository; where `name` is an adapter's folder, of the base's.

    Raises:
        InputError: there is no such folder, or it holds no model that can be loaded; says what to give instead.
    """
    path = Path(name).expanduser()
    if file := file_named(name):
        folder = str(converted_folder(file))
        return ModelSource(name, folder, folder)
    if path.is_dir():
        return _in_folder(name, path, revision)
    if path.is_file():
        raise InputError(f"model {name!r} is a file: give its folder, {str(path.parent)!r}")
    if not _looks_like_a_hub_id(name, path):
        raise InputError(str(unknown("model folder", name, set(_models_in(path.parent)))))
    adapter = _adapter_on_hub(name, revision)
    if adapter is not None:
        return replace(_adapter_in(name, adapter, None), dtype=None)
    return ModelSource(name, name, name, revision=revision)


def loadable(name: str, revision: str | None = None) -> str:
    """The name by which everything loads a model: of a GGUF file the folder that it is converted to, else as it is.

    Raises:
        InputError: as `locate` does for a GGUF file.
    """
    return name if file_named(name) is None else locate(name, revision).base


def _in_folder(name: str, path: Path, revision: str | None) -> ModelSource:
    weights = [weight for pattern in _WEIGHTS for weight in path.glob(pattern) if weight.name not in _ADAPTER_WEIGHTS]
    if (path / ADAPTER).is_file():
        if weights:
            raise InputError(
                f"model {name!r}: the folder holds a whole model ({weights[0].name}) and an adapter ({ADAPTER}): move "
                "one of them into another folder"
            )
        if not any((path / file).is_file() for file in _ADAPTER_WEIGHTS):
            raise InputError(f"model {name!r} has an {ADAPTER} and {_why_no_weights(path, _ADAPTER_WEIGHTS[0])}")
        return _adapter_in(name, path, revision)
    if not (path / CONFIG).is_file():
        raise InputError(f"model {name!r}: the folder has no {CONFIG}, so it holds no model{_instead(path)}")
    if not weights:
        raise InputError(f"model {name!r} has a {CONFIG} and {_why_no_weights(path, 'model.safetensors')}")
    for index in (weight for weight in weights if weight.name.endswith(_INDEX[1:])):
        parts = sorted(set(_json(index)["weight_map"].values()))
        if missing := [part for part in parts if not (path / part).is_file()]:
            raise InputError(
                f"model {name!r}: {missing[0]} is missing, one of {len(parts)} files that {index.name} lists: copy or "
                "download the model again"
            )
    return ModelSource(name, str(path), str(path), revision=revision)


def _adapter_in(name: str, folder: Path, revision: str | None) -> ModelSource:
    """The adapter in a folder, whose base may be anywhere."""
    file = folder / ADAPTER
    settings = _json(file)
    given = settings.get(_BASE)
    if not isinstance(given, str) or not given:
        raise InputError(f"{file}: {_BASE} is {given!r}: put the place of the adapter's base model there")
    try:
        base = locate(
            _converted_again(folder, given) or _from_there(folder, given), settings.get("revision") or revision
        )
    except InputError as error:
        raise InputError(f"{file}: {_BASE}: {error}. Put the place of the adapter's base model there") from error
    if base.adapter is not None:
        merge = f"{MERGE} {base.name} {base.name}-merged"
        raise InputError(f"{file}: {_BASE} {given!r} is an adapter itself: {merge}, and put {base.name}-merged there")
    has_tokenizer = any((folder / known).is_file() for known in _TOKENIZER)
    tokenizer = str(folder) if has_tokenizer else base.tokenizer
    return ModelSource(
        name, base.base, tokenizer, folder, base.revision, _dtype_of_run(folder), _quantization_of_run(folder)
    )


def _quantization_of_run(folder: Path) -> tuple[tuple[str, Any], ...]:
    settings = _settings_of_run(folder)
    if not (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return ()
    return tuple((name, settings[name]) for name in _QUANTIZATION if settings.get(name) is not None)


def _from_there(folder: Path, base: str) -> str:
    """A base's relative path as it is meant, where the working directory is another one than the run's was."""
    path = Path(base).expanduser()
    if path.is_absolute() or path.is_dir():
        return base
    above = [folder.resolve(), *folder.resolve().parents]
    return next((str(parent / path) for parent in above if (parent / path / CONFIG).is_file()), base)


def _converted_again(folder: Path, base: str) -> str | None:
    """A base that was a GGUF file's and is gone from the cache, made again from the file that the run names."""
    wanted, name = Path(base).expanduser(), _setting_of_run(folder, "model_name_or_path")
    if wanted.is_dir() or not wanted.name.startswith(CONVERTED) or name is None or (file := file_named(name)) is None:
        return None
    made = converted_folder(file)
    return str(made) if made.name == wanted.name else None


def _dtype_of_run(folder: Path) -> str | None:
    """The `dtype` of the run that left a folder."""
    dtype = _setting_of_run(folder, "dtype")
    return dtype if dtype != "auto" else None


def _setting_of_run(folder: Path, name: str) -> str | None:
    """A setting of the run that left a folder, or of the one whose checkpoint it is; None if it is no text."""
    value = _settings_of_run(folder).get(name)
    return value if isinstance(value, str) else None


def _settings_of_run(folder: Path) -> dict[str, Any]:
    settings_file = next((file for place in (folder, folder.parent) if (file := place / _RESOLVED).is_file()), None)
    return _json(settings_file) if settings_file else {}


def _why_no_weights(path: Path, wanted: str) -> str:
    """Continues a sentence about a folder that describes a model and has no weights of it."""
    if (path / "zero_to_fp32.py").is_file():
        return (
            f"its weights are DeepSpeed's, sharded over the ranks: python {path}/zero_to_fp32.py {path} {path} "
            "--safe_serialization makes them whole; stage3_gather_16bit_weights_on_model_save: true saves whole ones"
        )
    if sharded := next(iter(path.glob("pytorch_model_fsdp_*")), None):
        return f"its weights are FSDP's, sharded over the ranks: accelerate merge-weights {sharded} {path}"
    return f"no {wanted}: its weights were not saved, or not copied{_instead(path)}"


def _instead(path: Path) -> str:
    """Which folder to give in the place of one without a model."""
    if last := last_checkpoint(path):
        return f". It is a run without a final model, stopped or at work: give its last checkpoint, {str(last)!r}"
    if (path / _RESOLVED).is_file():
        return ". It is a run without a final model and without a checkpoint: train again, or give another folder"
    models = [model for model in _models_in(path) if Path(model).name != "base"]
    return f". Models in it: {', '.join(map(repr, models))}" if models else ""


def last_checkpoint(run: Path) -> Path | None:
    """The newest `checkpoint-N` of a run that holds a model or an adapter."""
    numbered = [(int(path.name[11:]), path) for path in run.glob("checkpoint-*") if path.name[11:].isdecimal()]
    return next((path for _, path in sorted(numbered, reverse=True) if _holds_a_model(path)), None)


def _holds_a_model(path: Path) -> bool:
    return (path / CONFIG).is_file() or (path / ADAPTER).is_file()


def _models_in(folder: Path) -> list[str]:
    return sorted({str(config.parent) for config in folder.glob("*/*config.json") if _holds_a_model(config.parent)})


def _looks_like_a_hub_id(name: str, path: Path) -> bool:
    """Whether a name without a folder is meant for the Hub, where it would be looked for during a minute."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        return False
    return path.parent == Path() or not (path.parent.name == "runs" or _models_in(path.parent))


@functools.cache
def _adapter_on_hub(name: str, revision: str | None) -> Path | None:
    """Where an adapter of the Hub has been downloaded to; None for a whole model, or where nothing can be known."""
    from huggingface_hub import snapshot_download
    from transformers.utils.hub import cached_file

    def has(file: str) -> bool:
        quiet = {
            f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")
        }
        return cached_file(name, file, revision=revision, **quiet) is not None

    try:
        if has(CONFIG) or not has(ADAPTER):
            return None
        kept = ["*.json", "*.jinja", "*.model", "*.txt", *_ADAPTER_WEIGHTS]
        return Path(snapshot_download(name, revision=revision, allow_patterns=kept))
    except (OSError, ValueError):  # what is wrong is said when the model's configuration is read
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        contents = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(contents, dict):
        raise InputError(f"{path}: not a JSON object")
    return contents
