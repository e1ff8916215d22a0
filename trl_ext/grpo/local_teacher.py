"""`LocalTeacher`: a teacher in the trainer's own processes.

Letters: B rows of a micro-batch, T completion tokens, k tokens, E events, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head

from trl_ext.algorithms.distillation import Scores, event_log_probs
from trl_ext.generation.adapter_models import load_base, put_on_base
from trl_ext.generation.kv_sharing import unsupported_in_a_step
from trl_ext.generation.model_source import locate
from trl_ext.step import Head, MicroBatch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from trl_ext.grpo.config import ExtGRPOConfig


class LocalTeacher:
    """A model in this process, on every rank or sharded as the policy is.

    Args:
        model: folder or Hub id.
        accelerator: of the ranks.
        top_k: the number of the most probable tokens to tell; None for none.
        vocabulary: V of the policy; tokens beyond are among the others.
    """

    def __init__(
        self, model: str, config: ExtGRPOConfig, accelerator: Accelerator, top_k: int | None, vocabulary: int
    ) -> None:
        self.accelerator, self.top_k, self.vocabulary = accelerator, top_k, vocabulary
        self.bare = load_teacher(model, config)
        self.shares_prompts = unsupported_in_a_step(self.bare) is None
        head = {"temperature": config.temperature, "cast_lm_head_to_fp32": config.cast_lm_head_to_fp32}
        add_fused_lm_head(self.bare, outputs=("log_probs", "entropy", "is_top1"), **head)
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            self.model = prepare_deepspeed(self.bare, accelerator)
        elif accelerator.distributed_type == DistributedType.FSDP:
            self.model = prepare_fsdp(self.bare, accelerator)
        else:
            self.model = accelerator.prepare_model(self.bare, evaluation_mode=True)

    def score(self, batches: Sequence[MicroBatch], weights: Sequence[Tensor]) -> list[Scores]:
        """Its values of the completions' tokens; every rank has to call it.

        Args:
            weights: for each micro-batch, (B, 1) of the teacher in a row; all are scored, as ranks have to agree.
        """
        return [self._score(batch) for batch in batches]

    @torch.no_grad()
    def _score(self, batch: MicroBatch) -> Scores:
        batch = batch if batch.forward is not None and self.shares_prompts else batch.on_contiguous_rows()
        with self.accelerator.autocast():
            if self.top_k is None:
                return Scores(*batch.log_probs(self.model, self.bare, ("log_probs", "is_top1")))
            head = Head(self.model, self.bare.base_model)
            logp, hidden = batch.log_probs(head, self.bare, ("log_probs", "hidden"))
        k = min(self.top_k, self.vocabulary)

        def most_probable(logits: Tensor) -> Tensor:
            ids = logits[:, : self.vocabulary].topk(k).indices
            events = event_log_probs(logits, ids)[:, : k + (k < self.vocabulary)]  # the policy's, which may be fewer
            return torch.cat([ids.to(logits.dtype), events], dim=-1)  # ids below 2^24 are exact

        found = head.of_logits(most_probable, hidden.flatten(0, 1)).unflatten(0, logp.shape)
        ids, events = found[..., :k].long(), found[..., k:]
        agrees = ids[..., 0] == batch.rows.completion_ids
        return Scores(logp, agrees.to(logp.dtype), ids, events)


def load_teacher(model: str, config: ExtGRPOConfig) -> PreTrainedModel:
    """A teacher's weights, with an adapter's added to them, for evaluation."""
    source = locate(model)
    loaded = load_base(source, trust_remote_code=config.trust_remote_code, **_loading(config))
    if source.adapter is not None:
        adapted = put_on_base(source, loaded)
        # ZeRO-3 has only parts of the base, which nothing can be added to.
        loaded = adapted.get_base_model() if is_deepspeed_zero3_enabled() else adapted.merge_and_unload()
    teacher: PreTrainedModel = loaded.eval().requires_grad_(False)
    return teacher


def _loading(config: ExtGRPOConfig) -> dict[str, Any]:
    """What `from_pretrained` gets: the policy's dtype and attention, and what teachers alone have."""
    policy = {name: value for name, value in (config.model_init_kwargs or {}).items() if name in _OF_POLICY}
    given = dict(config.teacher_init_kwargs) if isinstance(config.teacher_init_kwargs, dict) else {}
    bits = {name: given.pop(name) for name in ("load_in_8bit", "load_in_4bit") if name in given}
    if any(bits.values()):
        from transformers import BitsAndBytesConfig

        given["quantization_config"] = BitsAndBytesConfig(**bits)
    return {**policy, **given}


_OF_POLICY = ("dtype", "attn_implementation", "device_map")
