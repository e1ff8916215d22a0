"""The header of a GGUF file: its metadata and its table of tensors, read without the weights.

Everything that can be wrong with a file is found here, before anything is converted. The layout is that of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # the first one counted in 32 bits; nobody has such a file any more
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header has it."""

    name: str
    shape: tuple[int, ...]  # the fastest dimension last, as in torch
    type: str  # GGML's name, such as Q4_K
    bytes: int
    offset: int  # from the start of the data

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a file says of its model."""

    file: Path
    fields: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of it."""
        return str(self.fields["general.architecture"])

    def elements_by_type(self) -> dict[str, int]:
        """How many elements are stored in each type, those of most elements first."""
        elements: Counter[str] = Counter()
        for tensor in self.tensors.values():
            elements[tensor.type] += tensor.numel
        return dict(elements.most_common())


def is_gguf(path: Path) -> bool:
    """Whether a file is named as a GGUF file, or is one whatever its name."""
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """The header of a file that holds all that it lists, of an architecture that can be read.

    Raises:
        InputError: it cannot be read; says what is wrong with it, and what to do.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InputError(f"{path}: not a GGUF file: it does not begin with {MAGIC.decode()}. Download it again")
        _refuse_split(path)
        if find_spec("gguf") is None:
            raise InputError(
                f"{path}: a GGUF file is read by the package gguf, which is not installed: pip install gguf"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            header, data = _parse(path, _Cursor(content, path))
            _refuse_truncated(header, data, len(content))
    _refuse_unknown_architecture(header)
    return header


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self.content, self.path, self.at = content, path, 0

    def number(self, kind: str) -> Any:
        """The next number, in a format of `struct`."""
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        """The next `count` numbers."""
        size = struct.calcsize(f"<{kind}") * count
        self._refuse_end(size)
        values = struct.unpack_from(f"<{count}{kind}", self.content, self.at)
        self.at += size
        return values

    def text(self) -> str:
        """The next text."""
        length = self.number("Q")
        self._refuse_end(length)
        self.at += length
        return self.content[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """The next value of one of GGUF's types."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item_kind, count = self.number("I"), self.number("Q")
            if item_kind in _NUMBERS:
                return list(self.numbers(_NUMBERS[item_kind], count))
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _NUMBERS:
            raise InputError(f"{self.path}: its header has a value of type {kind}, which GGUF does not know: {_AGAIN}")
        return self.number(_NUMBERS[kind])

    def _refuse_end(self, size: int) -> None:
        if self.at + size > len(self.content):
            raise InputError(
                f"{self.path}: truncated: it ends within its header, after {len(self.content)} bytes: {_AGAIN}"
            )


_AGAIN = "copy or download it again"


def _parse(path: Path, cursor: _Cursor) -> tuple[Header, int]:
    """The header, and where the data begin."""
    cursor.at = len(MAGIC)
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise InputError(
            f"{path}: GGUF version {version} (of another byte order, or too old): convert it again with today's "
            f"llama.cpp; versions {' and '.join(map(str, _VERSIONS))} are read"
        )
    count, entries = cursor.numbers("Q", 2)
    fields: dict[str, Any] = {}
    for _ in range(entries):
        name = cursor.text()
        fields[name] = cursor.value(cursor.number("I"))
    if not isinstance(fields.get("general.architecture"), str):
        raise InputError(f"{path}: general.architecture is missing from its metadata, so it holds no model: {_AGAIN}")
    tensors = [_tensor(path, cursor) for _ in range(count)]
    step = int(fields.get("general.alignment", 32))
    return Header(path, fields, {tensor.name: tensor for tensor in tensors}), -(-cursor.at // step) * step


def _tensor(path: Path, cursor: _Cursor) -> TensorInfo:
    name = cursor.text()
    shape = tuple(reversed(cursor.numbers("Q", cursor.number("I"))))
    kind, offset = cursor.number("I"), cursor.number("Q")
    sizes = _type_sizes()
    if kind not in sizes:
        raise InputError(
            f"{path}: {name} is of quantization type {kind}, unknown to the installed gguf: pip install -U gguf"
        )
    label, block, size = sizes[kind]
    return TensorInfo(name, shape, label, math.prod(shape) // block * size, offset)


@functools.cache
def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """GGML's types by number: name, elements of a block, bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def _refuse_truncated(header: Header, data: int, size: int) -> None:
    for tensor in header.tensors.values():
        end = data + tensor.offset + tensor.bytes
        if end > size:
            raise InputError(
                f"{header.file}: truncated: {tensor.name} ends at byte {end}, and the file has {size}: {_AGAIN}"
            )


def _refuse_split(path: Path) -> None:
    if match := _SPLIT.search(path.name):
        whole = f"{path.name[: match.start()]}.gguf"
        raise InputError(
            f"{path}: one of {int(match[1])} parts of a model, which transformers reads whole only: "
            f"llama-gguf-split --merge {path.name[: match.start()]}-00001-of-{match[1]}.gguf {whole}, and give {whole}"
        )


def readable_architectures() -> list[str]:
    """The architectures that the installed transformers reads from GGUF, by its own names of them."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    names = set(GGUF_SUPPORTED_ARCHITECTURES)
    try:
        from transformers.integrations.gguf import GGUF_ARCHS  # since 5.17
    except ImportError:
        return sorted(names)
    return sorted(names | set(GGUF_ARCHS))


def _refuse_unknown_architecture(header: Header) -> None:
    def bare(name: str) -> str:
        return re.sub(r"[-_]", "", name.lower())

    known = readable_architectures()
    if bare(header.architecture) not in map(bare, known):
        raise InputError(
            f"{header.file}: general.architecture is {header.architecture!r}, which transformers cannot read from "
            f"GGUF; it reads {', '.join(known)}. Give the original checkpoint, a folder of safetensors"
        )
