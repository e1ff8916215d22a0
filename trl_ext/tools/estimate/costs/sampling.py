"""Rollouts and validations on a roofline: the prompts once per group, then a token per row and step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_ext.tools.estimate.costs.ceilings import NOTHING, Machine, Spent
from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.costs.operations import Work
from trl_ext.tools.estimate.costs.rollouts import Decoding, continuous_batch, shrinking_batch, spread_lengths
from trl_ext.tools.estimate.kv_cache import layer_tokens, windows_of

if TYPE_CHECKING:
    from trl_ext.tools.estimate.planned import PlannedRun

_LOGIT_BYTES = 4 * 6  # per row and vocabulary entry: float32, written and read by softmax, log-probabilities and draw


@dataclass(frozen=True)
class Sampling:
    """What samples completions: vLLM, a server of it with as many GPUs, or HF generate."""

    run: PlannedRun
    costs: ModelCosts
    machine: Machine

    def rollout(self) -> tuple[Spent, Spent]:
        """Prompts and decoding of a rollout."""
        rows = max(1, self.run.rollout // self._engines)
        return self._sample(rows, min(self.run.group, rows), batch=rows)

    def validation(self, problems: int) -> Spent:
        """Prompts, decoding and grading of one completion per problem."""
        prompts, decoding = self._sample(-(-problems // self._engines), 1, self.run.task.validation_batch_size)
        return prompts + decoding + self.rewards(problems)

    def rewards(self, completions: int) -> Spent:
        """Scoring, of which every process does its part."""
        seconds = self.machine.efficiency.reward_seconds * completions / self.run.launch.gpus
        return self.machine.spend(Work(), torch.float32, host=seconds)

    @property
    def _is_engine(self) -> bool:
        return self.run.engine != "hf"

    @property
    def _engines(self) -> int:
        """Samplers that share the completions; one may be spread over several GPUs."""
        return max(1, self.run.launch.gpus // (self.run.engine_parallel if self._is_engine else 1))

    @property
    def _dtype(self) -> torch.dtype:
        named = getattr(torch, self.run.engine_dtype, None)
        if self._is_engine:
            return named if isinstance(named, torch.dtype) else self.run.compute_dtype
        return self.run.compute_dtype

    def _sample(self, rows: int, group: int, batch: int) -> tuple[Spent, Spent]:
        lengths, groups = self.run.lengths, -(-rows // group)
        prompts = spread_lengths(groups, lengths.prompt, lengths.longest_prompt)
        completions = spread_lengths(rows, lengths.completion, lengths.max_completion).tolist()
        each = prompts.repeat(group)[:rows].tolist()
        if self._is_engine:
            decoding = continuous_batch(completions, each, self.slots)
            return self._prefill(prompts, decoding.starts), self._decode_engine(decoding)
        decoding = shrinking_batch(completions, each, batch)
        padded = np.full(len(prompts), prompts.max())
        return self._prefill(padded, decoding.starts), self._decode_hf(decoding)

    @property
    def slots(self) -> int:
        """Rows that an engine decodes at a time: its own limit, and what its KV cache holds."""
        run, costs = self.run, self.costs
        size = self._dtype.itemsize
        taken = run.engine_memory * self.machine.gpu.memory * run.engine_parallel
        room = taken - costs.parameters * size
        held = self._cached(run.lengths.prompt + run.lengths.completion) * size
        return max(1, min(run.engine_sequences, int(room / held)))

    def _cached(self, tokens: float) -> float:
        """Elements of a sequence's cache; a layer with a window has no more tokens than that."""
        layers = len(windows_of(self.run.network))
        return self.costs.kv_elements * layer_tokens(self.run.network, tokens) / layers

    def _prefill(self, prompts: np.ndarray, passes: int) -> Spent:
        """Each different prompt once, in so many passes that read the weights."""
        work = self.costs.decoder(1, prompts.astype(float), prompts.astype(float))
        if not self._is_engine:
            whole = self.costs.decoder(len(prompts), float(prompts.max()), float(prompts.max()))
            return self.machine.spend(whole, self._dtype)
        parts = self.run.engine_parallel
        weights = passes * self.costs.read_parameters * self._dtype.itemsize
        whole = Work(flops=work.flops.sum() / parts, product_bytes=weights / parts)
        return self.machine.spend(whole, self._dtype, host=0.0)

    def _decode_engine(self, decoding: Decoding) -> Spent:
        """Weights are read once per step, the cache of every row, and the logits; kernels are fused, so no more."""
        rows, size, parts = decoding.rows, self._dtype.itemsize, self.run.engine_parallel
        flops = self.costs.decoder(rows, 1, decoding.keys / rows).flops + self.costs.head(rows, 1, 0).flops
        per_key = self._cached(mean := decoding.keys.sum() / rows.sum()) / mean
        moved = (self.costs.read_parameters + decoding.keys * per_key) * size
        logits = rows * self.costs.vocabulary * _LOGIT_BYTES
        work = Work(flops=flops / parts, product_bytes=moved / parts, other_bytes=logits)
        return self.machine.spend(work, self._dtype, host=self.machine.efficiency.engine_step_seconds)

    def _decode_hf(self, decoding: Decoding) -> Spent:
        """Every operation of the eager model, and `generate` around it."""
        rows, reached = decoding.rows, self.machine.efficiency
        work = self.costs.decoder(rows, 1, decoding.keys / rows) + self.costs.head(rows, 1, 0)
        drawing = reached.logit_seconds * rows * self.costs.vocabulary
        python = work.operations * reached.op_seconds + reached.token_seconds + drawing
        return self.machine.spend(work, self._dtype, host=python) if len(rows) else NOTHING
