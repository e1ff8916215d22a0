"""Live bytes of a training step by kind and by moment: every storage that an operation makes, until it is freed.

A `TorchDispatchMode` sees the results of all operations, of fake tensors as of real ones, in forward, backward, the
recomputation of checkpointed layers and the optimizer. What a kernel allocates for itself and frees before it returns
is not seen. `torch.distributed._tools.MemTracker` does the same by modules; it refuses the several forward passes of
one step that gradient accumulation and shared prompts have.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

KINDS = (
    "parameters", "reference", "batches", "gradients", "optimizer", "weight casts", "activations", "lm head",
    "backward",
)  # fmt: skip
ALLOCATION = 512  # bytes, to which torch's CUDA allocator rounds (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


class _Entry:
    """A storage that is alive."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind


class Ledger(TorchDispatchMode):
    """Bytes by kind while it is active, with the highest total of each moment.

    Args:
        rounded_to: bytes that every storage takes a multiple of.
    """

    def __init__(self, rounded_to: int = 1) -> None:
        super().__init__()
        self.rounded_to = rounded_to
        self.live = dict.fromkeys(KINDS, 0)
        self.peaks: dict[str, dict[str, int]] = {}  # by moment
        self.moment = "start"
        self._forced: str | None = None
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def total(self) -> int:
        """Live bytes."""
        return sum(self.live.values())

    @contextlib.contextmanager
    def during(self, moment: str, kind: str | None = None) -> Iterator[None]:
        """In the block peaks are those of `moment`, and what is made is of `kind` (default: forward or backward)."""
        before = self.moment, self._forced
        self.moment, self._forced = moment or self.moment, kind
        self._note_peak()
        try:
            yield
        finally:
            self.moment, self._forced = before

    def file(self, tensor: Tensor, kind: str) -> None:
        """Count the tensor's storage, and from now on as of this kind."""
        storage = tensor.untyped_storage()
        entry = self._known.get(storage)
        if entry is None:
            size = -(-storage.nbytes() // self.rounded_to) * self.rounded_to
            entry = self._known[storage] = _Entry(size, kind)
            weakref.finalize(storage, self._forget, entry)
            self.live[kind] += size
        elif entry.kind != kind:
            self.live[entry.kind] -= entry.size
            self.live[kind] += entry.size
            entry.kind = kind

    def file_model(self, model: nn.Module) -> None:
        """Count parameters and buffers, and gradients as soon as they are there."""
        for parameter in model.parameters():
            self.file(parameter, "parameters")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self.file(p.grad, "gradients"))
        for buffer in model.buffers():
            self.file(buffer, "parameters")

    def file_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count its state."""
        for tensor in tree_leaves([dict(state) for state in optimizer.state.values()]):
            if isinstance(tensor, Tensor):
                self.file(tensor, "optimizer")

    def _forget(self, entry: _Entry) -> None:
        self.live[entry.kind] -= entry.size

    def _note_peak(self) -> None:
        moment = "backward" if self.moment == "forward" and _is_in_backward() else self.moment
        if self.total > sum(self.peaks.get(moment, {}).values()):
            self.peaks[moment] = dict(self.live)

    def _kind(self, operation: Any, arguments: tuple[Any, ...]) -> str:
        if self._forced:
            return self._forced
        if operation is torch.ops.aten._to_copy.default:
            entry = self._known.get(arguments[0].untyped_storage())
            if entry is not None and entry.kind == "parameters":
                return "weight casts"
        return "backward" if _is_in_backward() and not torch.is_grad_enabled() else "activations"

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operation is torch.ops.prim.device.default:  # a fake tensor's: two of three calls
            return args[0].fake_device
        made = operation(*args, **(kwargs or {}))
        new = [tensor for tensor in tree_leaves(made) if isinstance(tensor, Tensor)]
        unknown = [tensor for tensor in new if tensor.untyped_storage() not in self._known]
        if unknown:
            kind = self._kind(operation, args)
            for tensor in unknown:
                self.file(tensor, kind)
            # Where two gradients of a tensor meet, autograd adds to the first if it is no subclass, as fake tensors are
            # (`can_accumulate_inplace`, torch/csrc/autograd/input_buffer.cpp): the first is freed now, at the latest.
            if operation is not torch.ops.aten.add.Tensor or not _is_in_backward():
                self._note_peak()
        return made


def _is_in_backward() -> bool:
    """Whether autograd is running; with gradients enabled it recomputes a checkpointed layer."""
    return bool(torch._C._current_graph_task_id() != -1)


class Answered(TorchDispatchMode):
    """What fake tensors cannot tell: all that a boolean mask selects, and plain numbers in place of values.

    Args:
        selected: maps a mask's shape to the number of elements that count as true.
    """

    def __init__(self, selected: Callable[[torch.Size], int]) -> None:
        super().__init__()
        self.selected = selected

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if operation is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1 if not args[0].is_floating_point() else 1.0
        if operation is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            source, (mask,) = args[0], args[1]
            return source.new_empty((self.selected(mask.shape), *source.shape[mask.ndim :]))
        if operation is aten.masked_select.default:
            return args[0].new_empty((self.selected(args[1].shape),))
        return operation(*args, **(kwargs or {}))
