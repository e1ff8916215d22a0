"""Adapters and the colocated engine: which ones can be merged for it, and merging one layer while it is read."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoConfig, PreTrainedModel, TrainingArguments

from trl_ext.compat.quantized import dequantized
from trl_ext.generation.model_source import ADAPTER, locate

# Tuners whose layers merge into the weights below them; test_adapters.py holds each to PEFT's own merging.
_MERGED = (PeftType.LORA, PeftType.IA3, PeftType.LOHA, PeftType.LOKR, PeftType.VERA)

# Tuners, other than tokens before a row, for which a row's prompt and completion are more than tokens with distances.
_OF_WHOLE_ROWS = {
    PeftType.XLORA: "chooses its experts by another pass over the row",
    PeftType.POLY: "chooses its experts by the task of a row",
    getattr(PeftType, "PVERA", None): "draws noise for every pass",  # since PEFT 0.20, as LILY
    PeftType.ADAPTION_PROMPT: "computes a layer's queries once more, at places of its own",
}

_LILY = getattr(PeftType, "LILY", None)
LILY_S_MEAN = "the adapter (LILY) weighs experts by a mean over all tokens of a pass"
_NEED_MORE = {  # than TRL gives a forward pass
    PeftType.POLY: "the task of each row",
    PeftType.MULTITASK_PROMPT_TUNING: "the task of each row",
    PeftType.CPT: "the kind of each token",
}
_CACHED = (PeftType.PREFIX_TUNING, getattr(PeftType, "CARTRIDGE", None))  # their tokens are keys and values in a cache

# Tuners whose forward pass reads the weights below it, or their shape, which bitsandbytes has packed.
_ON_PLAIN_WEIGHTS = frozenset(
    getattr(PeftType, name, None)
    for name in "DEFT DELORA FROD GLORA HRA OSF PEANUT SUPERTUNING TINYLORA LOHA LOKR".split()
)
_ON_8_BITS = (PeftType.LOHA, PeftType.LOKR)  # which keep a matrix's shape

# Fields of a `LoraConfig` whose effect is not in the weights that the engine is given, and why.
_REFUSED_FIELDS = {
    "target_parameters": "their updates are not merged for the engine",
    "trainable_token_indices": "their rows of the embedding are not merged for the engine",
    "alora_invocation_tokens": "an activated LoRA cannot be merged",
    "arrow_config": "a LoRA that is routed cannot be merged",
    "layer_replication": "the engine's model has no replicated layers",
}
_FLAGS = {"target_parameters": "lora_target_parameters", "target_modules": "lora_target_modules",
          "modules_to_save": "lora_modules_to_save"}  # fmt: skip
_EMBEDDINGS = ("model.embed_tokens", "lm_head")


def has_mean_over_a_pass(model: PreTrainedModel) -> bool:
    """Whether rows of this model depend on those that they are computed with, by an adapter's mean over all tokens."""
    return any(adapter.peft_type == _LILY for adapter in getattr(model, "peft_config", {}).values())


def adapter_of_places(model: PreTrainedModel) -> str | None:
    """Why rows of this model cannot be moved or share a prompt, because of an adapter, or None."""
    for adapter in getattr(model, "peft_config", {}).values():
        kind = adapter.peft_type.value
        if adapter.is_prompt_learning:
            return f"the adapter ({kind}) puts tokens of its own before a row"
        if getattr(adapter, "alora_invocation_tokens", None):
            return f"the adapter ({kind} with alora_invocation_tokens) begins at a place in the prompt"
        if adapter.peft_type in _OF_WHOLE_ROWS:
            return f"the adapter ({kind}) {_OF_WHOLE_ROWS[adapter.peft_type]}"
    return LILY_S_MEAN if has_mean_over_a_pass(model) else None


