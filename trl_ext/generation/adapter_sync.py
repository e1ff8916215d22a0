"""An adapter that is sent to vLLM by itself, in place of all weights with it merged into them.

vLLM adds it to the base model's layers while it decodes ("LoRA adapters" of its documentation), which takes time with
every token; merged weights take time with every sync. `is_cheaper` says which of the two is less.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peft import LoraConfig, PeftConfig, PeftType, get_peft_model_state_dict
from safetensors.torch import save

from trl_ext.generation.model_source import ADAPTER
from trl_ext.registry import unknown

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl.distributed import DistributedBackend
    from vllm.lora.request import LoRARequest

WAYS = ("auto", "merge", "adapter")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
# Fields of a `LoraConfig` that vLLM heeds, or that have had their effect once there are tensors; others are refused.
_HEEDED = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules "
    "exclude_modules lora_alpha lora_dropout use_rslora init_lora_weights layers_to_transform layers_pattern "
    "megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size runtime_config".split()
)

# What `is_cheaper` reckons with. Pushes by HTTP and decoding on a CPU were measured, by server_push.py and
# adapter_sync.py of scripts/benchmarks; on GPUs decoding with an adapter takes 1.33 to 1.39 times as long (TRL's issue
# 7017).
_BYTES_PER_S = 3e7
_SLOWER = {"cpu": 2.6, "cuda": 1.36}
_PARAMETERS_PER_S = 5e10  # of a CPU that decodes: parameters times tokens
_SECONDS_PER_TOKEN = 3e-3  # of a GPU that decodes a batch, next to what reading all weights takes
_BYTES_READ_PER_S = 2e12


@dataclass(frozen=True)
class Rollout:
    """What an engine decodes between two syncs."""

    rows: int
    tokens: int  # of a row, at most


def is_cheaper(parameters: int, bytes_per_weight: int, rollout: Rollout, device: str) -> bool:
    """Whether a rollout on a server takes less time with an adapter sent by itself than with merged weights, by HTTP.

    It is a function of sizes and not of the clock, so that a run that is repeated, or resumed, does the same. Where the
    engine is colocated merging has been quicker in all that was measured.

    Args:
        parameters: of the model; an adapter has so few that sending it is free.
        device: of the server, `cpu` or `cuda`.
    """
    merged = parameters * bytes_per_weight / _BYTES_PER_S
    if device == "cpu":
        decoding = rollout.rows * rollout.tokens * parameters / _PARAMETERS_PER_S
    else:
        decoding = rollout.tokens * (_SECONDS_PER_TOKEN + parameters * bytes_per_weight / _BYTES_READ_PER_S)
    return (_SLOWER[device] - 1) * decoding < merged


def reason_to_merge(
    config: PeftConfig | None, sleeps: bool = False, rounds: bool = False, sharded: bool = False
) -> str | None:
    """Why the adapter of a policy cannot be sent by itself, or None.

    Args:
        config: of the adapter; None for a whole model.
        sleeps: the engine's weights are dropped while the policy is trained.
        rounds: the engine decodes with rounded weights of the policy.
        sharded: each rank has a part of each of the policy's parameters, under FSDP.
    """
    if sharded:
        return "FSDP has the policy in parts"
    if config is None:
        return "the model has no adapter"
    if sleeps:
        return "vllm_enable_sleep_mode drops the weights that it would be added to"
    if rounds:
        return "simulated quantization rounds the weights that it is merged into"
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        return f"vLLM adds no adapter of peft_type {config.peft_type.value}"
    for field in dataclasses.fields(config):
        plain = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(config, field.name)
        if field.name not in _HEEDED and value != plain and (value or plain):
            return f"vLLM does not heed {field.name} of a LoRA ({value!r})"
    if config.r > _RANKS[-1]:
        return f"vLLM has room for a rank of {_RANKS[-1]} at most, and this one is {config.r}"
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules or []
    if at := [name for name in _EMBEDDINGS if any(name in target for target in targets)]:
        return f"the adapter is on {at[0]}, whose rows vLLM counts otherwise"
    return None


def check_lora_sync(way: str, adapter: PeftConfig | None, **hindrances: bool) -> None:
    """Refuse, by a `ValueError`, a value of `vllm_lora_sync` that there is not, or that the run cannot have.

    Args:
        adapter: of the policy; None for a whole model.
        hindrances: of `reason_to_merge`.
    """
    if way not in WAYS:
        raise unknown("vllm_lora_sync", way, WAYS)
    if way == "adapter" and (reason := reason_to_merge(adapter, **hindrances)):
        raise ValueError(f"vllm_lora_sync: adapter: {reason}. Set it to merge, or leave it out")


def room(rank: int) -> int:
    """The rank, of those for which vLLM makes room, that holds this one."""
    return next(one for one in _RANKS if one >= rank)


def files_of(model: PreTrainedModel, gather: DistributedBackend) -> dict[str, bytes]:
    """The files of a policy's adapter, by their names; a collective operation, since ZeRO gathers its parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with gather.gather_params(trained):
        tensors = get_peft_model_state_dict(model, adapter_name="default")
        weights = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config["default"].save_pretrained(folder)
        return {ADAPTER: (Path(folder) / ADAPTER).read_bytes(), ADAPTER_WEIGHTS: weights}


def name_of(files: dict[str, bytes]) -> str:
    """By what an engine knows a version of the adapter; two of the same weights are the same."""
    return "policy-" + hashlib.sha256(files[ADAPTER_WEIGHTS]).hexdigest()[:12]


class AdapterFolder:
    """Where an engine reads the policy's adapter: a folder for each version, of which the last one stays."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="adapter-")
        self.folder: Path | None = None  # of the last version

    def write(self, files: dict[str, bytes]) -> str:
        """Put the files of a version in the place of the last one's, and return the path of their folder."""
        before, self.folder = self.folder, Path(self._place.name) / name_of(files)
        self.folder.mkdir(exist_ok=True)
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        if before not in (None, self.folder):
            shutil.rmtree(before)
        return str(self.folder)

    @property
    def request(self) -> LoRARequest:
        """By what a request names the adapter as it was last written."""
        from vllm.lora.request import LoRARequest

        assert self.folder is not None
        number = 1 + int(self.folder.name.rpartition("-")[2], 16) % (2**31 - 1)
        return LoRARequest(self.folder.name, number, str(self.folder))
