"""A two-layer model and an 18-word tokenizer made in the test: no download, a training step in milliseconds."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns that rollout_func is new

WORDS = ["<pad>", "<eos>", "<unk>", "a", "b", "c", "stop", "+", "=", *map(str, range(9))]


def tiny_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    words = [
        *words,
        "abcdef",
    ]  # what transformers spells out to learn how a tokenizer joins its tokens at a stop string
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tiny_model(seed: int = 0, vocab_size: int = len(WORDS)) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # far enough from uniform that completions differ in length and reward
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


PIECES = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789<>/ ", "</", "answer", ">b"]


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Characters and three longer pieces, so that `</answer>` is three tokens and may end inside one of them."""
    core = Tokenizer(models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=2))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def chain_model(tokenizer: PreTrainedTokenizerFast, *chains: Sequence[str]) -> Qwen3ForCausalLM:
    """A model that walks along the chains: of two tokens that follow each other, the first decides the second."""
    sizes = {"vocab_size": len(tokenizer), "hidden_size": len(tokenizer), "head_dim": 32}  # which vLLM takes
    config = {**tiny_model().config.to_dict(), **sizes}
    model = Qwen3ForCausalLM(Qwen3Config(**{**config, "tie_word_embeddings": False}))
    successor = torch.zeros(len(tokenizer), len(tokenizer))  # logits, next x current
    for chain in chains:
        ids = tokenizer.convert_tokens_to_ids(list(chain))
        successor[ids[1:], ids[:-1]] = 20.0
    with torch.no_grad():
        for layer in model.model.layers:  # nothing but the embedding reaches the head
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer)))
        model.lm_head.weight.copy_(successor)
    return model


CALL, WAIT = "```calculator\n", "\n```\n```output"
TOOL_PIECES = [
    "<pad>",
    "<eos>",
    "<unk>",
    *"abcdefghijklmnopqrstuvwxyz0123456789*+=\n` ",
    "```",
    CALL,
    WAIT,
    "so",
    "guess",
    "2*3",
    "3+3",
]


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and what a call of the calculator is made of."""
    core = Tokenizer(models.Unigram([(piece, -float(len(piece) == 1)) for piece in TOOL_PIECES], unk_id=2))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def calling_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """After `=` it guesses or calls; after an answer it states a number, or calls again."""
    calls = [("=", CALL, *said, WAIT) for said in (["2*3"], ["3+3"], ["*"])]
    numbers = [[before, number, "<eos>"] for before in ("guess", "so") for number in "67"]
    return chain_model(tokenizer, *calls, ("=", "guess"), ("\n", "so"), ("\n", CALL), *numbers)


def save_tiny(path: Path, seed: int = 0) -> Path:
    tiny_model(seed).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def save_wide(folder: Path) -> Path:
    """A model with matrices of whole blocks of 64 numbers, which bitsandbytes takes on a CPU, and heads as vLLM's."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "tie_word_embeddings": False}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**tiny_model().config.to_dict(), **shape})).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def no_engine_steps() -> Any:
    """`LLM.llm_engine` of an engine of a test that answers without a step of decoding."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1))
    return SimpleNamespace(step=list, vllm_config=config)


def prompts(n: int = 16) -> Dataset:
    return Dataset.from_list([{"prompt": f"{i % 9} + {i % 5} =", "answer": str(i % 3)} for i in range(n)])


def fraction_of_ones(completions: list[str], **_: Any) -> list[float]:
    """Share of the word 1 in the completion."""
    return [text.split().count("1") / max(1, len(text.split())) for text in completions]


def ends_early(completions: list[str], **_: Any) -> list[float]:
    """1 if the completion has at most 9 words, a reward that plain sampling gets about half of the time."""
    return [float(len(text.split()) <= 9) for text in completions]


CONFIG: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "max_completion_length": 12,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "learning_rate": 0.1,
    "optim": "sgd",
    "max_steps": 3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "seed": 7,
}


NOT_SFT_CONFIG = ("questions", "grader", "folder")
NOT_CONFIG = (
    "callbacks",
    "eval_dataset",
    "model",
    "peft_config",
    "quantization_config",
    "processing_class",
    "rollout_func",
    "train_dataset",
)


def make_trainer(trainer_class: Any, config_class: Any, path: Path, reward: Any, **overrides: Any) -> Any:
    """A trainer of the tiny model; `overrides` are arguments of the trainer or, most of them, of the config."""
    _keep_imports_out_of_garbage_collection()
    given = {name: overrides.pop(name) for name in NOT_CONFIG if name in overrides}
    given.setdefault("train_dataset", prompts())
    given.setdefault("processing_class", tiny_tokenizer())
    model = given.pop("model", None) or tiny_model()
    args = config_class(output_dir=str(path), **{**CONFIG, **overrides})
    return trainer_class(model=model, reward_funcs=reward, args=args, **given)


def tiny_sft(trainer_class: Any, config_class: Any, path: Path, rows: Any, **overrides: Any) -> Any:
    """An SFT trainer of the tiny model on tokenized rows; `overrides` as in `make_trainer`."""
    _keep_imports_out_of_garbage_collection()
    given = {name: overrides.pop(name) for name in (*NOT_CONFIG, *NOT_SFT_CONFIG) if name in overrides}
    given.setdefault("processing_class", tiny_tokenizer())
    model = given.pop("model", None) or tiny_model()
    others = ["max_completion_length", "num_generations"]  # GRPO's, and what a test's own batch sizes decide
    others += ["per_device_train_batch_size", "gradient_accumulation_steps"] * ("train_batch_size" in overrides)
    settings = {name: value for name, value in CONFIG.items() if name not in others}
    args = config_class(output_dir=str(path), **{**settings, "gradient_checkpointing": False, **overrides})
    if rows is not None:
        given["train_dataset"] = Dataset.from_list(rows)
    return trainer_class(model=model, args=args, **given)


def train(trainer_class: Any, config_class: Any, path: Path, reward: Any, **overrides: Any) -> Any:
    """Train the tiny model for a few steps and return the trainer."""
    trainer = make_trainer(trainer_class, config_class, path, reward, **overrides)
    trainer.train()
    return trainer


@functools.cache
def _keep_imports_out_of_garbage_collection() -> None:
    """Trainer collects garbage when it starts: 0.3 s with everything imported here, more than the training itself."""
    gc.collect()
    gc.freeze()


def scripted(completion: Callable[[int, int], list[int]]) -> Callable[..., Any]:
    """A `rollout_func` whose completions are `completion(row, step)`, the row counted over all ranks."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        start, step = trainer.accelerator.process_index * len(prompts), trainer.state.global_step
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": [completion(start + i, step) for i in range(len(prompts))],
            "logprobs": None,
        }

    return rollout


def weight_difference(a: Any, b: Any) -> float:
    """The largest difference between two models' parameters."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p.detach() - q.detach()).abs().max().item() for p, q in pairs)
