"""Whether a model's own files make the model that they describe: tried before data are read, without its weights.

transformers gives random numbers to weights that it does not find, with no more than a warning; what else is wrong with
the files it says in as many ways as there are readers, often after minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.integrations import deepspeed as sharding
from transformers.utils import logging

from trl_ext.errors import InputError
from trl_ext.generation.model_source import CONFIG, ModelSource
from trl_ext.io import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 2  # names in a message
_AGAIN = "copy or download the model again"
_POINTER = b"version https://git-lfs"


def check_loadable(
    source: ModelSource,
    with_hf: bool = True,
    for_training: bool = False,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> PreTrainedModel | None:
    """Refuse, by an `InputError`, a folder whose files cannot be loaded, or lack weights of the model they describe.

    transformers itself loads the model, onto the device `meta`: it reads names and shapes only. A model of the Hub,
    which may not be here yet, and one with code of its own are not tried.

    Args:
        with_hf: whether transformers is to load it; vLLM reads quantized weights, and models of images, in its own way.
        for_training: load it as TRL does, by the first of its `architectures`.
        kwargs: further ones of `from_pretrained`.

    Returns:
        The model without its weights; None where it was not tried.
    """
    folder = Path(source.base).expanduser()
    if not folder.is_dir():
        return None
    _refuse_pointers(folder)
    _refuse_names_of_tokens(source, folder)
    try:
        with _quiet(), not_sharded():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            is_quantized = getattr(config, "quantization_config", None) is not None
            of_vllm_alone = not with_hf and (is_quantized or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING)
            if getattr(config, "auto_map", None) or of_vllm_alone:
                return None
            if for_training and not config.architectures:
                raise ValueError(f"{CONFIG} has no architectures, by which TRL loads it: such as ['LlamaForCausalLM']")
            kind = getattr(transformers, config.architectures[0] if for_training else "", AutoModelForCausalLM)
            kwargs |= {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
            model, loading = kind.from_pretrained(folder, **kwargs)
    except Exception as error:  # readers of foreign files raise everything that there is
        raise _not_loadable(source, folder, error) from error
    if not is_quantized:
        _refuse_other_shapes(source, sorted(loading["mismatched_keys"]))
        _refuse_missing(source, sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"]))
    return model


@contextlib.contextmanager
def not_sharded() -> Iterator[None]:
    """In the block models are loaded whole, by one rank, also where the run itself shards them by ZeRO-3."""
    reference = sharding._hf_deepspeed_config_weak_ref
    config = reference() if reference is not None else None
    sharding.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            sharding.set_hf_deepspeed_config(config)


def _refuse_pointers(folder: Path) -> None:
    """Files that a clone without Git LFS leaves in the place of weights and tokenizers."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(_POINTER):
            raise InputError(
                f"{path} is a pointer of Git LFS and not the file itself: git lfs install, and git lfs pull in {folder}"
            )


def _refuse_names_of_tokens(source: ModelSource, folder: Path) -> None:
    """Refuse, in both files, what transformers takes in silence or in many words: a token's text for its number."""
    for file in (folder / CONFIG, folder / "generation_config.json"):
        found = None
        with contextlib.suppress(OSError, ValueError):  # what else is wrong is said when the file is read
            found = read_json(file)
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            ids = found.get(name) if isinstance(found, dict) else None
            for token in (token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, str)):
                raise InputError(
                    f"model {source.base!r}: {file.name} has {token!r} as its {name}, which is the token's number: put "
                    "that there, as tokenizer.json has it"
                )


def _refuse_other_shapes(source: ModelSource, mismatched: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    for name, in_file, wanted in mismatched[:1]:
        raise InputError(
            f"model {source.base!r}: {name} has the shape {list(in_file)} in its file and {list(wanted)} by {CONFIG}: "
            f"the two are of different models, {_AGAIN}"
        )


def _refuse_missing(source: ModelSource, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Refuse what would be random numbers."""
    if not missing:
        return
    hint = _AGAIN
    if prefix := _prefix(missing, unexpected):
        hint = f"names in the file begin with {prefix!r}, as of a wrapped model; save the model inside it"
    elif unexpected:
        hint = f"the file has others instead ({_some(unexpected)}); {hint}"
    raise InputError(
        f"model {source.base!r}: {len(missing)} weights that {CONFIG} describes are missing ({_some(missing)}) and "
        f"would be random numbers: {hint}"
    )


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What stands before the name of a missing weight in the file, such as `module.`; empty if nothing does."""
    ends = (name[: -len(missing[-1])] for name in unexpected if name.endswith(missing[-1]))
    return next(ends, "")


def _not_loadable(source: ModelSource, folder: Path, error: Exception) -> InputError:
    """Says which file is damaged, where one is that can be told."""
    said = " ".join(str(error).split())[:300]
    for path in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(path, "pt")
        except SafetensorError as damage:
            return InputError(f"{path} is damaged or not complete ({damage}): {_AGAIN}")
    return InputError(f"model {source.base!r} cannot be loaded: {type(error).__name__}: {said}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """In the block transformers does not print its tables of weights, of which an error says what matters."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)
