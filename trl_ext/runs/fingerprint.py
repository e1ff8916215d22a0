"""Fingerprints of what a stored result was made from: a model, its tokenizer, rows, and files that settings name.

A stored result is shown again, or continued, only where they are what they were. Local files are read whole: a hash of
names, sizes and times would not see weights that were exchanged for others of the same shape.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_ext.generation.gguf import file_named
from trl_ext.generation.model_source import ADAPTER, locate
from trl_ext.io import digest_of_files, plain, read_yaml

# Of a model's folder; a file is of the first group that has it. A checkpoint's state of the training is of none.
_GROUPS = {
    "configuration": ("config.json", "generation_config.json", "adapter_config.json", "*.py"),
    "tokenizer": ("*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "*.jinja", "*processor*.json"),
    "weights": ("*.safetensors", "*.bin", "*.index.json", "*.gguf"),
}
_OF_TRAINING = ("training_args.bin", "optimizer*", "reference*")
_WRITTEN = ("output_dir", "logging_dir", "resume", "resume_from_checkpoint", "export")  # by the run itself
_IN_WORDS = {"weights": "weights", "configuration": "configuration of the model", "tokenizer": "tokenizer"}


def fingerprint_of_model(name_or_path: str, revision: str | None = None) -> dict[str, str]:
    """A hash of weights, configuration and tokenizer: of a folder's files, or the commit of a model on the Hub.

    An adapter's weights include those of the model that it is an adapter of; a GGUF file is all three.

    Raises:
        InputError: an adapter's base model is not where it says.
    """
    if file := file_named(name_or_path):
        return dict.fromkeys(_GROUPS, digest_of_files([file]))
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        commit = _commit_on_hub(name_or_path, revision)
        return dict.fromkeys(_GROUPS, commit)
    hashes = {group: digest_of_files(files) for group, files in _files_by_group(folder).items()}
    if not (folder / ADAPTER).is_file():
        return hashes
    source = locate(name_or_path, revision)  # the base's place may be relative, or gone and made again
    of_base = fingerprint_of_model(source.base, source.revision)
    shared = ("weights", "configuration", *(["tokenizer"] if source.tokenizer == source.base else []))
    return {group: f"{own} on {of_base[group]}" if group in shared else own for group, own in hashes.items()}


def fingerprint_of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """A hash of all fields of the rows, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def fingerprints_of_named_files(settings: object) -> dict[str, str]:
    """A hash of every local file, folder of a model, and `file.py:function` that settings (or a command) name.

    Args:
        settings: texts in mappings and lists of any depth. A path with `{split}` names the files of all splits.
    """
    hashes: dict[str, str] = {}
    for text in sorted(set(texts_in(settings))):
        files = sorted(_files_named(text))
        if files:
            hashes[text] = digest_of_files(files)
        elif _is_model(Path(text)):
            hashes[text] = " ".join(fingerprint_of_model(text).values())
    return hashes


def texts_in(settings: object) -> Iterator[str]:
    """The texts of settings or of a command that may name files, of YAML files among them too; no place to write to."""
    for text in _texts_of(plain(settings)):
        yield text
        if text.endswith((".yaml", ".yml")) and Path(text).is_file():
            yield from _texts_of(plain(read_yaml(Path(text))))


def in_words(changed: Iterable[str]) -> str:
    """The names of fingerprints as a person reads them."""
    known = list(_IN_WORDS)
    names = sorted(changed, key=lambda name: known.index(name) if name in known else len(known))
    *others, last = [_IN_WORDS.get(name, name) for name in names]
    return f"{', '.join(others)} and {last}" if others else last


def _files_by_group(folder: Path) -> dict[str, list[Path]]:
    by_group: dict[str, list[Path]] = {group: [] for group in _GROUPS}
    for path in sorted(folder.iterdir()):
        if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _OF_TRAINING):
            groups = (g for g, patterns in _GROUPS.items() if any(fnmatch.fnmatch(path.name, p) for p in patterns))
            if (group := next(groups, None)) is not None:
                by_group[group].append(path)
    return by_group


def _commit_on_hub(name: str, revision: str | None) -> str:
    from transformers.utils.hub import cached_file, extract_commit_hash

    for file in ("config.json", "adapter_config.json"):
        try:
            path = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        except OSError:  # whatever loads the model says what is wrong
            return f"{name}, not found"
        if path is not None:
            return f"{name} at {extract_commit_hash(path, None)}"
    return f"{name}, not found"


def _is_model(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", "adapter_config.json"))


def _texts_of(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [item for name, item in value.items() if name not in _WRITTEN]
    if isinstance(value, list):
        flags = ["", *(item.removeprefix("--") if isinstance(item, str) else "" for item in value)]
        for item in (item for item, flag in zip(value, flags, strict=False) if flag not in _WRITTEN):
            yield from _texts_of(item)
    elif isinstance(value, str) and value and len(value) < 4096 and "\0" not in value:
        yield value


def _files_named(text: str) -> Iterator[Path]:
    path = Path(re.sub(r"(?<=\.py):\w+$", "", text))
    try:
        if "{split}" in text:
            yield from (file for file in path.parent.glob(path.name.replace("{split}", "*")) if file.is_file())
        elif path.is_file():
            yield path
        elif not _is_model(path):
            yield from path.glob("*.gguf")
    except OSError:  # no path at all, such as a text that is too long for one
        return
