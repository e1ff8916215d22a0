"""Which correction for a sampler of lower precision keeps long correct answers: the length trap, measured.

The task is to copy words, exactly: one wrong word and the answer is wrong. A small policy is first trained on copies
with a mistake in one word of a hundred, so that it solves short problems mostly and long ones sometimes; then GRPO
improves it on answers that vLLM samples with the policy's weights rounded or perturbed. What each correction makes of
the correct answers is counted by their length, and so is how many problems the policy solves in the end.

    python -m scripts.benchmarks.length_trap                         every correction, five seeds: 20 minutes
    python -m scripts.benchmarks.length_trap --sampler noise --seeds 1 --steps 20
    python -m scripts.benchmarks.length_trap --json docs/results/length_trap.json --plot docs/results/length_trap.png
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PrinterCallback

from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.hf import hf_generate
from trl_ext.generation.vllm import SIMULATED
from trl_ext.plots import figure
from trl_ext.runs.provenance import provenance
from trl_ext.step import Rows

from .random_model import save_random_model

LENGTHS = (8, 16, 32, 64)  # words to copy; the completion has an end of sequence, too
LONGEST = max(LENGTHS) + 2  # tokens that a completion may have
WORDS = [f"w{i}" for i in range(10, 500)]
SEPARATOR = "w3"
NOISE = 0.2  # in standard deviations of a matrix's weights
MISTAKES = 0.01  # of the words of the base policy's training data
CORRECTIONS: dict[str, dict[str, Any] | None] = {  # None: the sampler has the policy's own weights
    "exact sampler": None,
    "none": {"vllm_importance_sampling_correction": False},
    "sequence ratio, rejected over 3 (TRL's default)": {"vllm_importance_sampling_mode": "sequence_mask"},
    "sequence ratio, truncated at 3": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "token ratio, truncated at 2": {"sampler_weight": "token", "sampler_rejection": "keep_all"},
    "token ratio in 0.5 .. 5 (IcePop)": {"sampler_weight": "token", "sampler_weight_options": {"clip_max": None},
                                         "sampler_rejection": "token_ratio"},
    "token ratio, mean ratio in 0.95 .. 1.05": {"sampler_weight": "token", "sampler_rejection": "sequence_mean_ratio"},
    "token ratio, mean k3 up to 0.01": {"sampler_weight": "token", "sampler_rejection": "sequence_mean_k3"},
}  # fmt: skip


def problems(n: int, seed: int, lengths: Sequence[int] = LENGTHS) -> list[dict[str, str]]:
    """N texts of different words, all lengths as often, each with the answer."""
    draw = random.Random(seed)
    texts = [" ".join(draw.sample(WORDS, k=lengths[i % len(lengths)])) for i in range(n)]
    return [{"prompt": f"{text} {SEPARATOR}", "answer": text} for text in texts]


def copied(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The reward: 1 for the very text."""
    return [float(completion.strip() == text) for completion, text in zip(completions, answer, strict=True)]


def with_noise(weight: Tensor) -> Tensor:
    """A matrix with the same noise at every sync."""
    return weight + NOISE * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))


Weigh = Callable[[Rows, Tensor], Tensor | None]  # rows and (B, T) old log-probabilities to weights


class Trainer(ExtGRPOTrainer):
    """Counts what the correction makes of the correct completions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.correct: list[tuple[int, float, bool]] = []  # length, mean weight, whether any token is kept
        super().__init__(*args, **kwargs)
        assert self._loss is not None
        weigh = self._loss.weigh
        self._loss.weigh = functools.partial(self.count, weigh)  # type: ignore[method-assign]

    def count(self, weigh: Weigh, rows: Rows, old_logp: Tensor) -> Tensor | None:
        """The weights that `weigh` gives, counted."""
        weight, mask = weigh(rows, old_logp), rows.trained
        each = torch.ones_like(old_logp) if weight is None else weight.expand_as(old_logp)
        lengths = mask.sum(dim=1)
        for row in (rows.advantages.flatten() > 0).nonzero().flatten().tolist():
            own = each[row][mask[row]]
            self.correct.append((int(lengths[row]), own.mean().item(), bool((own > 0).any())))
        return weight


def base_policy(folder: Path, steps: int) -> Path:
    """A policy that has learned to copy, and to make a mistake in one word of a hundred."""
    save_random_model(folder, "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 50) * (1 - step / steps))
    for step in tqdm(range(steps), desc="base policy"):
        draw = random.Random(step)
        rows = problems(32, step, [draw.randint(2, max(LENGTHS)) for _ in range(32)])
        for row in rows:
            words = [draw.choice(WORDS) if draw.random() < MISTAKES else word for word in row["answer"].split()]
            row["answer"] = " ".join(words)
        full = [tokenizer(f"{row['prompt']} {row['answer']}")["input_ids"] + [tokenizer.eos_token_id] for row in rows]
        batch = tokenizer.pad({"input_ids": full}, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for row, ids in zip(labels, full, strict=True):
            row[: len(ids) // 2] = -100
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def accuracy(model: PreTrainedModel, tokenizer: Any, n: int) -> dict[int, float]:
    """The fraction of n problems of each length that the policy solves, sampled with its own weights at 1."""
    torch.manual_seed(0)
    rows = problems(n * len(LENGTHS), seed=10**6)
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=LONGEST, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    ids = hf_generate(model.eval(), tokenizer, [tokenizer(row["prompt"])["input_ids"] for row in rows], config)
    solved = copied(tokenizer.batch_decode(ids, skip_special_tokens=True), [row["answer"] for row in rows])
    return {length: mean(solved[i :: len(LENGTHS)]) for i, length in enumerate(LENGTHS)}


def by_length(correct: Sequence[tuple[int, float, bool]]) -> dict[int, dict[str, float]]:
    """Per length in words: the number of correct completions, the fraction kept, their mean weight and effective share.

    Args:
        correct: of each completion its tokens, the mean weight of them, and whether any is kept.
    """
    figures: dict[int, dict[str, float]] = {}
    for length in LENGTHS:
        own = [(weight, kept) for tokens, weight, kept in correct if tokens == length + 1]
        if own:
            weights = torch.tensor([weight for weight, _ in own])
            figures[length] = {
                "correct": len(own), "kept": mean(float(kept) for _, kept in own), "mean_weight": weights.mean().item(),
                "effective": (weights.sum() ** 2 / (weights**2).sum().clamp(min=1e-30) / len(own)).item(),
            }  # fmt: skip
    return figures


def train(model: Path, correction: str, how: str, seed: int, steps: int) -> dict[str, Any]:
    """One run's correct completions by length, its metrics, and the accuracy in the end."""
    settings = CORRECTIONS[correction]
    SIMULATED["simulated_noise"] = with_noise
    with tempfile.TemporaryDirectory() as folder:
        config = ExtGRPOConfig(
            output_dir=folder, preset="dr_grpo", use_vllm=True, vllm_mode="colocate", vllm_dtype="float32",
            vllm_max_model_length=2 * LONGEST + 8, max_completion_length=LONGEST, num_generations=8,
            rollout_batch_size=128, train_batch_size=128, per_device_train_batch_size=64, learning_rate=3e-4,
            max_steps=steps, seed=seed, report_to="none", bf16=False, logging_steps=1, save_strategy="no",
            lr_scheduler_type="constant_with_warmup", warmup_steps=5, disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"}, gradient_checkpointing=False,
            vllm_quantization=None if settings is None else f"simulated_{how}", **(settings or {}),
        )  # fmt: skip
        trainer = Trainer(str(model), copied, config, Dataset.from_list(problems(16 * steps, seed + 1)))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    final_accuracy = accuracy(trainer.model, trainer.processing_class, 128)
    rewards = [round(row["reward"], 4) for row in trainer.state.log_history if "reward" in row]
    kept = by_length(trainer.correct)
    return {"correction": correction, "seed": seed, "by_length": kept, "accuracy": final_accuracy, "rewards": rewards}


