"""Adapters on their base models: loaded to be sampled from, or to be trained further."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftConfig, PeftModel
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, GenerationConfig
from transformers.utils import is_bitsandbytes_available

from trl_ext.compat.quantized import dequantize
from trl_ext.errors import InputError
from trl_ext.generation.model_source import ModelSource, locate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

_GENERATION, _WEIGHTS = "generation_config.json", "adapter_model.safetensors"
_EMBEDDING = re.compile(r"\.(embed_tokens|wte|embed_in|word_embeddings)\.(base_layer\.|original_module\.)?weight$")

_MATRIX = re.compile(r"\.lora_[AB](\.default)?\.weight$")


def load_model(source: ModelSource, dtype: str | None = None) -> Any:
    """A model to sample from, on the CPU; an adapter stays unmerged, as it was in training.

    Args:
        dtype: of the weights; None or auto for what they are stored in, and for an adapter's base what the run loaded.

    Raises:
        InputError: the adapter does not fit its base.
    """
    wanted = source.dtype or "auto" if dtype in (None, "auto") else dtype
    if source.adapter is None:
        return AutoModelForCausalLM.from_pretrained(source.base, dtype=wanted, **source.known)
    return put_on_base(source, load_base_of_run(source, dtype=wanted))


def load_tokenizer(source: ModelSource, processor: type = AutoTokenizer, **kwargs: object) -> Any:
    """The tokenizer, or the processor, that an adapter was trained with, or the whole model's."""
    revision = source.known if source.tokenizer == source.base else {}
    return processor.from_pretrained(source.tokenizer, **revision, **kwargs)  # type: ignore[attr-defined]


def generation_config_of(source: ModelSource) -> GenerationConfig:
    """A model's own; an empty one if it has none."""
    try:
        return GenerationConfig.from_pretrained(source.base, **source.known)
    except OSError:
        return GenerationConfig()


def load_base(source: ModelSource, **kwargs: object) -> PreTrainedModel:
    """The base of an adapter as TRL has loaded it when the adapter was trained."""
    from trl.trainer.utils import create_model_from_path

    return create_model_from_path(source.base, **{"device_map": None, **source.known, **kwargs})


def load_base_of_run(source: ModelSource, dtype: str) -> PreTrainedModel:
    """The base of an adapter with the weights that it was trained on: what the run's quantized ones multiply by.

    Raises:
        InputError: the run has quantized them, and bitsandbytes is not installed.
    """
    if not source.quantization:
        return load_base(source, dtype=dtype)
    if not is_bitsandbytes_available():
        raise InputError(
            f"the adapter {source.name!r} was trained on quantized weights, which bitsandbytes makes again: "
            "pip install 'trl_ext[quantized]'"
        )
    from trl import ModelConfig, get_quantization_config

    asked = get_quantization_config(ModelConfig(use_peft=True, **dict(source.quantization)))
    base = load_base(source, dtype=dtype, quantization_config=asked)
    dequantize(base)
    for name in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        setattr(base, name, False)
    base.hf_quantizer = None
    del base.config.quantization_config
    return base


def put_on_base(source: ModelSource, base: PreTrainedModel, **options: bool) -> PeftModel:
    """The adapter on its base, whose embedding gets as many rows as the adapter's, and its generation config.

    Args:
        options: of `PeftModel.from_pretrained`, such as `is_trainable`; without it all parameters are frozen.

    Raises:
        InputError: the adapter does not fit its base.
    """
    assert source.adapter is not None
    embedding = base.get_input_embeddings().weight
    there = getattr(embedding, "ds_shape", embedding.shape)  # ZeRO-3 keeps an empty tensor of a partitioned parameter
    if (rows := embedding_rows(source.adapter)) and rows != there[0]:
        base.resize_token_embeddings(rows)
    if (source.adapter / _GENERATION).is_file():
        base.generation_config = GenerationConfig.from_pretrained(source.adapter)
    try:
        with warnings.catch_warnings():  # PEFT keeps matrices that change nothing
            warnings.filterwarnings("error", "Found missing adapter keys")
            adapted = PeftModel.from_pretrained(base, source.adapter, **options)
    except (RuntimeError, ValueError, KeyError, TypeError, UserWarning, SafetensorError) as error:
        said = " ".join(str(error).split())[:300]
        raise InputError(f"the adapter {source.name!r} does not fit its base model {source.base!r}: {said}") from error
    _refuse_layers_without_place(source, adapted)
    return adapted


