"""What makes an optimizer step cheap for the same gradient: rows left out, packed, and computed on shared prompts.

The door: everything else of the package imports from here. `StepPlanner` makes `MicroBatch`es of a rollout, each of
which knows the forward pass that computes it.
"""

from trl_ext.step.attention import attention_as_on_gpu
from trl_ext.step.batching import Batching
from trl_ext.step.contiguous import VALUES
from trl_ext.step.head import Head
from trl_ext.step.micro_batch import MicroBatch, OnPrompts
from trl_ext.step.planner import StepPlanner, not_the_last, resumed_rollout
from trl_ext.step.rows import PROMPT_FIELDS, Rows, TRLBatch, advantages_of, loss_mask, numbers_of_sequences

__all__ = [
    "PROMPT_FIELDS",
    "VALUES",
    "Batching",
    "Head",
    "MicroBatch",
    "OnPrompts",
    "Rows",
    "StepPlanner",
    "TRLBatch",
    "advantages_of",
    "attention_as_on_gpu",
    "loss_mask",
    "not_the_last",
    "numbers_of_sequences",
    "resumed_rollout",
]
