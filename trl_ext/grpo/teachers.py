"""`Teachers`: frozen models that say how probable a rollout's tokens are to them.

Each is loaded as TRL loads the reference model, and scores the micro-batches of a rollout's steps once, by the passes
that they are planned for: rows that are not trained on are left out, equal ones and shared prompts are computed once.

Letters: B rows of a micro-batch, T completion tokens, M teachers, k tokens, E events, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head

from trl_ext.algorithms.distillation import event_log_probs
from trl_ext.errors import InputError
from trl_ext.generation.adapter_models import load_base, load_tokenizer, put_on_base
from trl_ext.generation.kv_sharing import unsupported_in_a_step
from trl_ext.generation.model_source import locate
from trl_ext.grpo.distillation_settings import needs_events
from trl_ext.step import Head, MicroBatch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trl_ext.grpo.config import ExtGRPOConfig

_TRIED = ("What is 12 + 7?\nLet's think step by step: $\\frac{1}{2}$, 3.14 and −5 %. </think> <answer> 19 </answer>",)


@dataclass(frozen=True)
class Scores:
    """What one teacher says of a micro-batch's tokens."""

    logp: Tensor  # (B, T)
    agrees: Tensor  # (B, T), 1 where the token is the most probable one
    ids: Tensor | None = None  # (B, T, k), the most probable tokens
    events: Tensor | None = None  # (B, T, E), their log-probabilities and those of all others together


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
        source = locate(model)
        loaded = load_base(source, trust_remote_code=config.trust_remote_code, **_loading(config))
        if source.adapter is not None:
            adapted = put_on_base(source, loaded)
            # ZeRO-3 has only parts of the base, which nothing can be added to.
            loaded = adapted.get_base_model() if is_deepspeed_zero3_enabled() else adapted.merge_and_unload()
        self.bare: PreTrainedModel = loaded.eval().requires_grad_(False)
        self.shares_prompts = unsupported_in_a_step(self.bare) is None
        head = {"temperature": config.temperature, "cast_lm_head_to_fp32": config.cast_lm_head_to_fp32}
        add_fused_lm_head(self.bare, outputs=("log_probs", "entropy", "is_top1"), **head)
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            self.model = prepare_deepspeed(self.bare, accelerator)
        elif accelerator.distributed_type == DistributedType.FSDP:
            self.model = prepare_fsdp(self.bare, accelerator)
        else:
            self.model = accelerator.prepare_model(self.bare, evaluation_mode=True)

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> Scores:
        """Its values of the completions' tokens; every rank has to call it."""
        batch = batch if batch.forward is not None and self.shares_prompts else batch.on_contiguous_rows()
        with self.accelerator.autocast():
            if self.top_k is None:
                return Scores(*batch.log_probs(self.model, self.bare, ("log_probs", "is_top1")))
            head = Head(self.model, self.bare.base_model)
            logp, hidden = batch.log_probs(head, self.bare, ("log_probs", "hidden"))
        k = min(self.top_k, self.vocabulary)

        def most_probable(logits: Tensor) -> Tensor:
            ids = logits[:, : self.vocabulary].topk(k).indices
            return torch.cat([ids.to(logits.dtype), event_log_probs(logits, ids)], dim=-1)  # ids below 2^24 are exact

        found = head.of_logits(most_probable, hidden.flatten(0, 1)).unflatten(0, logp.shape)
        ids, events = found[..., :k].long(), found[..., k:]
        agrees = ids[..., 0] == batch.rows.completion_ids
        return Scores(logp, agrees.to(logp.dtype), ids, events)


