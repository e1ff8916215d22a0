"""A real model with its real tokenizer, out of its GGUF file, through what people do with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from tests.hub.test_push import run_python
from tests.recipes.test_grpo import TINY_RUN
from tests.recipes.test_left_behind import evaluated, recipe
from tests.recipes.test_sft_and_pipeline import SMALL_SFT
from tests.support.hub_server import local_hub
from tests.support.versions import needs_gguf, needs_smollm2, needs_vllm
from trl_ext.generation import gguf
from trl_ext.generation.completion import Sampling
from trl_ext.generation.model_source import locate
from trl_ext.generation.prompts import format_prompt, load_prompt
from trl_ext.generation.samplers import VLLMSampler, vllm_params
from trl_ext.io import read_jsonl
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.sft import SFT_SETTINGS
from trl_ext.step.prompt_sharing import Completions, SharedPrompts, completion_log_probs

pytestmark = [pytest.mark.slow, needs_gguf, needs_smollm2, pytest.mark.timeout(900)]  # next to other tests, too

# float32 sums in another order, through 30 layers, make logits of up to 30 differ in their last digits, by about
# 30 * 2**-24 * sqrt(30 * 576) = 2e-4 at the worst; a position that is off by one, or padding that is attended to, makes
# log-probabilities differ by 0.1 and more.
AGREE = 2e-4
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
SHORT = {
    "dataset": "mini_math", "prompt": "question_only", "dtype": "float32", "stop": None, "train_problems": 8,
    "validation_problems": 2, "validate_every": 2, "sampling_max_tokens": 6, "validation_temperature": 0.0,
}  # fmt: skip
GRPO = {
    **TINY_RUN, **SHORT, **LORA, "max_steps": 2, "rollout_batch_size": 4, "group_size": 4, "train_batch_size": 4,
    "micro_train_batch_size": 4, "share_prompt_prefix": True, "save_strategy": "steps", "save_steps": 1, "preset": "dr_grpo",
    "learning_rate": 0.001, "reward": "tests/generation/test_gguf.py:length", "skip_zero_advantage_rows": False,
}  # fmt: skip
SFT = {
    **SMALL_SFT, **SHORT, **LORA, "max_steps": 2, "train_batch_size": 2, "micro_train_batch_size": 2, "learning_rate": 0.001,
    "validation_problems": 1,
}  # fmt: skip


def length(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within a group, whatever a model of 135M parameters answers."""
    return [float(len(completion)) for completion in completions]


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a cache of its own, in which the model is converted once."""
    folder = tmp_path_factory.mktemp("gguf")
    cache = pytest.MonkeyPatch()
    cache.setenv("TRL_EXT_CACHE", str(folder / "cache"))
    locate("smollm2")
    cache.setattr(gguf, "convert", lambda *_: pytest.fail("it was converted twice"))
    yield folder
    cache.undo()


@pytest.fixture(scope="module")
def base(top: Path) -> str:
    return locate("smollm2").base


def test_the_model_is_the_one_that_was_published(base: str) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008  # SmolLM2-135M, tied
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<|im_start|>", "<|im_end|>", 49152)
    assert tokenizer.tokenize("is  128") == [
        "is",
        "ĠĠ",
        "1",
        "2",
        "8",
    ]  # single digits, and the spaces before on their own
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).startswith("The capital of France is Paris")
    assert answer[-1] == tokenizer.eos_token_id  # it ends its turn by itself


def prompts_and_completions(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two prompts of different lengths, padded on the left (2, P), and two completions of each (4, T), with masks."""
    problems = ["What is 12 + 7?", "Tom has 128 apples and buys  3 more boxes of 12. How many apples does he have now?"]
    prompts = [format_prompt(load_prompt("question_only"), problem) for problem in problems]
    said = [" 19", " 12 + 7 = 19, so the answer is 19.", " 164", " He has 128 + 36 = 164 apples."]
    padded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    answers = tokenizer(said, return_tensors="pt", padding=True, padding_side="right")
    return padded.input_ids, padded.attention_mask, answers.input_ids, answers.attention_mask


@torch.no_grad()
def test_shared_and_padded_prompts_give_the_same_log_probs(base: str) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    prompts, attended, ids, mask = prompts_and_completions(tokenizer)
    groups = [0, 0, 1, 1]
    whole = torch.cat([prompts[groups], ids], dim=1), torch.cat([attended[groups], mask], dim=1)
    padded = _log_probs(model(*whole, position_ids=(whole[1].cumsum(1) - 1).clamp(min=0)).logits, ids)
    rows, shared = Completions(groups, mask.sum(dim=1).tolist()), SharedPrompts(prompts, attended, [0, 1], 1, False)
    found, _ = completion_log_probs(model, shared.cache(model.base_model, rows), prompts[groups], ids, mask, rows)
    assert ((found - padded) * mask).abs().max() < AGREE
    for row, group in enumerate(groups):  # and each alone, without any padding
        alone = torch.cat([prompts[group][attended[group] == 1], ids[row][mask[row] == 1]])[None]
        one = _log_probs(model(alone).logits, ids[row][mask[row] == 1][None])[0]
        assert (one - found[row][mask[row] == 1]).abs().max() < AGREE


