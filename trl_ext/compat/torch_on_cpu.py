"""torch and DeepSpeed on a CPU: what a file is loaded to, process groups, and Muon without bfloat16."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.optim import _muon


def loading_to_numbered_cpus() -> AbstractContextManager[object]:
    """In the block `torch.load` maps to cpu:0, the device of a CPU rank, to which `Trainer` loads the optimizer."""
    numbered = (
        100, lambda storage: None, lambda storage, location: storage if re.fullmatch(r"cpu:\d+", location) else None,
    )  # fmt: skip
    known = [*torch.serialization._package_registry, numbered]  # a priority, and functions to tag and to restore
    return patch.object(torch.serialization, "_package_registry", sorted(known, key=lambda entry: entry[0]))


def set_default_group_timeout(limit: datetime.timedelta) -> None:
    """Set the default timeout of torch.distributed's groups, the first one and those of `new_group`."""
    distributed_c10d.default_pg_timeout = limit


def skip_deepspeeds_operator_of_inference() -> None:
    """Have DeepSpeed's backend not compile its all-reduce in shared memory, which `inference_all_reduce` alone calls.

    The first launch on a CPU would compile for about a minute, and if it is killed then, every later one waits for
    the lock that it leaves.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # the package's attribute `torch` is torch itself
    backend.build_shm_op = lambda: None


def tell_deepspeed_of_the_group() -> None:
    """Have DeepSpeed take over the process group that there is, as accelerate does on GPUs.

    Until then it counts one rank, and refuses the batch size of a run when a reference or a teacher is loaded.
    """
    importlib.import_module("deepspeed.comm").init_distributed("gloo", verbose=False)


def has_bfloat16_matmul() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this CPU (on x86, from AVX-512 on); else torch emulates it."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def orthogonalized(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """A matrix (M, N) near the orthogonal one of `grad`'s singular vectors, by Newton–Schulz in `grad`'s dtype.

    torch's own rounds to bfloat16 first, which a GPU is fast at (`newtonschulz5` of Jordan et al. 2024).
    """
    a, b, c = ns_coefficients
    is_tall = grad.size(0) > grad.size(1)
    x = grad.T if is_tall else grad
    x = x / x.norm().clamp(min=eps)  # its largest singular value is at most 1
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


@contextlib.contextmanager
def muon_without_emulation() -> Iterator[None]:
    """In the block `torch.optim.Muon` on CPU tensors multiplies in float32 where bfloat16 would be emulated.

    Emulated, a product of the embedded policy's size takes about 40 times as long. Where bfloat16 is had, the
    steps are bit-identical to torch's.
    """
    if has_bfloat16_matmul():
        yield
        return
    with patch.object(_muon, "_zeropower_via_newtonschulz", orthogonalized):
        yield
