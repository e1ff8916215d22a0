"""A model and its settings -> sampled responses with their log-probabilities, by HF generate or by vLLM.

A sampler is called with prompts and the numbers of the samples, and answers in their order. What a sample is depends on
its number and the seed, not on what else is sampled in the same call, as far as the engine allows: vLLM seeds every
request, HF generate every batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import PartialState

from trl_ext.compat.vllm_steps import steps_counted
from trl_ext.generation.completion import Completion, Sampling, derive_seed
from trl_ext.generation.decoding import NOT_FINITE
from trl_ext.generation.hf import eos_ids_of, hf_generate, is_finished
from trl_ext.generation.interruption import sampling as interruptible
from trl_ext.generation.model_source import locate
from trl_ext.generation.policy import VLLM_SEES_SPECIAL_TOKENS, overridden
from trl_ext.generation.progress import advance
from trl_ext.generation.sampling import sampling_config, shown
from trl_ext.generation.token_logprobs import TokenLogProbs
from trl_ext.generation.tokens import completion_texts, prompt_ids
from trl_ext.generation.vllm_start import device_settings, place_in_environment, starting_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from vllm import LLM, SamplingParams

# Of vLLM's `SamplingParams`: what decides which tokens are drawn.
SHOWN = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "stop",
)  # fmt: skip


class Sampler(Protocol):
    """A model in an engine, with settings."""

    def __call__(
        self, prompts: Sequence[str], numbers: Sequence[int], rows: Sequence[Mapping[str, Any]] = ()
    ) -> list[Completion]:
        """One completion per prompt; `rows` are the problems, for tools that are environments."""

    def parameters(self) -> dict[str, Any]:
        """What the engine is told about sampling."""

    @property
    def dtype(self) -> str:
        """Of the weights that sample, such as `bfloat16`."""


class SeveralTurns(Protocol):
    """What makes responses of first turns, by calls of tools; `ToolUse` of `trl_ext.turns` does."""

    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        first: Sequence[Sequence[int]],
        logps: Sequence[Sequence[float | None]] | None,
        generate: Callable[[list[list[int]], int, Sequence[int]], Any],
        limit: int,
        *,
        rows: Sequence[Mapping[str, Any]],
    ) -> Sequence[Any]:
        """Responses, with `ids`, `own_ids`, `own_logps` and `told`."""


class HFSampler:
    """HF generate, `batch_size` prompts at a time.

    Args:
        turns: a tokenizer to what continues first turns, where tools may be called.
        loaded: the model, where it is not to be loaded here.
    """

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        batch_size: int,
        dtype: str | None = None,
        turns: Callable[[PreTrainedTokenizerBase], SeveralTurns] | None = None,
        loaded: PreTrainedModel | None = None,
    ) -> None:
        from trl_ext.generation.adapter_models import load_model, load_tokenizer

        device, source = "cuda" if torch.cuda.is_available() else "cpu", locate(model)
        self.tokenizer = load_tokenizer(source)
        self.model = (load_model(source, dtype).to(device) if loaded is None else loaded).eval()
        self.sampling, self.batch_size = sampling, batch_size
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.turns = None if turns is None else turns(self.tokenizer)
        of_model = self.model.generation_config
        self.config = sampling_config(
            of_model,
            {
                "do_sample": sampling.temperature > 0,
                "temperature": sampling.temperature or 1.0,
                "top_p": sampling.top_p,
                "max_new_tokens": sampling.max_tokens,
                "min_new_tokens": sampling.min_tokens or None,
                "pad_token_id": self.tokenizer.pad_token_id,
                "eos_token_id": eos_ids_of(of_model, self.tokenizer.eos_token_id),  # as the trainers and vLLM have them
            },
        )

    def parameters(self) -> dict[str, Any]:
        """What the engine is told about sampling."""
        return shown(self.config, self.sampling.stop)

    @property
    def dtype(self) -> str:
        """Of the weights that sample."""
        return str(self.model.dtype).removeprefix("torch.")

    def __call__(
        self, prompts: Sequence[str], numbers: Sequence[int], rows: Sequence[Mapping[str, Any]] = ()
    ) -> list[Completion]:
        """One completion per prompt."""
        completions: list[Completion] = []
        for start in range(0, len(prompts), self.batch_size):
            batch = slice(start, start + self.batch_size)
            with torch.random.fork_rng():
                torch.manual_seed(derive_seed(self.sampling.seed, numbers[start]))
                completions += self._batch(prompts[batch], rows[batch])
        return completions

    def _batch(self, prompts: Sequence[str], problems: Sequence[Mapping[str, Any]]) -> list[Completion]:
        ids = prompt_ids(self.tokenizer, prompts)
        rows, logps = self._turn(ids, self.sampling.max_tokens)
        ends = eos_ids_of(self.config)
        if self.turns is not None:
            turns = functools.partial(self.turns.continued, rows=problems)
            return _of_several_turns(turns, ids, rows, logps, self._turn, self.tokenizer, ends, self.sampling)
        finished = is_finished(rows, self.tokenizer, ends, list(self.sampling.stop), self.sampling.min_tokens).tolist()
        texts = completion_texts(self.tokenizer, rows, ends)
        return [
            _completion(text, len(ids), ended, sum(row), self.sampling)
            for text, ids, ended, row in zip(texts, rows, finished, logps, strict=True)
        ]

    def _turn(
        self, ids: list[list[int]], most_tokens: int, places: Sequence[int] = ()
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Prompts to completions of so many tokens, and their log-probabilities."""
        logps = TokenLogProbs(len(ids))
        with overridden(self.config, {"max_new_tokens": most_tokens}):
            try:
                rows = hf_generate(self.model, self.tokenizer, ids, self.config, list(self.sampling.stop), logps)
            except RuntimeError as error:  # of torch.multinomial, in the loop of transformers
                if "probability tensor" not in str(error):
                    raise
                raise FloatingPointError(NOT_FINITE.format("some", len(ids))) from error
        return rows, [list(row[: len(said)]) for row, said in zip(logps.rows(), rows, strict=True)]


