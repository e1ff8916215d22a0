"""What `deterministic` covers, by engine, device, dtype and model family; all else is refused in a line.

The table below decides, and `docs/two_gpus.md` shows it. Two things can be bit-identical: two runs of the same
command on the same machine, with as many threads, and a response whatever it is sampled together with. The second
takes kernels that sum in one order for any batch. vLLM has those for NVIDIA GPUs (`VLLM_BATCH_INVARIANT`), and
installs them for a whole process: a colocated engine's are the policy's, too. A server batches what has just arrived,
so that two runs with servers are the same only where responses do not depend on the batch.

Neither makes a token's log-probability the same in engine and trainer, which compute it by other kernels; how often it
is, `sampling/identical_fraction` tells.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.trainer_utils import enable_full_determinism as enable_full_determinism

HF, COLOCATED, SERVER, EVALUATION = "HF generate", "colocated vLLM", "a vLLM server", "vLLM in an evaluation"
CPU, OLDER, AMPERE, HOPPER, OTHER = "CPU", "GPU before 8.0", "GPU of 8.x", "GPU of 9.0 or newer", "another device"
ENGINES, DEVICES = (HF, COLOCATED, SERVER, EVALUATION), (CPU, OLDER, AMPERE, HOPPER, OTHER)

# Those of vLLM's own list of models it was verified with that have neither experts nor recurrent layers: a colocated
# engine replaces torch.bmm, which experts call, by one without a gradient, and has no such kernels for the others.
FAMILIES = ("ernie4_5", "exaone4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")

# The trainer's attention, and the version of FlashAttention that a colocated engine then has; None is vLLM's choice.
ATTENTION: dict[str, int | None] = {"flash_attention_2": 2, "flash_attention_3": 3, "sdpa": None}


@dataclass(frozen=True)
class Row:
    """Engines on some devices: what is covered there, or why nothing is."""

    engines: tuple[str, ...]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...] = ()  # of the engine, the usual one first; none: any
    families: tuple[str, ...] = ()  # none: any
    whatever_batch: str = "no"  # whether a response is the same whatever it is sampled with
    known_by: str = ""
    refused: str = ""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether vLLM's kernels for this have to be switched on."""
        return not self.refused and CPU not in self.devices


_BY_VLLM: dict[str, Any] = {
    "dtypes": ("bfloat16",),
    "families": FAMILIES,
    "whatever_batch": "yes",
    "known_by": "what vLLM says; not run here",
}
_ALONE = "no: alone and in a batch log-probabilities differ"
TABLE: tuple[Row, ...] = (
    Row((HF,), (CPU,), known_by="a test"),
    Row((COLOCATED, EVALUATION), (CPU,), ("float32",), whatever_batch=_ALONE, known_by="a test"),
    Row((SERVER,), (CPU,), ("float32",), whatever_batch="yes, one at a time", known_by="a test"),
    Row((COLOCATED,), (HOPPER,), **_BY_VLLM),
    Row((SERVER, EVALUATION), (AMPERE, HOPPER), **_BY_VLLM),
    Row(
        (COLOCATED,),
        (AMPERE,),
        refused="vLLM's linear layer for it replaces the policy's, too, and has no gradient: use a vLLM server, "
        "vllm_mode: server",
    ),
    Row(
        (HF,),
        (OLDER, AMPERE, HOPPER, OTHER),
        refused="torch has no deterministic cumulative sum there, by which a token is drawn: set use_vllm: true",
    ),
    Row(
        (COLOCATED, SERVER, EVALUATION),
        (OLDER, OTHER),
        refused="vLLM has kernels that do not depend on the batch for NVIDIA GPUs of compute capability 8.0 or newer",
    ),
)


def device_of(use_cpu: bool) -> str:
    """Which of the devices this process computes on."""
    if use_cpu or not torch.accelerator.is_available():
        return CPU
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return OTHER
    major, _ = torch.cuda.get_device_capability()
    return OLDER if major < 8 else AMPERE if major == 8 else HOPPER


def row_of(engine: str, device: str) -> Row:
    """The row of the table."""
    return next(row for row in TABLE if engine in row.engines and device in row.devices)


