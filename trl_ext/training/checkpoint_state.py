"""State of a run that neither `Trainer` nor TRL saves: a reference that follows the policy, callbacks, generators.

`docs/packages/training.md` lists every object that holds state, and who keeps it.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl

from trl_ext.runs.continuation import REFERENCE

if TYPE_CHECKING:
    from transformers import Trainer


def save_reference(trainer: Trainer, checkpoint: Path) -> None:
    """Write the reference that `sync_ref_model` moves; a collective operation where it is sharded."""
    if (reference := _synced_reference(trainer)) is None:
        return
    with _gathered(reference, modifier=None):
        if trainer.accelerator.is_main_process:
            (checkpoint / REFERENCE).parent.mkdir()
            save_model(reference, str(checkpoint / REFERENCE))


def load_reference(trainer: Trainer, checkpoint: Path) -> None:
    """Restore what `save_reference` has written; an earlier version's checkpoint has nothing."""
    reference = _synced_reference(trainer)
    if reference is None or not (checkpoint / REFERENCE).is_file():
        return
    sharded = any(hasattr(weight, "ds_id") for weight in reference.parameters())
    with _gathered(reference, modifier=0):
        if not sharded or trainer.accelerator.is_main_process:
            load_model(reference, checkpoint / REFERENCE)


def states_of_callbacks(callbacks: Iterable[TrainerCallback]) -> dict[str, list[Any]]:
    """The states of callbacks that have torch's `state_dict` and `load_state_dict`, by their class."""
    states: dict[str, list[Any]] = {}
    for callback in filter(_has_state_dict, callbacks):
        states.setdefault(type(callback).__name__, []).append(to_plain(callback.state_dict()))
    return states


def load_states_of_callbacks(callbacks: Iterable[TrainerCallback], states: Mapping[str, Sequence[Any]]) -> None:
    """Restore `states_of_callbacks`; several of a class by their order."""
    left = {name: list(values) for name, values in states.items()}
    for callback in filter(_has_state_dict, callbacks):
        if left.get(type(callback).__name__):
            callback.load_state_dict(left[type(callback).__name__].pop(0))


def restore_exportable(callbacks: Iterable[TrainerCallback], stored: dict[str, Any]) -> None:
    """Give transformers' own protocol what it saves and reads only with `restore_callback_states_from_checkpoint`.

    Each save appends to the states of several callbacks of a class, so theirs are the last ones.
    """
    by_class: dict[str, list[TrainerCallback]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState) and not isinstance(callback, TrainerControl):
            by_class.setdefault(type(callback).__name__, []).append(callback)
    for name, members in by_class.items():
        saved = stored.get(name, [])
        latest = (saved if isinstance(saved, list) else [saved])[-len(members) :]
        for callback, state in zip(members, latest, strict=False):
            for attribute, value in state.get("attributes", {}).items():
                setattr(callback, attribute, value)
        now = [callback.state() for callback in members]
        stored[name] = now if len(now) > 1 else now[0]


def without_state(callbacks: Iterable[TrainerCallback], model: nn.Module) -> list[str]:
    """Classes of callbacks with tensors or models of their own that no checkpoint has, and AdaLoRA's allocator."""
    known = {id(weight) for weight in model.parameters()}
    unsaved = {
        type(callback).__name__
        for callback in callbacks
        if not type(callback).__module__.startswith(("trl_ext.", "transformers.")) and _holds_tensors(callback, known)
        if not (_has_state_dict(callback) or isinstance(callback, ExportableState))
    }
    allocator = getattr(getattr(model, "base_model", None), "rankallocator", None)
    configs = model.peft_config.values() if allocator is not None else ()  # type: ignore[operator]
    is_used = allocator is not None and bool(allocator.ipt or any(config.rank_pattern for config in configs))
    return sorted(unsaved | ({ALLOCATOR} if is_used else set()))


ALLOCATOR = "AdaLoRA's rank allocator"


def _synced_reference(trainer: Trainer) -> nn.Module | None:
    reference = getattr(trainer, "ref_model", None) if getattr(trainer.args, "sync_ref_model", False) else None
    if reference is None or trainer.is_fsdp_enabled:
        return None
    unwrapped: nn.Module = trainer.accelerator.unwrap_model(reference)
    return unwrapped


@contextlib.contextmanager
def _gathered(module: nn.Module, modifier: int | None) -> Iterator[None]:
    """In the block ZeRO-3's parameters are whole, and what rank `modifier` makes of them is kept."""
    sharded = [weight for weight in module.parameters() if hasattr(weight, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=modifier):
        yield


def _has_state_dict(callback: object) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))


def _holds_tensors(callback: TrainerCallback, known: set[int]) -> bool:
    """Whether an attribute is a tensor, a model, or a collection of them, that is not the policy's."""
    if type(callback).__name__ == "SyncRefModelCallback":  # its model is the trainer's
        return False
    for value in vars(callback).values():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for item in items:
            weights = list(item.parameters()) if isinstance(item, nn.Module) else [item]
            if any(isinstance(weight, Tensor) and id(weight) not in known for weight in weights):
                return True
    return False


@dataclass(frozen=True)
class RngStates:
    """Of Python, numpy and torch, whose states `Trainer` saves, when this was made."""

    of_python: Any = field(default_factory=random.getstate)
    of_numpy: Any = field(default_factory=np.random.get_state)
    of_torch: torch.Tensor = field(default_factory=torch.get_rng_state)
    of_gpu: torch.Tensor | None = field(
        default_factory=lambda: torch.get_device_module().get_rng_state() if torch.accelerator.is_available() else None
    )

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)
        if self.of_gpu is not None:
            torch.get_device_module().set_rng_state(self.of_gpu)


def to_plain(value: object) -> Any:
    """Convert to the types that `torch.load` reads without running code; other types become text."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [to_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)) else str(value)


def from_plain(like: object, value: Any) -> Any:
    """Invert `to_plain`, with the container types of the value that it replaces."""
    if isinstance(like, deque):
        return deque(value, maxlen=like.maxlen)
    if isinstance(like, defaultdict):
        restored: defaultdict[Any, Any] = defaultdict(like.default_factory)
        for key, item in value.items():
            restored[key] = from_plain(restored[key], item)
        return restored
    if isinstance(like, dict):
        return {key: from_plain(like.get(key), item) for key, item in value.items()}
    return value