def _of_several_turns(
    continued: Callable[..., Sequence[Any]], prompts: Sequence[Sequence[int]], first: Sequence[Sequence[int]],
    logps: Sequence[Sequence[float | None]], generate: Callable[[list[list[int]], int, Sequence[int]], Any],
    tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], sampling: Sampling,
) -> list[Completion]:  # fmt: skip
    """Completions whose texts and tokens are the model's own, of which the first turns have been sampled."""
    responses = continued(prompts, first, logps, generate, sampling.max_tokens)
    whole, stop = [response.ids for response in responses], list(sampling.stop)
    finished = is_finished(whole, tokenizer, ends, stop, sampling.min_tokens).tolist()
    texts = completion_texts(tokenizer, [response.own_ids for response in responses], ends)
    return [
        dataclasses.replace(
            _completion(text, len(response.own_ids), ended, sum(response.own_logps), sampling),
            turns=response.told(tokenizer.decode),
        )
        for text, response, ended in zip(texts, responses, finished, strict=True)
    ]


class VLLMSampler:
    """An engine of its own; under several ranks each has one, on its own GPU, so every rank must make it.

    Args:
        turns: a tokenizer to what continues first turns, where tools may be called.
    """

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        turns: Callable[[PreTrainedTokenizerBase], SeveralTurns] | None = None,
        **engine: Any,
    ) -> None:
        from vllm import LLM

        from trl_ext.generation.adapter_models import generation_config_of
        from trl_ext.generation.merging import whole_model

        self.generation_config = generation_config_of(locate(model))
        model = whole_model(model)
        state, own = PartialState(), {name: value for name, value in engine.items() if value is not None}
        # Else vLLM puts the engines of all ranks on the first GPU, and leaves one of a CPU's cores to its scheduler.
        if state.num_processes > 1 or not torch.cuda.is_available():
            own["distributed_executor_backend"] = "external_launcher"
        with starting_vllm(), place_in_environment(state):
            self.llm = LLM(model=model, seed=sampling.seed, **{**device_settings(own.get("max_model_len")), **own})
        self.sampling = sampling
        self.turns = None if turns is None else turns(self.llm.get_tokenizer())

    def parameters(self) -> dict[str, Any]:
        """What the engine is told about sampling."""
        params = vllm_params(self.sampling, self.sampling.seed)
        return {name: getattr(params, name) for name in SHOWN}

    @property
    def dtype(self) -> str:
        """Of the weights that sample."""
        return str(self.llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")

    def __call__(
        self, prompts: Sequence[str], numbers: Sequence[int], rows: Sequence[Mapping[str, Any]] = ()
    ) -> list[Completion]:
        """One completion per prompt, all of them in one batch."""
        with steps_counted(self.llm, advance), interruptible():
            if self.turns is not None:
                return self._in_turns(functools.partial(self.turns.continued, rows=rows), prompts, numbers)
            params = [vllm_params(self.sampling, derive_seed(self.sampling.seed, number)) for number in numbers]
            return vllm_sample(self.llm, prompts, params)

    def _in_turns(
        self, continued: Callable[..., Sequence[Any]], prompts: Sequence[str], numbers: Sequence[int]
    ) -> list[Completion]:
        tokenizer, seeds = self.llm.get_tokenizer(), [derive_seed(self.sampling.seed, number) for number in numbers]

        def turn(ids: list[list[int]], most_tokens: int, places: Sequence[int]) -> tuple[list[list[int]], Any]:
            limited = dataclasses.replace(self.sampling, max_tokens=most_tokens)
            params = []
            for place, row in zip(places, ids, strict=True):  # of the sample and its length: not of what is with it
                is_first = len(row) == len(asked[place])
                params.append(vllm_params(limited, seeds[place] if is_first else derive_seed(seeds[place], len(row))))
            outputs = [request.outputs[0] for request in self.llm.generate(_by_ids(ids), params, use_tqdm=False)]
            logps = [[of[token].logprob for of, token in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
            return [list(o.token_ids) for o in outputs], logps

        asked = prompt_ids(tokenizer, prompts)
        first, logps = turn(asked, self.sampling.max_tokens, range(len(asked)))
        ends = eos_ids_of(self.generation_config, tokenizer.eos_token_id)
        return _of_several_turns(continued, asked, first, logps, turn, tokenizer, ends, self.sampling)


def vllm_params(sampling: Sampling, seed: int) -> SamplingParams:
    """The settings, whose names are vLLM's, with the log-probability of what was sampled."""
    from vllm import SamplingParams

    settings = dataclasses.asdict(sampling) | {"stop": list(sampling.stop), "seed": seed}
    return SamplingParams(**settings, include_stop_str_in_output=True, logprobs=0, **VLLM_SEES_SPECIAL_TOKENS)


def vllm_sample(llm: LLM, prompts: Sequence[str], params: SamplingParams | list[SamplingParams]) -> list[Completion]:
    """One completion per prompt; its text has the special tokens that are text, whatever `params` say of those."""
    tokenizer = llm.get_tokenizer()
    shown = list(map(_seeing_special_tokens, params if isinstance(params, list) else [params]))
    each = shown if isinstance(params, list) else shown * len(prompts)
    asked = _by_ids(prompt_ids(tokenizer, prompts))
    outputs = [request.outputs[0] for request in llm.generate(asked, each, use_tqdm=False)]
    return [
        _completion(
            sampled_text(o, tokenizer, own.include_stop_str_in_output),
            len(o.token_ids),
            o.finish_reason == "stop",
            o.cumulative_logprob,
            own,
        )
        for o, own in zip(outputs, each, strict=True)
    ]


def _by_ids(prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Prompts as vLLM takes them."""
    return [{"prompt_token_ids": list(ids)} for ids in prompts]


def _seeing_special_tokens(params: SamplingParams) -> SamplingParams:
    params = params.clone()
    for name, value in VLLM_SEES_SPECIAL_TOKENS.items():
        setattr(params, name, value)
    return params


class Sampled(Protocol):
    """What vLLM, or its server, tells of a completion."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None


def sampled_text(output: Sampled, tokenizer: PreTrainedTokenizerBase, includes_end: bool) -> str:
    """The text of a completion, up to the stop string that ended it, which the last token may go beyond.

    Args:
        includes_end: whether that string stays, `include_stop_str_in_output`.
    """
    ids, stop = list(output.token_ids), output.stop_reason
    by_token = output.finish_reason == "stop" and not isinstance(stop, str)
    (text,) = completion_texts(tokenizer, [ids[:-1] if by_token and not includes_end else ids], ids[-1:] * by_token)
    if isinstance(stop, str) and stop in text:
        end = text.rindex(stop)
        return text[: end + len(stop) if includes_end else end]
    return text


def _completion(
    text: str, tokens: int, finished: bool, logp: float | None, settings: Sampling | SamplingParams
) -> Completion:
    """A completion whose `logp` is the model's own, which at temperature 1 is what it was drawn from.

    Raises:
        FloatingPointError: it is NaN, as of weights that are: engines continue with tokens that mean nothing.
    """
    if logp is not None and math.isnan(logp):
        raise FloatingPointError(NOT_FINITE.format(1, 1))
    is_whole = (settings.temperature, settings.top_p, max(getattr(settings, "top_k", 0), 0)) == (1, 1, 0)
    known = logp is not None and tokens and is_whole and not getattr(settings, "min_p", 0)
    return Completion(text, tokens, finished, logp, -logp / tokens if logp is not None and known else None)