def _log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of the completions' tokens (rows, T), which the sequences end in."""
    of_completion = logits[:, -ids.shape[1] - 1 : -1].float().log_softmax(-1)
    return of_completion.gather(2, ids[..., None])[..., 0]


@pytest.mark.nightly
def test_every_recipe_takes_it_and_what_it_leaves(top: Path, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"problems": 2, "max_tokens": 4, "prompt": "question_only"}
    assert len(run_evaluation(evaluated("smollm2", top / "before", **evaluation)).rows) == 2
    run_evaluation(evaluated("smollm2", top / "before", **evaluation))
    assert "shown, not measured again" in capsys.readouterr().out  # since the file is the same
    learned = recipe(SFT_SETTINGS, SFT, "smollm2", top / "sft")
    summary = recipe(GRPO_SETTINGS, GRPO, "smollm2", top / "grpo")
    assert "share_prompt_prefix is off" not in capsys.readouterr().out
    run = top / "grpo" / "run"
    assert json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    assert learned["gguf"] == summary["gguf"]
    assert summary["gguf"]["file"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    card = (run / "README.md").read_text()
    assert card.count("The model of the GGUF file `SmolLM2-135M-Instruct.Q4_1.gguf`") == 1
    assert r"What Q4\_1 and Q8\_0 had rounded away, to 5.74 bits per weight, is lost" in card
    assert "model_name_or_path: smollm2" in (run / "config.yaml").read_text()
    resumed = recipe(GRPO_SETTINGS, {**GRPO, "resume": str(run / "checkpoint-1")}, "smollm2", top / "grpo")
    assert resumed["gguf"] == summary["gguf"]
    assert len(run_evaluation(evaluated(run, top / "after", **evaluation)).rows) == 2


@pytest.mark.nightly
@needs_vllm
@pytest.mark.vllm
def test_trained_with_vllm_and_correction_it_is_pushed(top: Path) -> None:
    engine = {
        "use_vllm": "true",
        "vllm_max_model_length": 128,
        "vllm_dtype": "float32",
        "sampler_weight": "token",
        "lora_dropout": 0.0,
    }
    recipe(GRPO_SETTINGS, {**GRPO, **engine}, "smollm2", top / "vllm")
    run = top / "vllm" / "run"
    steps = [row for row in read_jsonl(run / "metrics.jsonl") if "sampling/sampling_logp_difference/max" in row]
    assert len(steps) == GRPO["max_steps"]
    for row in steps:  # of the second one after the engine has had an adapter's update
        assert row["sampling/sampling_logp_difference/max"] < AGREE
    assert float((run / "adapter_model.safetensors").stat().st_size) > 0
    with local_hub() as hub:
        done = run_python(
            hub, "-m", "trl_ext.hub", "push", str(run), "--repo_id", "me/smol", "--merge_adapter", cwd=top
        )
        assert done.returncode == 0, done.stderr
        for name, data in hub.files["me/smol"].items():
            (top / "down" / name).parent.mkdir(parents=True, exist_ok=True)
            (top / "down" / name).write_bytes(data)
    asked = {"problems": 2, "max_tokens": 4, "prompt": "question_only", "stop": []}
    here, there = (
        run_evaluation(evaluated(model, top / name, **asked)) for model, name in ((run, "r"), (top / "down", "d"))
    )
    assert [row["response"] for row in here.rows] == [row["response"] for row in there.rows]


@needs_vllm
@pytest.mark.vllm
def test_vllm_gives_what_it_samples_the_models_log_probs(base: str) -> None:
    sampler = VLLMSampler(
        "smollm2", Sampling(1.0, 1.0, 12, 0, (), 0), dtype="float32", max_model_len=256, enforce_eager=True
    )
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    prompts = [format_prompt(load_prompt("question_only"), problem) for problem in ("What is 12 + 7?", "What is  3?")]
    completions = sampler(prompts, [0, 1])
    params = [vllm_params(sampler.sampling, seed) for seed in (7, 8)]
    asked: list[Any] = [{"prompt_token_ids": tokenizer(prompt).input_ids} for prompt in prompts]
    for given, output in zip(asked, sampler.llm.generate(asked, params, use_tqdm=False), strict=True):
        ids = torch.tensor(output.outputs[0].token_ids)
        sampled = torch.tensor([next(iter(step.values())).logprob for step in output.outputs[0].logprobs])
        with torch.no_grad():
            logits = model(torch.tensor([given["prompt_token_ids"] + ids.tolist()])).logits
        assert (_log_probs(logits, ids[None])[0] - sampled).abs().max() < AGREE
    assert all(completion.tokens for completion in completions)
