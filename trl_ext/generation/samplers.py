"""A model and its settings -> sampled responses with their log-probabilities, by HF generate or by vLLM.

A sampler is called with prompts and the numbers of the samples, and answers in their order. What a sample is depends on
its number and the seed, not on what else is sampled in the same call, as far as the engine allows: vLLM seeds every
request, HF generate every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from trl_ext.generation.completion import Completion, Sampling, derive_seed
from trl_ext.generation.hf import TokenLogProbs, eos_ids_of, hf_generate, is_finished
from trl_ext.generation.model_source import locate
from trl_ext.generation.vllm_start import device_settings, starting_vllm

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

Sampler = Callable[[Sequence[str], Sequence[int]], list[Completion]]


class HFSampler:
    """HF generate, `batch_size` prompts at a time."""

    def __init__(self, model: str, sampling: Sampling, batch_size: int, dtype: str | None = None) -> None:
        from trl_ext.generation.adapter_models import load_model, load_tokenizer

        device, source = "cuda" if torch.cuda.is_available() else "cpu", locate(model)
        self.tokenizer, self.model = load_tokenizer(source), load_model(source, dtype).to(device).eval()
        self.sampling, self.batch_size = sampling, batch_size
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.config = self.model.generation_config
        self.config.update(
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or None,
            top_p=sampling.top_p,
            top_k=0,
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens or None,
            pad_token_id=self.tokenizer.pad_token_id,
            stop_strings=None,  # those that the model was saved with; ours are `sampling.stop`
        )

    def __call__(self, prompts: Sequence[str], numbers: Sequence[int]) -> list[Completion]:
        """One completion per prompt."""
        found: list[Completion] = []
        for start in range(0, len(prompts), self.batch_size):
            with torch.random.fork_rng():
                torch.manual_seed(derive_seed(self.sampling.seed, numbers[start]))
                found += self._batch(prompts[start : start + self.batch_size])
        return found

    def _batch(self, prompts: Sequence[str]) -> list[Completion]:
        prompt_ids = self.tokenizer(text=list(prompts))["input_ids"]
        logps = TokenLogProbs(len(prompts))
        stop = list(self.sampling.stop)
        rows = hf_generate(self.model, self.tokenizer, prompt_ids, self.config, stop, logps)
        finished = is_finished(rows, self.tokenizer, eos_ids_of(self.config), stop, self.sampling.min_tokens).tolist()
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return [
            _completion(text, len(ids), ended, sum(row[: len(ids)]), self.sampling)
            for text, ids, ended, row in zip(texts, rows, finished, logps.rows(), strict=True)
        ]


class VLLMSampler:
    """An engine of its own; under several ranks each has one, on its own GPU, so every rank must make it."""

    def __init__(self, model: str, sampling: Sampling, **engine: Any) -> None:
        from vllm import LLM

        from trl_ext.generation.merging import whole_model

        model = whole_model(model)
        if PartialState().num_processes > 1:  # else vLLM puts the engines of all ranks on the first GPU
            engine["distributed_executor_backend"] = "external_launcher"
        with starting_vllm():
            self.llm = LLM(model=model, seed=sampling.seed, **device_settings(), **engine)
        self.sampling = sampling

    def __call__(self, prompts: Sequence[str], numbers: Sequence[int]) -> list[Completion]:
        """One completion per prompt, all of them in one batch."""
        params = [vllm_params(self.sampling, derive_seed(self.sampling.seed, number)) for number in numbers]
        return vllm_sample(self.llm, prompts, params)


def vllm_params(sampling: Sampling, seed: int) -> SamplingParams:
    """The settings, whose names are vLLM's, with the log-probability of what was sampled."""
    from vllm import SamplingParams

    settings = dataclasses.asdict(sampling) | {"stop": list(sampling.stop), "seed": seed}
    return SamplingParams(**settings, include_stop_str_in_output=True, logprobs=0)


def vllm_sample(llm: LLM, prompts: Sequence[str], params: SamplingParams | list[SamplingParams]) -> list[Completion]:
    """One completion per prompt."""
    outputs = [request.outputs[0] for request in llm.generate(list(prompts), params, use_tqdm=False)]
    each = params if isinstance(params, list) else [params] * len(outputs)
    return [
        _completion(o.text, len(o.token_ids), o.finish_reason == "stop", o.cumulative_logprob, settings)
        for o, settings in zip(outputs, each, strict=True)
    ]


def _completion(
    text: str, tokens: int, finished: bool, logp: float | None, settings: Sampling | SamplingParams
) -> Completion:
    """A completion whose `logp` is the model's own, which at temperature 1 is what it was drawn from."""
    is_whole = (settings.temperature, settings.top_p, max(getattr(settings, "top_k", 0), 0)) == (1, 1, 0)
    known = logp is not None and tokens and is_whole and not getattr(settings, "min_p", 0)
    return Completion(text, tokens, finished, logp, -logp / tokens if logp is not None and known else None)
