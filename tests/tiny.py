"""A two-layer model and an 18-word tokenizer made in the test: no download, a training step in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = ["<pad>", "<eos>", "<unk>", "a", "b", "c", "stop", "+", "=", *map(str, range(9))]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tiny_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
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


def save_tiny(path: Path) -> Path:
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def prompts(n: int = 16) -> Dataset:
    return Dataset.from_list([{"prompt": f"{i % 9} + {i % 5} =", "answer": str(i % 3)} for i in range(n)])


def share_of_ones(completions: list[str], **_: Any) -> list[float]:
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


def train(trainer_class: Any, config_class: Any, path: Path, reward: Callable[..., Any], **overrides: Any) -> Any:
    """Train the tiny model for a few steps and return the trainer."""
    callbacks = overrides.pop("callbacks", None)
    dataset = overrides.pop("train_dataset", None) or prompts()
    model = overrides.pop("model", None) or tiny_model()
    peft_config = overrides.pop("peft_config", None)
    args = config_class(output_dir=str(path), **{**CONFIG, **overrides})
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=dataset,
        processing_class=tiny_tokenizer(),
        callbacks=callbacks,
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


def weight_difference(a: Any, b: Any) -> float:
    """The largest difference between two models' parameters."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((p.detach() - q.detach()).abs().max().item() for p, q in pairs)