def table(runs: Sequence[Mapping[str, Any]], before: Mapping[int, float]) -> str:
    """Markdown: per correction what it keeps of correct completions, and the accuracy, means over the seeds."""
    head = [*(f"{n}: kept, weight, effective" for n in (LENGTHS[0], LENGTHS[-1])), *(f"accuracy {n}" for n in LENGTHS)]
    lines = ["| correction | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    lines.append("| before training | | | " + " | ".join(f"{before[n]:.2f}" for n in LENGTHS) + " |")
    for correction in dict.fromkeys(run["correction"] for run in runs):
        own = [run for run in runs if run["correction"] == correction]
        cells = []
        for n in (LENGTHS[0], LENGTHS[-1]):
            cases = [run["by_length"][n] for run in own if n in run["by_length"]]
            cells.append(", ".join(f"{mean(p[key] for p in cases):.2f}" for key in ("kept", "mean_weight", "effective"))
                         if cases else "no correct one")  # fmt: skip
        for n in LENGTHS:
            values = [run["accuracy"][n] for run in own]
            cells.append(f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        lines.append(f"| {correction} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy by length, and the effective share of the correct completions by length, a line per correction."""
    with figure(path, (11, 4.5), (1, 2)) as (left, right):
        for correction in dict.fromkeys(run["correction"] for run in runs):
            own = [run for run in runs if run["correction"] == correction]
            style = {"marker": "o", "label": correction, **({"color": "black"} if "exact" in correction else {})}
            left.plot(LENGTHS, [mean(run["accuracy"][n] for run in own) for n in LENGTHS], **style)
            shares = [[run["by_length"][n]["effective"] for run in own if n in run["by_length"]] for n in LENGTHS]
            right.plot(LENGTHS, [mean(s) if s else float("nan") for s in shares], **style)
        left.set(xlabel="words to copy", ylabel="accuracy after training", ylim=(0, 1))
        right.set(xlabel="words to copy", ylabel="effective share of correct completions", ylim=(0, 1.02))
        left.legend(fontsize=7)


def main() -> None:
    """Make the base policy, train from it with every correction, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", choices=("fp8", "int4", "noise"), default="int4", help="default: int4")
    parser.add_argument("--only", default="", help="corrections whose name contains this")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each correction (default: 5)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run (default: 60)")
    parser.add_argument("--base_steps", type=int, default=1500, help="steps of the base policy (default: 1500)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them into this file")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    chosen = [name for name in CORRECTIONS if args.only in name]
    if not chosen:
        parser.error(f"no correction contains {args.only!r}; there are {', '.join(CORRECTIONS)}")
    with tempfile.TemporaryDirectory() as scratch:
        model = base_policy(Path(scratch), args.base_steps)
        before = accuracy(AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model), 128)
        cases = [(model, name, args.sampler, seed, args.steps) for seed in range(args.seeds) for name in chosen]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, context, max_tasks_per_child=1) as pool:
            runs = list(tqdm(pool.map(train, *zip(*cases, strict=True)), total=len(cases), desc="runs"))
    print(table(runs, before))
    if args.plot:
        draw(runs, args.plot)
    if args.json:
        result = {"sampler": args.sampler, "steps": args.steps, "before": before, "runs": runs, **provenance()}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
