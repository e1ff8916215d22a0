"""An adapter merged into its base: a whole model's folder, which anything loads, vLLM too.

It is made once and kept under a fingerprint of adapter and base. Its scores are those of the two, or it is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from peft import PeftConfig
from safetensors import SafetensorError
from transformers import AutoProcessor

from trl_ext.errors import InputError
from trl_ext.generation.adapter_models import load_base_of_run, load_tokenizer, put_on_base
from trl_ext.generation.model_files import not_sharded
from trl_ext.generation.model_source import CONFIG, ModelSource, loadable, locate
from trl_ext.io import print_line, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ORIGIN = "merged_from.json"  # the last file of a merged model, so that a folder with it is complete
# What changes with the position, or is chosen for each token, is in no weight of a whole model.
_UNMERGEABLE_FIELDS = {
    "alora_invocation_tokens": "a LoRA with alora_invocation_tokens is not always active",
    "arrow_config": "a LoRA with arrow_config is routed by token",
}


def whole_model(model: str) -> str:
    """The model, or for an adapter's folder the one that it makes with its base, as an engine loads it."""
    source = locate(model)
    return loadable(model) if source.adapter is None else str(merged_folder(source))


def check_mergeable(source: ModelSource) -> None:
    """Refuse, by an `InputError` and before anything loads, an adapter that no weights of the base can hold."""
    if source.adapter is None:
        return
    config = PeftConfig.from_pretrained(source.adapter)
    field = next((name for name in _UNMERGEABLE_FIELDS if getattr(config, name, None)), None)
    if not (config.is_prompt_learning or field):
        return
    raise _unmergeable(source, _UNMERGEABLE_FIELDS[field] if field else f"{config.peft_type.value} changes no weights")


def merged_folder(source: ModelSource) -> Path:
    """The folder of the whole model that base and adapter make together; made now if it is not there.

    It is in `$TRL_EXT_CACHE`, by default `~/.cache/trl_ext`, under a fingerprint of both.

    Raises:
        InputError: the adapter cannot be merged, does not fit its base, or the folder cannot be written.
    """
    check_mergeable(source)
    root = Path(os.environ.get("TRL_EXT_CACHE") or Path.home() / ".cache" / "trl_ext")
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"merged-{fingerprint(source)}"
    with FileLock(root / f"{target.name}.lock"):  # of two processes that start together, one makes it
        if (target / _ORIGIN).is_file():
            return target
        print_line(f"the adapter {source.name} is merged into its base model {source.base}, kept in {target}")
        scratch = root / f"making-{target.name}"
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
        try:
            with not_sharded():
                merge_into(source, scratch)
            write_json(scratch / _ORIGIN, {"adapter": str(source.adapter), "base": source.base, "dtype": source.dtype})
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{scratch} cannot be written ({error}); TRL_EXT_CACHE names another place") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def merge_into(source: ModelSource, folder: Path) -> None:
    """Write a whole model, with its tokenizer and its generation config, into a folder.

    Raises:
        InputError: the adapter does not fit its base, or its effect is not in the weights that come out of merging.
    """
    check_mergeable(source)
    base = load_base_of_run(source, dtype=source.dtype or "auto")
    head = base.get_output_embeddings()
    adapted = put_on_base(source, base).eval()
    wanted = _logits(adapted)
    if head is not None:  # an adapter may change the embedding and not the head, which may be one tensor
        head.weight = type(head.weight)(head.weight.detach().clone(), requires_grad=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*tie_word_embeddings")  # they are tied again below, if they may be
            model = adapted.merge_and_unload()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise _unmergeable(source, str(error)) from error
    _tie_if_equal(model)
    off, tolerance = (_logits(model) - wanted).abs().max(), 0.05 if model.dtype.itemsize < 4 else 1e-4
    if off > tolerance * wanted.abs().max():
        raise _unmergeable(source, f"merged, it gives other scores, by up to {off:.2g}")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    with contextlib.suppress(OSError, ValueError):  # of a model with images; a text model has none
        load_tokenizer(source, AutoProcessor).save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


@torch.no_grad()
def _logits(model: PreTrainedModel) -> torch.Tensor:
    """Scores of the next tokens in a short text of any tokens."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    logits: torch.Tensor = model(input_ids=torch.arange(16)[None] * 7919 % vocabulary).logits
    return logits.float()


def _tie_if_equal(model: PreTrainedModel) -> None:
    """One tensor for embedding and output head where they are equal, and a configuration that says so."""
    head = model.get_output_embeddings()
    if head is not None:
        embedding = model.get_input_embeddings().weight
        tied = embedding.shape == head.weight.shape and torch.equal(embedding, head.weight)
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = tied
        if tied:
            head.weight = embedding


def _unmergeable(source: ModelSource, why: str) -> InputError:
    return InputError(
        f"the adapter {source.name!r} cannot be merged into its base model, which vLLM and a new adapter need: "
        f"{' '.join(why.split())}. Sample with HF generate (use_vllm: false)"
    )


def fingerprint(source: ModelSource) -> str:
    """A hash of what a model follows from: the files of adapter, base and tokenizer, and the dtype."""
    from transformers.utils.hub import cached_file

    base = Path(source.base).expanduser()
    if not base.is_dir():
        base = Path(str(cached_file(source.base, CONFIG, revision=source.revision))).parent
    places = [base, *([source.adapter] if source.adapter else [])]
    made_of = [str(source.dtype), "1", *source.quantization]
    digest = hashlib.sha256(json.dumps(made_of).encode())
    for path in (path for place in places for path in _files(place)):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _files(place: Path) -> Iterator[Path]:
    """Weights, configurations and tokenizers of a folder; not what a run has put next to them."""
    suffixes, starts = (".safetensors", ".model", ".txt", ".jinja"), ("pytorch_model", "adapter_", "tokenizer")
    for path in sorted(place.iterdir()):
        kept = path.suffix in suffixes or path.name.startswith(starts) or "config" in path.name
        if kept and path.is_file() and path.name != "config.yaml":
            yield path