def refuse_untrainable(
    peft_config: PeftConfig | None, gradient_checkpointing: bool, model: PreTrainedModel | str | None = None
) -> None:
    """Refuse, by a `ValueError`, an adapter whose forward pass is not given what it needs.

    Args:
        model: a model, or the name of one that is not loaded yet; None if it is not known.
    """
    if peft_config is None:
        return
    kind = peft_config.peft_type
    if needs := _NEED_MORE.get(kind):
        raise ValueError(
            f"peft_type {kind.value} cannot be trained here: its forward pass needs {needs}, which TRL does not give; "
            "use another one, such as LORA"
        )
    if gradient_checkpointing and kind in _CACHED:
        raise ValueError(
            f"peft_type {kind.value} with gradient_checkpointing: its tokens are in a cache, which a checkpointed pass "
            "has none of; set gradient_checkpointing: false"
        )
    if getattr(peft_config, "trainable_token_indices", None) and model is not None and _has_tied_embeddings(model):
        raise ValueError(
            "trainable_token_indices: the model's output head is its embedding (tie_word_embeddings), which PEFT wraps "
            "in a way that TRL's head cannot read; use modules_to_save: [embed_tokens]"
        )


def check_quantization(flag: str | None, adapter: PeftConfig | None, config: TrainingArguments) -> None:
    """Refuse, by a `ValueError`, quantized weights that cannot carry such an adapter.

    Args:
        flag: the setting by which the model's weights are quantized as it loads, None if they are not.
    """
    if flag is None:
        return
    if config.fp16:
        raise ValueError(
            f"{flag} with fp16: TRL has an adapter on quantized weights in bfloat16, whose gradients the scaler of a "
            "float16 loss does not take; set bf16: true on a card that has it, or load the model unquantized"
        )
    kind = getattr(adapter, "peft_type", None)
    if kind in _ON_PLAIN_WEIGHTS and not (flag == "load_in_8bit" and kind in _ON_8_BITS):
        raise ValueError(
            f"{flag} with peft_type {PeftType(kind).value}: PEFT computes it from the weights below it, which are "
            "packed; use LORA, or load the model unquantized"
        )
    if flag == "load_in_8bit" and getattr(adapter, "use_dora", False) and config.use_cpu:
        raise ValueError(
            "load_in_8bit with use_dora on a CPU: bitsandbytes' 8-bit weights have no scales there that DoRA could "
            "read; set load_in_4bit: true, or use_dora: false"
        )
    if _names(getattr(adapter, "modules_to_save", None), "lm_head") and not config.bf16:
        raise ValueError(
            f"{flag} with lm_head in lora_modules_to_save: TRL has it in bfloat16 next to quantized weights, and "
            "without bf16: true its inputs are not; set bf16: true, or leave it out"
        )


def quantized_by(model: object, quantization_config: object) -> str | None:
    """The setting by which the weights of a trainer's model are, or will be, quantized by bitsandbytes, or None."""
    for name, loaded in (("load_in_4bit", "is_loaded_in_4bit"), ("load_in_8bit", "is_loaded_in_8bit")):
        if getattr(quantization_config, name, False) or getattr(model, loaded, False):
            return name
    return None


def check_stored_weights(model: PreTrainedModel | str) -> None:
    """Refuse, by a `ValueError`, a checkpoint of bitsandbytes' weights, in whose layers an engine takes no others."""
    name = model if isinstance(model, str) else model.name_or_path
    if not name:
        return
    stored = getattr(AutoConfig.from_pretrained(_base_of(name)), "quantization_config", None) or {}
    if dict(stored).get("quant_method") == "bitsandbytes":
        raise ValueError(
            f"{name}: its weights are stored as bitsandbytes has quantized them, and vLLM would load them so and could "
            "not take the policy's. Name the checkpoint that it was made from, with load_in_4bit: true, or set "
            "use_vllm: false"
        )


def check_adapter(model: PreTrainedModel | str, peft_config: PeftConfig | None) -> None:
    """Refuse, by a `ValueError`, an adapter that an engine cannot be given, before the model loads.

    Args:
        model: a model, or the name of one that is not loaded yet.
        peft_config: of the adapter to be created; None for the one that `model` has, if any.
    """
    given = peft_config or next(iter(getattr(model, "peft_config", {}).values()), None)
    if given is None and isinstance(model, str) and (source := locate(model)).adapter is not None:
        given, model = PeftConfig.from_pretrained(source.adapter), source.base
    if given is not None and (reason := _reason_against(given, model)):
        raise ValueError(f"{reason}. Leave it out, or generate with HF generate (use_vllm: false)")


