"""One optimizer step of the real trainer on fake tensors: what it would keep in memory, without memory or a GPU.

The model has its full depth, and the trainer, its plan of micro-batches, its loss and its optimizer are those of a run.
The tensors have shapes and no values, and the kernels that a GPU would use for the LM head are stood in for.

Letters: B rows of a micro-batch, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

from trl_ext.tools.estimate.memory.trainers import (
    FakeGRPO,
    FakeSFT,
    fake_trainer,
    micro_batches,
    tensors_of_rows,
    trained_tokens,
)

# isort: split
import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Trainer

from trl_ext.compat.fake_modules import parameters_replaced, rows_not_packed
from trl_ext.compat.trl_head import head_as_on_gpu, head_within
from trl_ext.step import MicroBatch, TRLBatch, attention_as_on_gpu
from trl_ext.tools.estimate.memory.ledger import ALLOCATION, Answered, Ledger
from trl_ext.tools.estimate.memory.optimizers import make_optimizer, paged_bytes
from trl_ext.tools.estimate.memory.parts import Measured, Memory, memory_of
from trl_ext.tools.estimate.memory.quantized import elements
from trl_ext.tools.estimate.planned import PlannedRun

MOMENTS = ("forward", "backward", "optimizer step")


def estimate_memory(run: PlannedRun, capacity: int) -> Memory:
    """The memory of a run on a GPU with so many bytes: measured, and sharded as its launch says."""
    return memory_of(run, capacity, measure(run))


def measure(run: PlannedRun, on_gpu: bool = True) -> Measured:
    """Peaks of an optimizer step over the widest micro-batches of a run's settings.

    The step has prompts of the longest length and of the mean one; all completions are as long as they may be.

    Args:
        on_gpu: with a GPU's kernels for the LM head and its allocator's rounding, else as on a CPU.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(rounded_to=ALLOCATION if on_gpu else 1)
    with tempfile.TemporaryDirectory() as folder:
        with fake, parameters_replaced():
            trainer = fake_trainer(run, folder)
        widest = micro_batches(trainer, run)
        batches, rows = tensors_of_rows(trainer, widest)
        for tensor in batches:
            ledger.file(tensor, "batches")
        answered = Answered(lambda mask: mask[0] * min(*mask[1:], trained_tokens(run)) if mask[1:] else mask[0])
        within_head = head_within(lambda: ledger.during("", "lm head"))
        with fake, answered, ledger, within_head, rows_not_packed(), contextlib.ExitStack() as stack:
            for as_on_gpu in (head_as_on_gpu, attention_as_on_gpu) if on_gpu else ():
                stack.enter_context(as_on_gpu())
            return replace(
                _step(trainer, widest, ledger, accumulates=run.config.gradient_accumulation_steps > 1), rows=rows
            )


def _step(
    trainer: FakeGRPO | FakeSFT, widest: Sequence[MicroBatch | TRLBatch], ledger: Ledger, accumulates: bool
) -> Measured:
    """Peaks of these micro-batches and the optimizer; on top of gradients of earlier ones if it `accumulates` them."""
    model = trainer.model
    ledger.file_model(model)
    reference = getattr(trainer, "ref_model", None)
    for parameter in reference.parameters() if reference is not None else ():
        ledger.file(parameter, "reference")
    optimizer = make_optimizer(trainer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _make_gradients(trained, ledger)
    optimizer.step()  # which makes its state
    ledger.file_optimizer(optimizer)
    model.zero_grad()
    resident = dict(ledger.live)
    if accumulates:
        _make_gradients(trained, ledger)
    ledger.peaks.clear()
    for micro_batch in widest:
        if not accumulates:  # each is of a step of its own
            model.zero_grad()
        with ledger.during("forward"):
            Trainer.training_step(trainer, model, micro_batch, None)
            if isinstance(micro_batch, MicroBatch):
                micro_batch.finish()
    with ledger.during("optimizer step", "optimizer"):
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm or 1.0)
        optimizer.step()
    own = [elements(module) for module in model.modules()]
    sizes = {parameter: size for one in own for parameter, size in one.items()}
    return Measured(
        peaks={moment: ledger.peaks[moment] for moment in MOMENTS},
        resident=resident,
        parameters=sum(sizes.values()),
        trainable=sum(parameter.numel() for parameter in trained),
        largest_parameter=max(sizes.values()),
        largest_layer=max(sum(one.values()) for one in own),
        paged=paged_bytes(trainer.args, optimizer),
    )


def _make_gradients(parameters: Iterable[torch.nn.Parameter], ledger: Ledger) -> None:
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
        ledger.file(parameter.grad, "gradients")