def _refuse_layers_without_place(source: ModelSource, adapted: PeftModel) -> None:
    """Refuse, by an `InputError`, LoRA matrices of layers that the base does not have, which PEFT leaves out."""
    file = Path(str(source.adapter)) / _WEIGHTS
    if not file.is_file():
        return
    known = {name.replace(".default.", ".") for name, _ in adapted.named_parameters()}
    with safe_open(file, "pt") as tensors:
        names = [name for name in list(tensors.keys()) if _MATRIX.search(name)]
    others = [name for name in names if name.replace(".default.", ".") not in known]
    if others:
        raise InputError(
            f"the adapter {source.name!r} does not fit its base model {source.base!r}, which has no place for "
            f"{len(others)} of its {len(names)} matrices ({others[0]}, ...): put the place of the model that it was "
            "trained on into adapter_config.json"
        )


def embedding_rows(adapter: Path) -> int | None:
    """The rows of the embedding that an adapter was saved with, which its base may not have; None without one."""
    file = adapter / _WEIGHTS
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            name = next((name for name in names if _EMBEDDING.search(name)), None)
            return int(tensors.get_slice(name).get_shape()[0]) if name else None
    except SafetensorError as error:
        raise InputError(f"{file}: cannot be read: {error}. Copy or download it again") from error


def check_trainable(source: ModelSource) -> None:
    """Refuse, by an `InputError` and before anything loads, an adapter that PEFT does not train further."""
    if source.adapter is not None and PeftConfig.from_pretrained(source.adapter).is_prompt_learning:
        kind = PeftConfig.from_pretrained(source.adapter).peft_type.value
        raise InputError(
            f"{source.name!r} is an adapter of the kind {kind}, which PEFT does not train further: start from its base "
            f"model, {source.base!r}"
        )


def with_adapter_loaded(given: dict[str, Any], config: TrainingArguments) -> contextlib.AbstractContextManager[None]:
    """Put what TRL takes in the place of an adapter's folder among a trainer's arguments.

    The adapter is trained further; with a `peft_config` it is merged, and a new adapter is trained on top.

    Args:
        given: arguments of a trainer by their names, changed in place.
        config: the trainer's.

    Returns:
        A context for TRL's own `__init__`, in which `model_init_kwargs`, which were used here, are not warned about.
    """
    model, kwargs = given["model"], dict(config.model_init_kwargs or {})
    if not isinstance(model, str):
        return contextlib.nullcontext()
    source = locate(model, kwargs.pop("revision", None))
    if source.adapter is None:
        return contextlib.nullcontext()
    if given.get("peft_config") is not None:
        from trl_ext.generation.merging import merged_folder

        with config.main_process_first(desc="merging the adapter"):
            given["model"] = str(merged_folder(source))
        return contextlib.nullcontext()
    check_trainable(source)
    return _loaded_for_training(source, given, config, kwargs)


def _loaded_for_training(
    source: ModelSource, given: dict[str, Any], config: TrainingArguments, kwargs: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """As TRL loads a whole model, and then the adapter on it."""
    if (quantization := given.pop("quantization_config", None)) is not None:
        kwargs["quantization_config"] = quantization
    if config.distributed_state.distributed_type not in ("MULTI_GPU", "DEEPSPEED"):
        kwargs.setdefault("device_map", "auto" if config.device.type == "cuda" else None)
    kwargs.setdefault("trust_remote_code", config.trust_remote_code)
    zero3 = config.deepspeed_plugin is not None and config.deepspeed_plugin.zero_stage == 3
    base = load_base(source, **kwargs)
    given["model"] = put_on_base(
        source, base, is_trainable=True, autocast_adapter_dtype=quantization is not None or not zero3
    )
    if given.get("processing_class") is None:
        sides = {"truncation_side": "left", "padding_side": "left"}
        trust = config.trust_remote_code
        given["processing_class"] = load_tokenizer(source, AutoProcessor, trust_remote_code=trust, **sides)
    return _without_init_kwargs(config)


@contextlib.contextmanager
def _without_init_kwargs(config: TrainingArguments) -> Iterator[None]:
    kwargs, config.model_init_kwargs = config.model_init_kwargs, None
    try:
        yield
    finally:
        config.model_init_kwargs = kwargs
