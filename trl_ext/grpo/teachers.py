"""`Teachers`: frozen models that say how probable a rollout's tokens are to them.

Each scores the micro-batches of a rollout's steps once: in this process by the passes that they are planned for, so
that rows that are not trained on are left out, and equal ones and shared prompts are computed once; or behind a server.

Letters: B rows of a micro-batch, T completion tokens, N completions, M teachers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from trl_ext.algorithms.distillation import Scores
from trl_ext.errors import InputError, ServerError
from trl_ext.generation.adapter_models import load_tokenizer
from trl_ext.generation.model_source import locate
from trl_ext.generation.server import text_of_vocabulary
from trl_ext.grpo.local_teacher import LocalTeacher
from trl_ext.grpo.served_teacher import Asked, ServedTeacher, TeacherServer, start_command
from trl_ext.ranks import server_errors_on_all_ranks
from trl_ext.runs.fingerprint import fingerprint_of_model
from trl_ext.step import MicroBatch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trl_ext.grpo.config import ExtGRPOConfig

_TRIED = ("What is 12 + 7?\nLet's think step by step: $\\frac{1}{2}$, 3.14 and −5 %. </think> <answer> 19 </answer>",)


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
        if not config.has_teacher:
            return None
        return cls(config, accelerator, policy.config.get_text_config().vocab_size, tokenizer)

    def __init__(
        self, config: ExtGRPOConfig, accelerator: Accelerator, vocabulary: int, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.config, self.names = config, [*config.teacher_models, *config.teacher_urls]
        self.top_k = config.teacher_top_k if config.learns_divergence else None
        if self.top_k is not None and accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError(
                f"distillation {config.distillation!r} under FSDP: the LM head is in parts again when the divergence "
                "needs it; use DeepSpeed, or a distillation of sampled tokens such as reverse_kl"
            )
        check_teachers(config, tokenizer, vocabulary)
        local = [
            LocalTeacher(model, config, accelerator, self.top_k, vocabulary) for model in config.teacher_models.values()
        ]
        served = [ServedTeacher(url, self.top_k, vocabulary) for url in config.teacher_urls.values()]
        self._teachers: list[LocalTeacher | ServedTeacher] = [*local, *served]

    @property
    def are_served(self) -> bool:
        """Whether a server is asked, which can be lost."""
        return any(isinstance(teacher, ServedTeacher) for teacher in self._teachers)

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
        weights = [batch.rows.teacher_weight for batch in new if batch.rows.teacher_weight is not None]
        of_each = [
            self._score(teacher, new, [weight[..., number] for weight in weights])
            for number, teacher in enumerate(self._teachers)
        ]
        taught = iter(
            replace(batch, rows=replace(batch.rows, **self._stacked(scores)))
            for batch, *scores in zip(new, *of_each, strict=True)
        )
        return [next(taught) if is_new else batch for batch, is_new in zip(batches, asked, strict=True)]

    @staticmethod
    def _score(
        teacher: LocalTeacher | ServedTeacher, batches: Sequence[MicroBatch], weights: Sequence[Tensor]
    ) -> list[Scores]:
        with server_errors_on_all_ranks() if isinstance(teacher, ServedTeacher) else contextlib.nullcontext():
            return teacher.score(batches, weights)

    def _stacked(self, scores: Sequence[Scores]) -> dict[str, Tensor]:
        values = {
            "teacher_logp": torch.stack([one.logp for one in scores], dim=-1),
            "teacher_agrees": torch.stack([one.agrees.to(one.logp.dtype) for one in scores], dim=-1),
        }
        if self.top_k is not None:
            values["teacher_ids"] = torch.stack([one.ids for one in scores if one.ids is not None], dim=2)
            values["teacher_events"] = torch.stack([one.events for one in scores if one.events is not None], dim=2)
        return values


def check_taught_problems(config: ExtGRPOConfig, problems: Dataset) -> None:
    """Refuse problems with images, which teachers are not asked for, and those whose column names no teacher.

    Raises:
        InputError: there is an image, or no such column, or it has another name; says which.
    """
    column, names = config.teacher_column, [*config.teacher_models, *config.teacher_urls]
    if images := {"image", "images"} & set(problems.column_names):
        raise InputError(f"teachers are asked for texts, and the problems have {', '.join(sorted(images))}")
    if column is None:
        return
    if column not in problems.column_names:
        raise InputError(f"teacher_column {column!r}: the problems have {', '.join(problems.column_names)}")
    if others := sorted({str(name) for name in problems[column]} - set(names)):
        raise InputError(f"teacher_column {column!r}: problems have {', '.join(others)}; teachers: {', '.join(names)}")


def check_teachers(config: ExtGRPOConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    """Refuse teachers whose tokenizer is not the policy's, with the first difference.

    The same tokenizer: every token of the policy's has its id there, and a few texts become the same ids. A server has
    only the texts: these, and one of tokens from the whole vocabulary.

    Args:
        vocabulary: V of the policy.

    Raises:
        InputError: a teacher's is another one, or there is no such model, or its server does not tell what is needed.
    """
    for name, model in config.teacher_models.items():
        theirs = load_tokenizer(locate(model), trust_remote_code=config.trust_remote_code)
        _refuse_other_vocabulary(name, tokenizer.get_vocab(), theirs.get_vocab())
        for text in _TRIED:
            _refuse_other_ids(name, text, *(_ids(each, text) for each in (tokenizer, theirs)))
    for name, url in config.teacher_urls.items():
        server, top_k = TeacherServer(url), None
        if config.learns_divergence:
            top_k = min(config.teacher_top_k, vocabulary)
        try:
            for text in (*_TRIED, text_of_vocabulary(tokenizer)):
                _refuse_other_ids(name, text, _ids(tokenizer, text), server.tokens_of(text))
            server.tell(Asked(tuple(_ids(tokenizer, _TRIED[0])), 1), top_k, vocabulary)  # what a step will ask for
        except ServerError as error:
            raise InputError(f"{error}; start it with: {start_command(server.model, top_k)}") from error


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text=text, add_special_tokens=False)["input_ids"]
    return ids


def _refuse_other_vocabulary(name: str, own: Mapping[str, int], theirs: Mapping[str, int]) -> None:
    other = next((token for token in sorted(own, key=own.__getitem__) if theirs.get(token) != own[token]), None)
    if other is not None:
        there = f"the id {theirs[other]}" if other in theirs else "no token"
        raise InputError(
            f"teacher {name!r} has another tokenizer than the policy: {other!r} is the id {own[other]} of the "
            f"policy and {there} of the teacher; its log-probabilities would be of other texts"
        )


def _refuse_other_ids(name: str, text: str, own: Sequence[int], theirs: Sequence[int]) -> None:
    if list(own) != list(theirs):
        pairs = enumerate(zip(own, theirs, strict=False))
        place = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(own), len(theirs)))
        raise InputError(
            f"teacher {name!r} divides texts into other tokens than the policy: {text!r} from token {place} on"
        )


def shortest_context(config: ExtGRPOConfig) -> int | None:
    """Tokens of a prompt and its completion that all servers of teachers have room for; None without one."""
    return min((TeacherServer(url).context - 1 for url in config.teacher_urls.values()), default=None)


def fingerprints_of_teachers(config: ExtGRPOConfig) -> dict[str, dict[str, str]]:
    """What tells each teacher from another one, by its name: hashes of a model, or what a server calls its own."""
    models = {name: fingerprint_of_model(model) for name, model in config.teacher_models.items()}
    return models | {name: {"served": TeacherServer(url).model} for name, url in config.teacher_urls.items()}
