"""The trainers of the recipes on fake models, with the widest micro-batches of a run's settings.

Letters: B rows of a micro-batch, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

from trl_ext.grpo.trainer import ExtGRPOTrainer  # first: it imports vLLM's stand-in before trl

# isort: split
import copy
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from trl_ext.compat.fake_modules import reference_made_by
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.sft.trainer import ExtSFTConfig, ExtSFTTrainer
from trl_ext.step import MicroBatch, OnPrompts, TRLBatch
from trl_ext.tools.estimate.costs.micro_batches import rows_per_gpu, shares_prompts
from trl_ext.tools.estimate.shape import RunShape

OPTIONS = {"use_cpu": True, "use_vllm": "false", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}


class FakeGRPO(ExtGRPOTrainer):
    """The trainer, given its micro-batches."""

    def _warn_of_settings(self, config: ExtGRPOConfig) -> None:
        """The run itself says so; a loss's effect is found on an example, whose values fake tensors do not have."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch


class FakeSFT(ExtSFTTrainer):
    """The trainer, given its micro-batches."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs


def fake_model(shape: RunShape) -> PreTrainedModel:
    """The model at full depth, in the dtype that it is computed in where DeepSpeed keeps a copy of the weights."""
    network = copy.deepcopy(shape.config)
    # FlashAttention-2 needs its kernels; torch's own keep the same tensors for the backward pass.
    network._attn_implementation = "eager" if shape.attention == "eager" else "sdpa"
    dtype = shape.weights_dtype if casts(shape) or shape.autocast_dtype is None else shape.autocast_dtype
    return AutoModelForCausalLM.from_config(network, dtype=dtype)


def casts(shape: RunShape) -> bool:
    """Whether weights are cast for each pass; DeepSpeed has a copy of them (accelerate's `set_mixed_precision`)."""
    return shape.autocast_dtype is not None and shape.launch.zero_stage == 0


def fake_trainer(shape: RunShape, folder: str) -> FakeGRPO | FakeSFT:
    """The recipe's trainer, ready for `Trainer.training_step`."""
    common = OPTIONS | {
        "output_dir": folder,
        "bf16": casts(shape) and shape.autocast_dtype == torch.bfloat16,
        "per_device_train_batch_size": shape.micro_rows,
        "gradient_accumulation_steps": rows_of_step(shape) // shape.micro_rows,
        "gradient_checkpointing": shape.checkpointing,
        "optim": shape.optimizer,
        **shape.loss,
    }
    trainer = _grpo(shape, common) if shape.recipe == "grpo" else _sft(shape, common)
    trainer.model.train()
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.accelerator.prepare_model(trainer.model, device_placement=False)  # autocast around its forward pass
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def _grpo(shape: RunShape, common: dict[str, Any]) -> FakeGRPO:
    if not shape.beta:
        common.pop("kl_estimator", None)  # which a configuration without a penalty refuses
    config = ExtGRPOConfig(
        **common,
        num_generations=shape.group,
        max_completion_length=shape.lengths.max_completion,
        micro_batch_tokens=shape.micro_tokens,
        share_prompt_prefix=shares_prompts(shape),
        dynamic_micro_batches=shape.dynamic,
    )
    with reference_made_by(lambda: fake_model(shape)):
        return FakeGRPO(
            fake_model(shape),
            lambda completions, **_: [0.0] * len(completions),
            config,
            Dataset.from_list([{"prompt": "a"}] * rows_of_step(shape)),
            processing_class=_tokenizer(),
            peft_config=shape.peft,
        )


def _sft(shape: RunShape, common: dict[str, Any]) -> FakeSFT:
    known = {field.name for field in fields(ExtSFTConfig)}
    rows = Dataset.from_list([{"input_ids": [2, 1], "completion_mask": [0, 1]}] * rows_of_step(shape))
    return FakeSFT(
        model=fake_model(shape),
        args=ExtSFTConfig(**{name: value for name, value in common.items() if name in known}),
        train_dataset=rows,
        processing_class=_tokenizer(),
        peft_config=shape.peft,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rows_of_step(shape: RunShape) -> int:
    """Rows of the fake step: whole groups, as many of the mean prompt as of the longest.

    With `micro_tokens` they are so many that they fill a micro-batch, if those of the real step do: where prompts are
    not shared and rows of a length get together, those of either prompt alone.
    """
    if shape.recipe != "grpo":
        return 2 * shape.micro_rows
    half = math.lcm(shape.micro_rows, shape.group)
    filling = min((shape.micro_tokens or 0) // shape.lengths.max_completion, rows_per_gpu(shape))
    return 2 * half * max(1, math.ceil(filling / (2 * half if shares_prompts(shape) else half)))


def micro_batches(trainer: FakeGRPO | FakeSFT, shape: RunShape) -> Sequence[MicroBatch | TRLBatch]:
    """The widest of a step, one of each shape; all of them where they share prompts."""
    return _of_grpo(trainer, shape) if isinstance(trainer, FakeGRPO) else [_of_sft(shape)]


def trained_tokens(shape: RunShape) -> int:
    """The most tokens of a row that the loss counts."""
    if shape.longest_row is None:
        return shape.lengths.max_completion
    return max(1, shape.longest_row - round(shape.lengths.prompt))


def _of_sft(shape: RunShape) -> TRLBatch:
    assert shape.longest_row is not None
    ids = torch.ones(shape.micro_rows, shape.longest_row, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": ids.clone(), "labels": ids.clone()}


def _of_grpo(trainer: FakeGRPO, shape: RunShape) -> Sequence[MicroBatch | TRLBatch]:
    rows, lengths = rows_of_step(shape), shape.lengths
    prompts = torch.tensor([lengths.longest_prompt] * (rows // 2) + [max(1, round(lengths.prompt))] * (rows // 2))
    places = torch.arange(lengths.longest_prompt)
    completion = torch.ones(rows, lengths.max_completion, dtype=torch.long)
    batch: TRLBatch = {
        "prompt_ids": torch.ones(rows, lengths.longest_prompt, dtype=torch.long),
        "prompt_mask": (places >= lengths.longest_prompt - prompts[:, None]).long(),
        "completion_ids": completion,
        "completion_mask": completion.clone(),
        "advantages": torch.ones(rows),
        "num_items_in_batch": completion.sum(),
    }
    batch["group"] = torch.arange(rows) // shape.group
    if shape.engine != "hf":
        batch["sampling_per_token_logps"] = torch.zeros(completion.shape)
    if shape.beta:
        batch["ref_per_token_logps"] = torch.zeros(completion.shape)
    slices = [
        {name: value[start : start + shape.micro_rows] if value.ndim else value for name, value in batch.items()}
        for start in range(0, rows, shape.micro_rows)
    ]
    trainer._buffered_inputs = slices
    if trainer._planner is None:
        return slices[:1]
    one_process = shape.launch.gpus == 1 and not shape.launch.zero_stage
    trainer._planner.batching = replace(trainer._planner.batching, prompts_apart=one_process)
    trainer._planner.plan(slices)
    return _distinct(trainer._planner.plans[0])


def tensors_of_rows(
    trainer: FakeGRPO | FakeSFT, widest: Sequence[MicroBatch | TRLBatch]
) -> tuple[list[torch.Tensor], int]:
    """What a trainer keeps of rows, the rollout and the micro-batches that are copied from it; and how many rows."""
    slices, planned = widest, list[MicroBatch]()
    if isinstance(trainer, FakeGRPO):
        slices = trainer._buffered_inputs
        planned = [one for plan in trainer._planner.plans for one in plan] if trainer._planner else []
    batches = [part for part in slices if not isinstance(part, MicroBatch)]
    rows = sum(len(part["completion_ids" if "completion_ids" in part else "input_ids"]) for part in batches)
    kept = [batches, [(one.rows.tensors(), one.copies and one.copies.of) for one in planned]]
    return [tensor for tensor in tree_leaves(kept) if isinstance(tensor, torch.Tensor)], rows


def _distinct(plan: list[MicroBatch]) -> list[MicroBatch]:
    if any(isinstance(one.forward, OnPrompts) for one in plan):
        return plan
    shapes = [(len(one.rows), one.rows.prompt_ids.shape[1], one.rows.completion_ids.shape[1]) for one in plan]
    return [one for place, one in enumerate(plan) if shapes[place] not in shapes[:place]]
