"""The base policy: made from a seed, cached, loadable by everybody, and a base model in what it has read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext.generation.hf import hf_generate
from trl_ext.generation.prompts import format_prompt, load_prompt
from trl_ext.mini import policy as base_policy
from trl_ext.mini.policy import BasePolicyConfig, documents, make_base_policy, pretrain, train_tokenizer
from trl_ext.mini.problems import problems, split_of
from trl_ext.mini.tasks import TASKS
from trl_ext.rewards.extract import boxed, r1_zero

SMALL = BasePolicyConfig(hidden=32, layers=1, heads=1, intermediate=32, steps=3, batch=4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base_policy(0, tmp_path_factory.mktemp("cache"), SMALL, progress=False)


def test_auto_classes_load_the_policy_and_eos_and_pad_are_set(small: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(small), AutoTokenizer.from_pretrained(small)
    assert model.config.architectures == ["Qwen3ForCausalLM"]  # vLLM knows it by this name
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_tokenizer_round_trips_every_text_even_unseen_ones(small: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small)
    row = next(problems("validation"))
    texts = [format_prompt(load_prompt(name), row["problem"]) for name in ("r1_zero", "question_only")]
    texts += [row["solution"], "Ünïcode → 😀", "   ", "10 100 1000", "</answer>", "a\nb\tc"]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_pretraining_uses_the_training_split_and_mixed_formats() -> None:
    pairs = list(islice(documents(seed=0, question_only_share=0.15), 4000))
    head, tail = load_prompt("r1_zero").split("{question}")
    asked = [p.removeprefix(head).removesuffix(tail) for p, _ in pairs]
    formatted = [r1_zero(r) is not None for p, r in pairs if p.startswith(head)]
    bare = [boxed(r) is not None for p, r in pairs if not p.startswith(head)]
    assert all(split_of(p) == "train" for p in asked)
    assert 0.35 < sum(formatted) / len(formatted) < 0.5  # a draw of ~3400 has a deviation below 0.01
    assert 0.4 < sum(bare) / len(bare) < 0.6
    assert abs(len(bare) / len(pairs) - 0.15) < 0.03


def test_pretraining_on_mini_math_is_what_it_was() -> None:
    """Figures of mini-MATH are compared across versions: its texts must not change with the other tasks."""
    texts = json.dumps(list(islice(documents(seed=0, question_only_share=0.15), 3000)))
    assert hashlib.sha256(texts.encode()).hexdigest().startswith("f76e591afb1b00ea")
    tokenizer = train_tokenizer(BasePolicyConfig(), 0).backend_tokenizer.to_str()
    assert hashlib.sha256(tokenizer.encode()).hexdigest().startswith("99f829090dbbad81")


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["arithmetic", "cups"])
def test_a_task_has_texts_and_tokens_of_its_own(name: str) -> None:
    task = TASKS.build(name, lapses=0.2)()
    pairs = list(islice(documents(0, 0.15, task), 500))
    by_problem = {row["problem"]: row["answer"] for row in islice(task.problems("train", 0), 500)}
    head, tail = load_prompt("r1_zero").split("{question}")
    stated = {p.removeprefix(head).removesuffix(tail): r1_zero(r) for p, r in pairs}
    right = [by_problem[p] == answer for p, answer in stated.items() if answer and p in by_problem]
    assert len(right) > 150
    assert 0.2 < sum(right) / len(right) < 0.8, "it has read incorrect answers too"
    tokenizer = train_tokenizer(task.policy, 0, task)
    assert all(len(tokenizer(text)["input_ids"]) == 1 for text in task.tokens)
    assert ("12" in tokenizer.get_vocab()) == ("12" in task.tokens)
    prompt, response = pairs[0]
    assert tokenizer.decode(tokenizer(prompt + response)["input_ids"]) == prompt + response


@pytest.mark.moderate
def test_a_policy_is_kept_for_each_task_and_its_options(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    for task, options in (("arithmetic", {}), ("arithmetic", {"incorrect": "equal"}), ("cups", {})):
        made.append(make_base_policy(0, small.parent, SMALL, progress=False, task=task, options=options))
    assert len({small, *made}) == 4
    monkeypatch.setattr(base_policy, "pretrain", None)
    assert make_base_policy(0, small.parent, SMALL, task="cups", options={"longest": 12, "cups": 5}) == made[-1]
    with pytest.raises(ValueError, match=r"unknown embedded task 'cup'. Did you mean 'cups'\?"):
        make_base_policy(0, small.parent, SMALL, task="cup")


def test_policy_cache_is_used_and_keyed_by_seed_and_shape(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small.parent
    monkeypatch.setattr(base_policy, "pretrain", None)  # calling it would fail
    assert make_base_policy(0, root, SMALL) == small
    (small / "0f1e2d").mkdir(exist_ok=True)  # as lighteval keeps responses next to a model
    assert make_base_policy(0, root, SMALL) == small
    for seed, config in ((1, SMALL), (0, dataclasses.replace(SMALL, steps=4))):
        with pytest.raises(TypeError, match="not callable"):
            make_base_policy(seed, root, config)
    left = [path.name for path in root.iterdir() if path.name.startswith("making-")]
    assert not left, "a failed attempt leaves nothing behind"


def test_a_half_written_cache_entry_is_made_again(small: Path) -> None:
    (small / "recipe.json").unlink()
    (small / "model.safetensors").write_bytes(b"half")
    (killed := small.parent / f"making-{small.name}").mkdir()
    (killed / "left.txt").touch()
    assert make_base_policy(0, small.parent, SMALL, progress=False) == small
    AutoModelForCausalLM.from_pretrained(small)
    assert not (small / "left.txt").exists()


@pytest.mark.moderate
def test_two_runs_that_start_together_make_the_policy_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def slowly(*args: Any) -> Any:
        made.append(1)
        time.sleep(0.3)
        return pretrain(*args)

    monkeypatch.setattr(base_policy, "pretrain", slowly)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: make_base_policy(0, tmp_path, SMALL, progress=False), range(2))
    assert first == second
    assert len(made) == 1


def test_same_seed_gives_same_weights_and_keeps_global_rng() -> None:
    tokenizer = train_tokenizer(SMALL, 0)
    before = torch.random.get_rng_state()
    first, again, other = (pretrain(tokenizer, SMALL, seed, progress=False) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    for (name, a), b in zip(first.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_pretraining_loss_covers_response_and_eos_not_the_prompt() -> None:
    tokenizer = train_tokenizer(SMALL, 0)
    batches = base_policy._batches(tokenizer, dataclasses.replace(SMALL, steps=20), seed=0)
    learned, endings = Counter[str](), 0
    for ids, targets in batches:
        for row, target in zip(ids, targets, strict=True):
            kept = target[target >= 0]
            endings += int(kept[-1] == tokenizer.eos_token_id)
            learned[tokenizer.decode(kept[:-1])] += 1
            first = int((target >= 0).nonzero()[0])
            assert tokenizer.decode(row[: first + 1]).endswith(("<think>", "?", ".", "$")) or first == 0
    wanted = Counter(r for _, r in islice(documents(0, SMALL.question_only_share), 20 * SMALL.batch))
    assert learned == wanted
    assert endings == 20 * SMALL.batch


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXT_CACHE", str(tmp_path / "elsewhere"))
    assert make_base_policy(0, config=SMALL, progress=False).parent == tmp_path / "elsewhere"


@pytest.mark.nightly
@pytest.mark.slow
def test_default_policy_knows_arithmetic_and_formats_sometimes(policy_cache: Path) -> None:
    began = time.monotonic()
    path = make_base_policy(0, policy_cache, progress=False)
    seconds = time.monotonic() - began
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert sum(p.numel() for p in model.parameters()) < 3e6
    stream = problems("validation", 7)
    rows = Random(0).sample(list(islice(stream, 2000)), 256)
    ids = [tokenizer(format_prompt(load_prompt("r1_zero"), row["problem"]))["input_ids"] for row in rows]
    torch.manual_seed(0)
    settings = model.generation_config
    settings.do_sample, settings.max_new_tokens = True, 80
    texts = tokenizer.batch_decode(hf_generate(model, tokenizer, ids, settings), skip_special_tokens=True)
    formatted = sum(r1_zero(t) is not None for t in texts) / len(texts)
    solved = sum(t.startswith(f" {row['solution']}") for t, row in zip(texts, rows, strict=True)) / len(texts)
    assert 0.3 < formatted < 0.6
    assert solved > 0.6, "of the solutions, most are correct"
    assert seconds < 180, "a minute on two quiet cores; three on busy ones"
