"""`StepPlanner`: the micro-batches of each optimizer step on the current rollout, as `batching` makes them.

TRL cuts a rollout into equal slices, in the order of its rows and padded to the longest. `savings` decides which of
them are computed otherwise, `planned_log_probs` computes those.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn

from trl_ext.compat.trl_head import tiles_in_cache
from trl_ext.generation.adapters import LILY_S_MEAN, adapter_of_places, has_mean_over_a_pass
from trl_ext.generation.kv_sharing import unsupported_checkpointing, unsupported_in_a_step
from trl_ext.generation.positions import unsupported_positions
from trl_ext.grpo import contiguous
from trl_ext.grpo.batching import Batch, Batching, concatenate
from trl_ext.grpo.packing import attention_cost
from trl_ext.grpo.prompt_sharing import completion_log_probs

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from trl_ext.grpo.config import ExtGRPOConfig

log = logging.getLogger(__name__)


def steps_lie_in_one_rollout(config: ExtGRPOConfig) -> bool:
    """Whether no optimizer step begins in one rollout and ends in another."""
    return config.steps_per_generation % config.gradient_accumulation_steps == 0


def savings(
    config: ExtGRPOConfig,
    model: PreTrainedModel,
    keeps_rows: bool,
    *,
    aux_loss: bool,
    images: bool,
    fsdp: bool,
    one_process: bool,
) -> tuple[Batching | None, list[str]]:
    """How the rows of a step are computed, None for TRL's micro-batches; and a line for each saving that is off.

    Args:
        model: unwrapped.
        keeps_rows: the loss has a gradient at advantage 0.
        aux_loss: the model is a mixture of experts, trained with its routers' loss.
        images: rows have images.
        fsdp: the model is sharded by FSDP.
        one_process: no backend reduces gradients.
    """
    if reason := inexact(config, model, aux_loss=aux_loss, images=images):
        cut = f"a step takes TRL's micro-batches, with every row and all padding: {reason}"
        return None, [cut, *_limit_not_kept(config)]
    moved = unpacked(config, model)
    refusal = moved or unsupported_in_a_step(model) or ("under FSDP the decoder cannot run alone" if fsdp else None)
    if config.gradient_checkpointing:
        reentrant = bool((config.gradient_checkpointing_kwargs or {}).get("use_reentrant"))
        refusal = refusal or unsupported_checkpointing(model, reentrant)
    gradient = "every row has a KL penalty" if config.beta else "the loss has a gradient at advantage 0"
    gradient = "the loss sees every row of a step" if "step" in config.inputs_of_loss else gradient
    off = {
        "share_prompt_prefix": refusal,
        "dynamic_micro_batches": moved,
        "skip_zero_advantage_rows": gradient if keeps_rows else None,
    }
    on = {name: getattr(config, name) and not why for name, why in off.items()}
    batching = Batching(
        config.per_device_train_batch_size, config.micro_batch_tokens, on["dynamic_micro_batches"],
        on["skip_zero_advantage_rows"], on["share_prompt_prefix"] and config.dynamic_micro_batches,
        attention_cost(model) if on["share_prompt_prefix"] else 0.0, config.pad_to_multiple_of,
        config.gradient_checkpointing, one_process,
    )  # fmt: skip
    saves = batching.dynamic or batching.skip_zero_advantage or batching.share_prompts
    lines = [f"{name} is off: {why}" for name, why in off.items() if why and getattr(config, name)]
    return batching if saves else None, lines + (_limit_not_kept(config) if moved else [])


def inexact(
    config: ExtGRPOConfig, model: PreTrainedModel, *, aux_loss: bool = False, images: bool = False
) -> str | None:
    """Why the rows of a step have to be computed in TRL's micro-batches, or None; arguments as of `savings`."""
    of_micro_batches = config.entropy_coef or config.use_adaptive_entropy or config.top_entropy_quantile < 1
    reasons = {
        "it may begin in one rollout and end in another": not steps_lie_in_one_rollout(config),
        "the routers' auxiliary loss is a mean over a micro-batch": aux_loss,
        "rows with images are not packed": images,
        LILY_S_MEAN: has_mean_over_a_pass(model),
        "the entropy bonus and top_entropy_quantile are of a micro-batch": of_micro_batches,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def unpacked(config: ExtGRPOConfig, model: PreTrainedModel) -> str | None:
    """Why rows keep their order, number and padding in micro-batches, or None."""
    return inexact(config, model) or adapter_of_places(model) or unsupported_positions(model)


def _limit_not_kept(config: ExtGRPOConfig) -> list[str]:
    if config.micro_batch_tokens is None:
        return []
    return [
        f"micro_batch_tokens={config.micro_batch_tokens} is not kept: a micro-batch is micro_train_batch_size rows of "
        f"any length, {config.per_device_train_batch_size} now; lower that one if memory runs out"
    ]


class StepPlanner:
    """Maps each `training_step` call to its micro-batches.

    The last call always computes one, since the backends reduce gradients there. If a step has fewer micro-batches than
    calls, its first calls are no-ops; if it has more, its first call computes several.

    Args:
        accelerator: of the ranks, which agree on the number of micro-batches.
    """

    def __init__(self, batching: Batching, config: ExtGRPOConfig, accelerator: Accelerator) -> None:
        self.batching, self.accelerator = batching, accelerator
        self.accumulation = config.gradient_accumulation_steps  # calls per optimizer step
        self.slices = config.steps_per_generation  # TRL's per rollout, a multiple of `accumulation`
        self.plans: list[list[Batch]] = []  # micro-batches of each optimizer step on the current rollout
        self._has_said_longer = False

    def plan(self, rollout: Sequence[Batch]) -> None:
        """Plan the steps on a new rollout of this rank; a collective operation."""
        windows = [rollout[start : start + self.accumulation] for start in range(0, self.slices, self.accumulation)]
        self.plans = [self.batching.plan(concatenate(window), self._max_over_ranks) for window in windows]
        if self.batching.tokens and not self._has_said_longer:
            self._say_longer(self.batching.tokens)

    def _max_over_ranks(self, counts: list[int]) -> list[int]:
        """Elementwise, in one collective: as many as any rank has, at most one per row and one more."""
        most, device = self.accumulation * self.batching.rows + 1, self.accelerator.device
        own = torch.tensor([counts + [0] * (most - len(counts))], dtype=torch.int32, device=device)
        found = self.accelerator.gather(own).amax(dim=0).tolist()
        return list(found[: max(len(counts), *(place + 1 for place, n in enumerate(found) if n), 1)])

    def _say_longer(self, limit: int) -> None:
        """Say once that a row alone is longer than a micro-batch may be."""
        masks = [batch[name] for plan in self.plans for batch in plan for name in ("prompt_mask", "completion_mask")]
        pairs = zip(masks[::2], masks[1::2], strict=True)
        longest = int(max((prompt.sum(dim=1) + completion.sum(dim=1)).max() for prompt, completion in pairs))
        if longest > limit:
            self._has_said_longer = True
            log.warning(
                "micro_batch_tokens=%d: a row has %d tokens, and is a micro-batch of its own, like other long ones "
                "from now on; lower max_completion_length if memory runs out", limit, longest,
            )  # fmt: skip

    def micro_batches(self, step: int) -> list[Batch]:
        """Those of the `step`-th `training_step` call of the run; none if the call is a no-op."""
        plan = self.plans[step % self.slices // self.accumulation]
        call = step % self.accumulation
        end = len(plan) - self.accumulation + call + 1
        return plan[0 if call == 0 else max(0, end - 1) : max(0, end)]

    def rows_trained(self, step: int) -> int:
        """Number of this rank's rows that the optimizer step of the `step`-th call trains on."""
        plan = self.plans[step % self.slices // self.accumulation]
        return sum(len(batch["row"]) for batch in plan if "row" in batch)

    def off_policy_batches(self, several_epochs: bool) -> Iterator[Batch]:
        """The micro-batches that are trained on after the policy has changed since the rollout.

        Args:
            several_epochs: over the rollout, which make the first step's micro-batches off-policy as well.
        """
        return itertools.chain(*self.plans[0 if several_epochs else 1 :])

    def state_dict(self) -> dict[str, Any]:
        """Old log-probabilities computed on these micro-batches, and their rows; the rest follows from the rollout."""
        olds = [[batch.get("old_per_token_logps") for batch in plan] for plan in self.plans]
        return {"old_log_probs": olds, "planned_rows": self._rows()}

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether a checkpoint's old log-probabilities, if it has any, are of the micro-batches planned now."""
        return not _has_any(state["old_log_probs"]) or state.get("planned_rows") == self._rows()

    def _rows(self) -> list[list[list[int]]]:
        """Which rows of the rollout each micro-batch of each step has; none of one that is there for other ranks."""
        return [[batch["row"].tolist() if "row" in batch else [] for batch in plan] for plan in self.plans]

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict`, after `plan` on the same rollout, if it `fits`."""
        if not _has_any(state["old_log_probs"]):
            return
        for plan, olds in zip(self.plans, send_to_device(state["old_log_probs"], device), strict=True):
            for batch, old in zip(plan, olds, strict=True):
                if old is not None:
                    batch["old_per_token_logps"] = old


def _has_any(old_log_probs: Sequence[Sequence[Tensor | None]]) -> bool:
    return any(old is not None for olds in old_log_probs for old in olds)


@contextlib.contextmanager
def not_the_last(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """In the block, backward passes add to gradients that no rank reduces yet, as in all calls of a step but the last.

    Args:
        model: wrapped by the distributed backend, which reduces them in the last call.
    """
    if not accelerator.sync_gradients:
        yield
        return
    by_engine = accelerator.distributed_type == DistributedType.DEEPSPEED  # it is told with every backward pass
    accelerator.sync_gradients = False
    try:
        with contextlib.nullcontext() if by_engine else accelerator.no_sync(model):
            yield
    finally:
        accelerator.sync_gradients = True


def finish_prompts(batch: Batch) -> None:
    """Call after a micro-batch's backward pass: the last one on some prompts of a process alone has theirs follow."""
    if "prompts" in batch:
        batch["prompts"].backward()


def planned_log_probs(model: nn.Module, bare: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of the completions in a micro-batch with `prompts` or `columns`.

    Args:
        model: with TRL's fused head, wrapped by the distributed backend.
        bare: without that wrapper, and without an adapter's.
    """
    computed = batch.get("computed", len(batch["prompt_ids"]))
    names = "prompt_ids", "prompt_mask", "completion_ids", "completion_mask"
    prompts, prompt_mask, completions, completion_mask = (batch[name][:computed] for name in names)
    with tiles_in_cache(bare.config.get_text_config().vocab_size, prompts.device):
        if "prompts" in batch:
            cache = batch["prompts"].cache(bare.base_model, batch["rows"])
            logp, entropy = completion_log_probs(model, cache, prompts, completions, completion_mask, batch["rows"])
        else:
            rows = prompts, prompt_mask, completions, completion_mask
            logp, entropy = contiguous.log_probs(model, *rows, batch["columns"], contiguous.can_pack(bare))
    if "copy_of" in batch:  # by `embedding`, whose backward pass adds gradients in the same order every time
        logp, entropy = (nn.functional.embedding(batch["copy_of"], values) for values in (logp, entropy))
    return logp, entropy


def restored_rollout(stored: Sequence[Batch], rows: int, slices: int, device: torch.device) -> list[Batch]:
    """The slices of a checkpoint's rollout; none, with a warning, where a rollout has not `slices` of `rows` rows."""
    sizes = [len(batch["prompt_ids"]) for batch in stored]
    if sizes and sizes != [rows] * slices:
        log.warning(
            "the checkpoint was saved within a rollout of %d micro-batches of %d rows, now there are %d of "
            "%d (--per_device_train_batch_size): the remaining steps on it use a new rollout",
            len(sizes), sizes[0], slices, rows,
        )  # fmt: skip
        return []
    return [send_to_device(batch, device) for batch in stored]
