"""What an optimizer keeps of each weight, by its source: of packages that are not installed or that need a GPU.

torch, transformers and bitsandbytes, where that is installed, are asked instead (`optimizers`). Where a package is
installed, a test counts the state of its real optimizer and compares it with what is said here.

Letters: n elements of a weight; m and l, the shorter and the longer side of a matrix; r, the rank of a projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch

SHARED = "map"  # begins the name of a table that all quantized weights are looked up in
_BLOCK = 256  # elements of quantized state with a scale of their own
_LEAST_QUANTIZED = 4096  # elements; of a smaller weight the state is not quantized
WITHIN_BACKWARD = "it updates weights within the backward pass, which is not modeled"


@dataclass(frozen=True)
class Weight:
    """A parameter that is trained."""

    shape: tuple[int, ...]
    itemsize: int  # bytes of an element, of the weight and of its gradient
    is_projected: bool = False  # a linear layer's, of `optim_target_modules`
    is_embedding: bool = False
    options: Mapping[str, str] = field(default_factory=dict)  # of `optim_args`

    @property
    def elements(self) -> int:
        """In number."""
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        """Of a projected gradient, as transformers has it by default."""
        return int(self.options.get("rank", 128))


Kept = Callable[[Weight], dict[str, int]]  # bytes of each tensor by its name; of those that are `SHARED` there is one


@dataclass(frozen=True)
class BySource:
    """An optimizer whose package is not asked."""

    package: str  # that has it, as it is imported
    source: str  # where it is to be read what it keeps
    kept: Kept
    said: str  # the same in words, as bytes for float32 weights where it depends on their type
    unmodeled: str | None = None  # why a step of it is not estimated


def by_source(name: str) -> BySource | None:
    """How the state of transformers' `optim` of this name is known without asking it; None: it is asked."""
    found = SOURCES.get(name)
    asks = found is not None and found.package == "bitsandbytes" and find_spec("bitsandbytes") is not None
    return None if asks else found


def _copies(count: int, width: int | None = None) -> Kept:
    """So many tensors of the weight's shape, with elements of `width` bytes or as the weight's."""
    return lambda weight: _numbered([weight.elements * (width or weight.itemsize)] * count)


def _numbered(sizes: Sequence[int]) -> dict[str, int]:
    return {f"state {place}": size for place, size in enumerate(sizes)}


def _quantized(elements: int, states: int) -> dict[str, int]:
    """Bitsandbytes' states of a byte, in blocks with a scale in float32 each; a small weight's in float32."""
    if elements < _LEAST_QUANTIZED:
        return _numbered([4 * elements] * states)
    maps = {f"{SHARED} {place}": 4 * 256 for place in range(min(states, 2))}  # with a sign, and without
    return maps | _numbered([elements] * states + [4 * math.ceil(elements / _BLOCK)] * states)


def _bitsandbytes_8bit(states: int) -> Kept:
    """As transformers asks for it: with embeddings in 32 bits."""
    in_32_bits = _copies(states, 4)
    return lambda weight: in_32_bits(weight) if weight.is_embedding else _quantized(weight.elements, states)