def saved_config(model: str | None) -> PeftConfig | None:
    """What an adapter's folder says of the adapter, as it is trained further; None for a whole model."""
    if model is None or not (Path(model) / ADAPTER).is_file():
        return None
    config = PeftConfig.from_pretrained(model)
    config.inference_mode = False
    return config


def _reason_against(peft_config: PeftConfig, model: PreTrainedModel | str) -> str | None:
    if peft_config.peft_type not in _MERGED:
        names = ", ".join(sorted(kind.value for kind in _MERGED))
        return f"peft_type {peft_config.peft_type.value}: for vLLM only {names} are merged"
    for name, reason in _REFUSED_FIELDS.items():
        if getattr(peft_config, name, None):
            return f"{_FLAGS.get(name, name)} with vLLM: {reason}"
    ties = getattr(peft_config, "ensure_weight_tying", False)
    for name in ("target_modules", "modules_to_save"):
        at = [module for module in _EMBEDDINGS if _names(getattr(peft_config, name, None), module)]
        if at and not (ties and name == "modules_to_save") and _has_tied_embeddings(model):
            return (
                f"{_FLAGS[name]} has {at[0].rpartition('.')[2]} with vLLM: the model's output head is its "
                "embedding (tie_word_embeddings), and the adapter would change both in the engine and one in training"
            )
    return None


def _names(targets: Sequence[str] | str | None, module: str) -> bool:
    """Whether PEFT's `target_modules` or `modules_to_save` chooses the module; a text is a regular expression."""
    if isinstance(targets, str):
        return targets != "all-linear" and re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets or ())


def _base_of(model: str) -> str:
    return locate(model).base if (Path(model) / ADAPTER).is_file() else model


def _has_tied_embeddings(model: PreTrainedModel | str) -> bool:
    if isinstance(model, str):
        return bool(AutoConfig.from_pretrained(_base_of(model)).get_text_config().tie_word_embeddings)
    return bool(model.config.get_text_config().tie_word_embeddings)


@contextlib.contextmanager
def merged(layer: BaseTunerLayer) -> Iterator[nn.Module]:
    """Merge an adapter's layer, of a tuner in `_MERGED` and with gathered parameters, into the layer below it.

    After the block that layer is as before, bit-identically; PEFT subtracts the update, which changes bfloat16 weights,
    and rounds the merged weights of quantized layers to 8 or 4 bits again.

    Yields:
        A layer with the merged parameters.
    """
    base, backend = layer.get_base_layer(), getattr(layer, "quantization_backend", None)
    if (plain := dequantized(base)) is not base:
        layer.base_layer = plain
        layer.quantization_backend = None  # of some tuners: how PEFT reads and rounds the layer below
    weights = [(param, param.data) for param in layer.get_base_layer().parameters()]
    for param, data in weights:
        param.data = data.clone()
    caches = dict(getattr(layer, "_caches", {}))  # where DoRA leaves what it would need to subtract
    try:
        _merge(layer)
        yield layer.get_base_layer()
    finally:
        layer.merged_adapters.clear()
        if hasattr(layer, "_caches"):
            layer._caches = caches
        for param, data in weights:
            param.data = data
        if plain is not base:
            layer.base_layer = base
            layer.quantization_backend = backend


def _merge(layer: BaseTunerLayer) -> None:
    """By PEFT's layer of weights that are not quantized, where it has another one for those that are."""
    kind = type(layer)
    if not kind.__module__.endswith(".bnb"):
        layer.merge()
        return
    layer.fan_in_fan_out = False  # PEFT's IA3 on quantized weights does not say so
    importlib.import_module(kind.__module__.removesuffix("bnb") + "layer").Linear.merge(layer)
