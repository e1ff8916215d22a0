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
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer
from trl_ext.step import MicroBatch, OnPrompts, TRLBatch
from trl_ext.tools.estimate.costs.micro_batches import shares_prompts
from trl_ext.tools.estimate.memory.quantized import quantize
from trl_ext.tools.estimate.planned import PlannedRun

OPTIONS = {"use_cpu": True, "use_vllm": "false", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
_LEFT_OUT = {  # settings of a run, next to `OPTIONS`, of what a step on fake tensors does not have
    # precision, processes and kernels of GPUs
    "fp16", "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "torch_compile", "use_liger_kernel",
    "full_determinism", "deterministic", "activation_offloading",
    # what is done next to the steps
    "push_to_hub", "eval_strategy", "load_best_model_at_end", "sync_ref_model",
    # the run's model, rewards, tokenizer and rows
    "model_init_kwargs", "reward_weights", "eos_token", "pad_token", "packing", "padding_free", "dataset_num_proc",
    # of teachers, whose weights are counted apart
    "teacher", "teacher_url", "teacher_column", "teacher_weights", "teacher_init_kwargs", "distillation",
    "distillation_options",
    # sizes that follow from those of the fake step
    "train_batch_size", "generation_batch_size", "steps_per_generation",
}  # fmt: skip


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


def fake_model(run: PlannedRun) -> PreTrainedModel:
    """The model at full depth, in the dtype that it is computed in where DeepSpeed keeps a copy of the weights."""
    network = copy.deepcopy(run.network)
    # FlashAttention-2 needs its kernels; torch's own keep the same tensors for the backward pass.
    network._attn_implementation = "eager" if run.attention == "eager" else "sdpa"
    dtype = run.weights_dtype if casts(run) or run.autocast_dtype is None else run.autocast_dtype
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype  # as in `_settings`
    model = AutoModelForCausalLM.from_config(network, dtype=dtype)
    return quantize(model, run.quantized_bits, run.model.use_bnb_nested_quant) if run.quantized_bits else model


def casts(run: PlannedRun) -> bool:
    """Whether weights are cast for each pass; DeepSpeed has a copy of them (accelerate's `set_mixed_precision`)."""
    return run.autocast_dtype is not None and run.launch.zero_stage == 0


def fake_trainer(run: PlannedRun, folder: str) -> FakeGRPO | FakeSFT:
    """The recipe's trainer, ready for `Trainer.training_step`."""
    trainer = _grpo(run, folder) if run.recipe == "grpo" else _sft(run, folder)
    trainer.model.train()
    if trainer.args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.accelerator.prepare_model(trainer.model, device_placement=False)  # autocast around its forward pass
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def _settings(run: PlannedRun, kind: type[Any], folder: str, **own: Any) -> Any:
    """The run's, as they are resolved, in a configuration for the fake step on this CPU."""
    rows = run.config.per_device_train_batch_size
    own |= OPTIONS | {
        "output_dir": folder,
        "bf16": casts(run),  # in place of float16 too, which has as many bytes
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": rows_of_step(run) // rows,
    }
    config = kind(**own)
    for name in (field.name for field in fields(kind) if field.init):
        if name not in own and name not in _LEFT_OUT:
            setattr(config, name, getattr(run.config, name))
    return config


def _grpo(run: PlannedRun, folder: str) -> FakeGRPO:
    sizes = {"num_generations": run.group, "max_completion_length": run.lengths.max_completion}
    config = _settings(run, ExtGRPOConfig, folder, share_prompt_prefix=shares_prompts(run), **sizes)
    with reference_made_by(lambda: fake_model(run)):
        return FakeGRPO(
            fake_model(run),
            lambda completions, **_: [0.0] * len(completions),
            config,
            Dataset.from_list([{"prompt": "a"}] * rows_of_step(run)),
            processing_class=_tokenizer(),
            peft_config=run.peft,
        )


def _sft(run: PlannedRun, folder: str) -> FakeSFT:
    rows = Dataset.from_list([{"input_ids": [2, 1], "completion_mask": [0, 1]}] * rows_of_step(run))
    return FakeSFT(
        model=fake_model(run),
        args=_settings(run, ExtSFTConfig, folder),
        train_dataset=rows,
        processing_class=_tokenizer(),
        peft_config=run.peft,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rows_of_step(run: PlannedRun) -> int:
    """Rows of the fake step: whole groups, as many of the mean prompt as of the longest.

    Micro-batches of limited tokens are filled, if the real step's rows do so: where prompts are not shared and rows of
    a length get together, by those of either prompt alone.
    """
    micro = run.config.per_device_train_batch_size
    if run.recipe != "grpo":
        return 2 * micro
    half = math.lcm(micro, run.group)
    filling = min((run.token_limit or 0) // run.lengths.max_completion, run.rows_per_gpu)
    return 2 * half * max(1, math.ceil(filling / (2 * half if shares_prompts(run) else half)))


def micro_batches(trainer: FakeGRPO | FakeSFT, run: PlannedRun) -> Sequence[MicroBatch | TRLBatch]:
    """The widest of a step, one of each shape; all of them where they share prompts."""
    return _grpo_batches(trainer, run) if isinstance(trainer, FakeGRPO) else [_sft_batch(run)]


def trained_tokens(run: PlannedRun) -> int:
    """The most tokens of a row that the loss counts."""
    if run.longest_row is None:
        return run.lengths.max_completion
    return max(1, run.longest_row - round(run.lengths.prompt))


def _sft_batch(run: PlannedRun) -> TRLBatch:
    assert run.longest_row is not None
    ids = torch.ones(run.config.per_device_train_batch_size, run.longest_row, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": ids.clone(), "labels": ids.clone()}


def _grpo_batches(trainer: FakeGRPO, run: PlannedRun) -> Sequence[MicroBatch | TRLBatch]:
    rows, lengths = rows_of_step(run), run.lengths
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
    batch["group"] = torch.arange(rows) // run.group
    if run.engine != "hf":
        batch["sampling_per_token_logps"] = torch.zeros(completion.shape)
    if run.beta:
        batch["ref_per_token_logps"] = torch.zeros(completion.shape)
    micro = run.config.per_device_train_batch_size
    slices = [
        {name: value[start : start + micro] if value.ndim else value for name, value in batch.items()}
        for start in range(0, rows, micro)
    ]
    trainer._buffered_inputs = slices
    if trainer._planner is None:
        return slices[:1]
    one_process = run.launch.gpus == 1 and not run.launch.zero_stage
    trainer._planner.batching = replace(trainer._planner.batching, separate_prompt_backward=one_process)
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
    kept = [batches, [(one.rows.tensors(), one.copies and one.copies.source) for one in planned]]
    return [tensor for tensor in tree_leaves(kept) if isinstance(tensor, torch.Tensor)], rows


def _distinct(plan: list[MicroBatch]) -> list[MicroBatch]:
    if any(isinstance(one.forward, OnPrompts) for one in plan):
        return plan
    shapes = [(len(one.rows), one.rows.prompt_ids.shape[1], one.rows.completion_ids.shape[1]) for one in plan]
    return [one for place, one in enumerate(plan) if shapes[place] not in shapes[:place]]
