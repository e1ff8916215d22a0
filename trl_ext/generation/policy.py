"""`PolicySampling`: what makes a `Trainer` write completions with the policy as it is now, on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from transformers import Trainer
from trl.models import unwrap_model_for_generation

from trl_ext.generation.completion import Completion
from trl_ext.generation.hf import hf_generate, is_finished
from trl_ext.generation.request_seeds import Place
from trl_ext.ranks import raise_everywhere

Found = TypeVar("Found")


class PolicySampling:
    """To be inherited beside a `Trainer` that has `generation_config`, `eos_token_ids` and, with vLLM, the engine."""

    args: Any
    accelerator: Any
    control: Any
    state: Any
    model: Any
    model_wrapped: Any
    processing_class: Any
    use_vllm: bool
    vllm_generation: Any
    generation_config: Any
    generation_kwargs: dict[str, Any]
    eos_token_ids: list[int]
    _tokenizer: Any
    _dist: Any

    def completion_ids(self, prompts: list[str]) -> list[list[int]]:
        """One completion of the current policy per prompt, as token ids."""
        raise NotImplementedError

    def log_now(self, logs: dict[str, float]) -> None:
        """Log at the current step without flushing the training metrics that TRL collects for its next log."""
        due = self.control.should_log
        trainer: Any = self
        Trainer.log(trainer, logs)
        self.control.should_log = due  # Trainer takes any log for the step's own and would leave that one out

    def sample(
        self,
        prompts: Sequence[str],
        batch_size: int,
        seed: int,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> list[Completion]:
        """One completion per prompt from the current policy, prompts shared out over the ranks, in order.

        The training run's random state is left as it was, so validating more often changes nothing else.

        Args:
            batch_size: of HF generate; vLLM takes all prompts at once.
            temperature: other than the rollouts'; 0 takes the likeliest token.
            max_tokens: other than the rollouts'.
        """
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine = list(prompts[rank::ranks])
        mine += prompts[:1] * (-(-len(prompts) // ranks) - len(mine))  # equal shares, or collectives would hang
        order = sorted(range(len(mine)), key=lambda i: len(mine[i]))  # little padding in a batch of like lengths
        completions: list[Completion | None] = [None] * len(mine)
        batch_size = len(mine) if self.use_vllm else batch_size
        seeded = self.vllm_generation.fixed_seed(seed) if self.use_vllm else contextlib.nullcontext()
        with torch.random.fork_rng(enabled=True), torch.no_grad(), self._sampling(temperature, max_tokens), seeded:
            torch.manual_seed(seed + rank)
            for start in range(0, len(mine), max(batch_size, 1)):
                chosen = order[start : start + batch_size]
                with self._evaluating():
                    ids_of_rows = self.completion_ids([mine[i] for i in chosen])
                finished = self._is_finished(ids_of_rows)
                texts = self.processing_class.batch_decode(ids_of_rows, skip_special_tokens=True)
                for i, text, ids, end in zip(chosen, texts, ids_of_rows, finished.tolist(), strict=True):
                    completions[i] = Completion(text, len(ids), end)
        gathered = gather_object([completions])  # one list per rank
        return [gathered[i % ranks][i // ranks] for i in range(len(prompts))]

    def place_in_run(self) -> Place:
        """Where the next completions belong: to training or to an evaluation, after how many optimizer steps."""
        return "train" if self.model.training else "eval", self.state.global_step

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The policy without dropout."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    def found_by_first(self, find: Callable[[], Found]) -> Found:
        """What the first rank finds, on every rank; what it raises is raised on all of them."""
        found: list[Any] = [None]
        error = None
        try:
            if self.accelerator.is_main_process:
                found = [find()]
        except Exception as raised:
            error = raised
        raise_everywhere(error)
        value: Found = broadcast_object_list(found)[0]
        return value

    @contextlib.contextmanager
    def _sampling(self, temperature: float | None, max_tokens: int | None) -> Iterator[None]:
        """Other settings than the rollouts', for the engine that generates."""
        owner: Any = self.vllm_generation if self.use_vllm else self.generation_config
        asked: dict[str, Any] = {"max_completion_length" if self.use_vllm else "max_new_tokens": max_tokens}
        if self.use_vllm:
            asked["temperature"] = temperature
        elif temperature is not None:
            asked |= {"do_sample": temperature > 0, "temperature": temperature or 1.0}
        before = {name: getattr(owner, name) for name, value in asked.items() if value is not None}
        for name in before:
            setattr(owner, name, asked[name])
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(owner, name, value)

    def _hf_completion_ids(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """By HF generate; a collective operation where weights are sharded."""
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=getattr(self.args, "ds3_gather_for_generation", True),
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            return hf_generate(model, self._tokenizer, prompt_ids, self.generation_config, self.args.stop)

    def _is_finished(self, completion_ids: list[list[int]]) -> Tensor:
        stop, minimum = self.args.stop, self.args.sampling_min_tokens or 0
        return is_finished(completion_ids, self._tokenizer, self.eos_token_ids, stop, minimum)


def sampling_kwargs(config: Any) -> dict[str, Any]:
    """`stop` and `sampling_min_tokens` in the words of the engine that generates."""
    kwargs = dict(getattr(config, "generation_kwargs", None) or {})
    if config.use_vllm and config.stop:
        kwargs |= {"stop": config.stop, "include_stop_str_in_output": True}
    if config.sampling_min_tokens:
        kwargs["min_tokens" if config.use_vllm else "min_new_tokens"] = config.sampling_min_tokens
    return kwargs