class Teachers:
    """All teachers of a run, and which of them teach a completion.

    Raises:
        InputError: a teacher has another tokenizer than the policy.
    """

    @classmethod
    def of(
        cls,
        config: ExtGRPOConfig,
        accelerator: Accelerator,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Teachers | None:
        """Those that the config names, loaded; None if there is none.

        Args:
            policy: unwrapped.
            tokenizer: the policy's.
        """
        if config.teacher is None:
            return None
        return cls(config, accelerator, policy.config.get_text_config().vocab_size, tokenizer)

    def __init__(
        self, config: ExtGRPOConfig, accelerator: Accelerator, vocabulary: int, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.config, self.names = config, list(config.teachers)
        self.top_k = config.teacher_top_k if needs_events(config.distillation_fn()) else None
        if self.top_k is not None and accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError(
                f"distillation {config.distillation!r} under FSDP: the LM head is in parts again when the divergence "
                "needs it; use DeepSpeed, or a distillation of sampled tokens such as reverse_kl"
            )
        check_teachers(config, tokenizer)
        given = config, accelerator, self.top_k, vocabulary
        self._teachers = [LocalTeacher(model, *given) for model in config.teachers.values()]

    def of_rollout(self, rows: Sequence[Mapping[str, Any]], correct: Tensor) -> dict[str, Tensor]:
        """What a rollout's batch says of its rows for teachers; arguments as of `weights`."""
        return {"teacher_weight": self.weights(rows, correct), "correct": correct}

    def weights(self, rows: Sequence[Mapping[str, Any]], correct: Tensor) -> Tensor:
        """(N, 1, M) of each teacher in each completion.

        Args:
            rows: of the dataset, one per completion.
            correct: (N,) 1, 0, or NaN for neither.
        """
        config, count = self.config, len(self.names)
        usual = config.teacher_weights or [1 / count] * count
        if config.teacher_column is None:
            weights = correct.new_tensor(usual).expand(len(rows), count)
        else:
            taught_by = [self._teacher_of(row, config.teacher_column) for row in rows]
            weights = torch.nn.functional.one_hot(torch.tensor(taught_by, device=correct.device), count).to(correct)
        if config.distill_rollouts != "all":
            weights = weights * (correct == (config.distill_rollouts == "correct"))[:, None]
        return weights[:, None]

    def _teacher_of(self, row: Mapping[str, Any], column: str) -> int:
        name = str(row.get(column))
        if name not in self.names:
            known = ", ".join(self.names)
            raise InputError(f"teacher_column {column!r}: a problem has {name!r} there; teachers: {known}")
        return self.names.index(name)

    def ask(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with what every teacher says of their tokens; a collective operation.

        A teacher gets all of them before the next one does: those on shared prompts take these from one model.

        Args:
            batches: in the order of the step's plan.
        """
        asked = [batch.rows.teacher_logp is None and batch.rows.teacher_weight is not None for batch in batches]
        new = [batch for batch, is_new in zip(batches, asked, strict=True) if is_new]
        of_each = [[teacher.score(batch) for batch in new] for teacher in self._teachers]
        taught = iter(
            replace(batch, rows=replace(batch.rows, **self._stacked(scores)))
            for batch, *scores in zip(new, *of_each, strict=True)
        )
        return [next(taught) if is_new else batch for batch, is_new in zip(batches, asked, strict=True)]

    def _stacked(self, scores: Sequence[Scores]) -> dict[str, Tensor]:
        values = {
            "teacher_logp": torch.stack([one.logp for one in scores], dim=-1),
            "teacher_agrees": torch.stack([one.agrees.to(one.logp.dtype) for one in scores], dim=-1),
        }
        if self.top_k is not None:
            values["teacher_ids"] = torch.stack([one.ids for one in scores if one.ids is not None], dim=2)
            values["teacher_events"] = torch.stack([one.events for one in scores if one.events is not None], dim=2)
        return values


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


def check_teacher_column(config: ExtGRPOConfig, problems: Dataset) -> None:
    """Refuse problems whose column names no teacher.

    Raises:
        InputError: there is no such column, or it has another name; says which.
    """
    column, names = config.teacher_column, list(config.teachers)
    if column is None:
        return
    if column not in problems.column_names:
        raise InputError(f"teacher_column {column!r}: the problems have {', '.join(problems.column_names)}")
    if others := sorted({str(name) for name in problems[column]} - set(names)):
        raise InputError(f"teacher_column {column!r}: problems have {', '.join(others)}; teachers: {', '.join(names)}")


def check_teachers(config: ExtGRPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse teachers whose tokenizer is not the policy's, with the first difference.

    The same tokenizer: every token of the policy's has its id there, and a few texts become the same ids.

    Raises:
        InputError: a teacher's is another one, or there is no such model.
    """
    own = tokenizer.get_vocab()
    for name, model in config.teachers.items():
        theirs = load_tokenizer(locate(model), trust_remote_code=config.trust_remote_code)
        vocabulary = theirs.get_vocab()
        other = next((token for token in sorted(own, key=own.__getitem__) if vocabulary.get(token) != own[token]), None)
        if other is not None:
            there = f"the id {vocabulary[other]}" if other in vocabulary else "no token"
            raise InputError(
                f"teacher {name!r} has another tokenizer than the policy: {other!r} is the id {own[other]} of the "
                f"policy and {there} of the teacher; its log-probabilities would be of other texts"
            )
        for text in _TRIED:
            ids, other_ids = (each(text=text, add_special_tokens=False)["input_ids"] for each in (tokenizer, theirs))
            if ids != other_ids:
                place = next(i for i, pair in enumerate(zip(ids, other_ids, strict=False)) if pair[0] != pair[1])
                raise InputError(
                    f"teacher {name!r} divides texts into other tokens than the policy: {text!r} from token {place} on"
                )