def _torchao(bits: int) -> Kept:
    def kept(weight: Weight) -> dict[str, int]:
        count = weight.elements
        if count < _LEAST_QUANTIZED or count % _BLOCK:
            return _numbered([4, *[count * weight.itemsize] * 2])
        return _numbered([4, *[count * bits // 8, 4 * count // _BLOCK, 4 * 2**bits] * 2])

    return kept


def _any_precision(weight: Weight) -> dict[str, int]:
    given = weight.options
    dtypes = [given.get(f"{name}_dtype", "float32") for name in ("momentum", "variance")]
    if given.get("use_kahan_summation", "False").lower() in ("true", "1", "yes", "y", "t", "on"):
        dtypes.append(given.get("compensation_buffer_dtype", "bfloat16"))
    return _numbered([4, *(weight.elements * getattr(torch, dtype).itemsize for dtype in dtypes)])


def _stable_adamw(weight: Weight) -> dict[str, int]:
    """With Kahan's summation where weights have 16 bits."""
    copies = 3 if weight.itemsize == 2 else 2
    return _numbered([weight.itemsize, *[weight.elements * weight.itemsize] * copies])


def _factored(shape: tuple[int, ...]) -> list[int]:
    """Adafactor's second moments in float32: of a matrix's rows and columns."""
    if len(shape) < 2:
        return [4 * math.prod(shape)]
    return [4 * math.prod(shape[:-1]), 4 * math.prod((*shape[:-2], shape[-1]))]


def _low_rank(weight: Weight) -> tuple[int, int, int]:
    """The side m that is projected to r, the other one l, and r."""
    small, large = sorted(weight.shape)
    return small, large, min(weight.rank, small)


def _galore_projection(weight: Weight, itemsize: int) -> dict[str, int]:
    """Of the singular vectors the first r; in float32 as a view, so that all m are kept."""
    small, _, rank = _low_rank(weight)
    return {"projection": itemsize * small * (small if itemsize == 4 else rank)}


def _galore(weight: Weight) -> dict[str, int]:
    if not weight.is_projected:
        return _copies(2)(weight)
    _, large, rank = _low_rank(weight)
    return _galore_projection(weight, weight.itemsize) | _numbered([weight.itemsize * rank * large] * 2)


def _galore_8bit(weight: Weight) -> dict[str, int]:
    if not weight.is_projected:
        return _quantized(weight.elements, 2)
    _, large, rank = _low_rank(weight)
    return _galore_projection(weight, weight.itemsize) | _quantized(rank * large, 2)


def _galore_adafactor(weight: Weight) -> dict[str, int]:
    """Gradients are projected in float32 here."""
    if not weight.is_projected:
        return _numbered([4, *_factored(weight.shape)])
    _, large, rank = _low_rank(weight)
    return _galore_projection(weight, 4) | _numbered([4, *_factored((large, rank))])


def _apollo(weight: Weight) -> dict[str, int]:
    """A random projection has r rows or columns, also where that is more than m."""
    if not weight.is_projected:
        return _copies(2)(weight)
    small, large = sorted(weight.shape)
    states = _numbered([weight.itemsize * weight.rank * large] * 2)
    return {"projection": weight.itemsize * weight.rank * small} | states


def _adalomo(weight: Weight) -> dict[str, int]:
    return _numbered(_factored(weight.shape))


_BITSANDBYTES = "https://github.com/bitsandbytes-foundation/bitsandbytes"
_GALORE = "https://github.com/jiaweizzhao/GaLore"
_APOLLO = "https://arxiv.org/abs/2412.05270"
_TORCHAO = "https://github.com/pytorch/ao/tree/main/torchao/optim"
_LOMO = "https://github.com/OpenLMLab/LOMO"
_SCHEDULE_FREE = "https://github.com/facebookresearch/schedule_free"
_FOREIGN = "it is for another device than a GPU"


def _of_bitsandbytes(states: int, bits: int) -> BySource:
    if bits == 32:
        return BySource("bitsandbytes", _BITSANDBYTES, _copies(states, 4), f"{4 * states} n")
    said = f"{states} (n + 4 n / 256); {4 * states} n of embeddings and below 4,096 elements"
    return BySource("bitsandbytes", _BITSANDBYTES, _bitsandbytes_8bit(states), said)


_LOW_RANK = {  # each also with `_layerwise`
    "galore_adamw": BySource("galore_torch", _GALORE, _galore, "4 m m + 8 r l projected, 8 n others"),
    "galore_adamw_8bit": BySource(
        "galore_torch", _GALORE, _galore_8bit,
        "4 m m + 2 (r l + 4 r l / 256) projected, 2 (n + 4 n / 256) others",
    ),
    "galore_adafactor": BySource(
        "galore_torch", _GALORE, _galore_adafactor, "4 (m m + r + l) projected, 4 (m + l) others"
    ),
    "apollo_adamw": BySource("apollo_torch", _APOLLO, _apollo, "4 (r m + 2 r l) projected, 8 n others"),
}  # fmt: skip

SOURCES: dict[str, BySource] = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), _of_bitsandbytes(2, 8)),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), _of_bitsandbytes(3, 8)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), _of_bitsandbytes(1, 8)),
    "paged_adamw_32bit": _of_bitsandbytes(2, 32),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), _of_bitsandbytes(3, 32)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), _of_bitsandbytes(1, 32)),
    "adamw_torch_xla": BySource("torch_xla", "https://docs.pytorch.org/xla", _copies(2), "8 n", _FOREIGN),
    "adamw_torch_npu_fused": BySource("torch_npu", "https://github.com/Ascend/pytorch", _copies(2), "8 n", _FOREIGN),
    "adamw_anyprecision": BySource(
        "torchdistx", "https://github.com/pytorch/torchdistx", _any_precision, "8 n, by optim_args down to 4 n"
    ),
    "adamw_torch_4bit": BySource("torchao", _TORCHAO, _torchao(4), "2 (n / 2 + 4 n / 256); 8 n below 4,096 elements"),
    "adamw_torch_8bit": BySource("torchao", _TORCHAO, _torchao(8), "2 (n + 4 n / 256); 8 n below 4,096 elements"),
    "grokadamw": BySource("grokadamw", "https://github.com/cognitivecomputations/grokadamw", _copies(3), "12 n"),
    "schedule_free_radam": BySource("schedulefree", _SCHEDULE_FREE, _copies(2), "8 n"),
    "schedule_free_adamw": BySource("schedulefree", _SCHEDULE_FREE, _copies(2), "8 n"),
    "schedule_free_sgd": BySource("schedulefree", _SCHEDULE_FREE, _copies(1), "4 n"),
    "stable_adamw": BySource("optimi", "https://github.com/warner-benjamin/optimi", _stable_adamw, "8 n"),
    **_LOW_RANK,
    **{f"{name}_layerwise": replace(one, unmodeled=WITHIN_BACKWARD) for name, one in _LOW_RANK.items()},
    "lomo": BySource("lomo_optim", _LOMO, _copies(0), "none", WITHIN_BACKWARD),
    "adalomo": BySource("lomo_optim", _LOMO, _adalomo, "4 (m + l)", WITHIN_BACKWARD),
}