def check_covered(
    engine: str, device: str, dtype: str | None = None, *, quantization: str | None = None, top_p: float = 1.0
) -> Row:
    """The row of an engine on a device, if it covers what it is started with.

    Args:
        dtype: of the engine; None is the row's own.

    Raises:
        ValueError: it does not; says what does.
    """
    row = row_of(engine, device)
    begin = f"deterministic with {engine} on a {device}"
    if row.refused:
        raise ValueError(f"{begin}: {row.refused}")
    if engine != HF and quantization is not None:
        raise ValueError(f"{begin}: not with vllm_quantization={quantization!r}; leave it out")
    if row.dtypes and dtype not in (None, "auto", *row.dtypes):
        raise ValueError(f"{begin}: only in {' or '.join(row.dtypes)}, got {dtype}")
    if engine == COLOCATED and row.is_batch_invariant and top_p < 1:
        raise ValueError(
            f"{begin}: torch has no deterministic cumulative sum there, which top_p={top_p:g} takes; set 1"
        )
    return row


def check_model(row: Row, family: str, attention: str | None) -> None:
    """Refuse a model that the row does not cover, or whose attention an engine has no kernels of.

    Args:
        family: `model_type` of its configuration.
        attention: what the trainer loads it with; None where nothing is trained.

    Raises:
        ValueError: it is refused.
    """
    if row.families and family not in row.families:
        listed = ", ".join(row.families)
        raise ValueError(f"deterministic: vLLM's kernels were verified with {listed}, and the model is of {family}")
    if row.is_batch_invariant and attention is not None and attention not in ATTENTION:
        raise ValueError(
            f"deterministic: engine and policy attend by FlashAttention, and attn_implementation is {attention}: set "
            f"it to auto, or one of {', '.join(ATTENTION)}"
        )


def engine_arguments(row: Row, attention: str | None) -> dict[str, Any]:
    """Of vLLM's `LLM`: the row's dtype, and where its kernels do not depend on the batch, the trainer's attention."""
    given: dict[str, Any] = {"dtype": row.dtypes[0]}
    if row.is_batch_invariant:
        version = ATTENTION.get(attention or "sdpa")
        given["attention_config"] = {"backend": "FLASH_ATTN", **({"flash_attn_version": version} if version else {})}
    return given


def prepare_process(engine: str, row: Row) -> None:
    """Set the variables that vLLM and cuBLAS read once: at vLLM's import, and at the first product on a GPU.

    Raises:
        ValueError: vLLM was imported without.
    """
    if not row.is_batch_invariant or engine == SERVER:  # a server has them in its own environment
        return
    name = "VLLM_BATCH_INVARIANT"
    if "vllm" in sys.modules and os.environ.get(name) != "1":
        raise ValueError(f"deterministic: vLLM was imported without {name}=1, which it reads then: begin a new process")
    os.environ |= {name: "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def lacks_of_server(info: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a server lacks so that responses do not depend on what else arrives, and what to start it with; or None.

    Args:
        info: what it answers to /server_info?config_format=json.
    """
    config = info["vllm_config"]
    model, attention = config["model_config"], config["attention_config"]
    on_cpu = config["device_config"]["device"] == "cpu"
    (dtype,) = row_of(SERVER, CPU if on_cpu else HOPPER).dtypes
    if model["dtype"] != f"torch.{dtype}":
        return f"has weights in {model['dtype']}, and deterministic covers {dtype}", f" --dtype {dtype}"
    if model["quantization"] is not None:
        return (
            f"has quantized weights ({model['quantization']}), which deterministic does not cover",
            "out --quantization",
        )
    if on_cpu:
        if config["scheduler_config"]["max_num_seqs"] == 1 and not config["cache_config"]["enable_prefix_caching"]:
            return None
        reason = "decodes what has arrived together, which on a CPU changes log-probabilities"
        return reason, " --max-num-seqs 1 --no-enable-prefix-caching"
    if not info.get("vllm_env", {}).get("VLLM_BATCH_INVARIANT"):
        return "has kernels that depend on the batch", " VLLM_BATCH_INVARIANT=1 in its environment"
    if "flash_attn." not in str(attention["backend"]).lower() and attention["backend"] != "FLASH_ATTN":
        return "may attend by another kernel than the trainer", " --attention-backend FLASH_ATTN"
    return None
