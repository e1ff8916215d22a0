"""What `ExtGRPOTrainer` is constructed with: checked before TRL's constructor gets it, completed after it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from trl import GRPOTrainer

from trl_ext.generation.adapter_models import with_adapter_loaded
from trl_ext.generation.adapters import (
    check_adapter,
    check_quantization,
    check_stored_weights,
    quantized_by,
    refuse_untrainable,
)
from trl_ext.generation.policy import sampling_kwargs
from trl_ext.generation.vllm import engine_settings
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.tool_use import RolloutTools as RolloutTools
from trl_ext.grpo.tool_use import with_environments_reward
from trl_ext.rewards.guard import guarded
from trl_ext.training.progress import show_rewards_in_notebook
from trl_ext.turns.responses import ToolUse
from trl_ext.turns.settings import resolve_protocol


def config_of(args: Iterable[object], kwargs: Mapping[str, object]) -> ExtGRPOConfig:
    """The configuration among a constructor's arguments.

    Raises:
        TypeError: there is none of ours.
    """
    config = kwargs.get("args") or next((a for a in args if isinstance(a, ExtGRPOConfig)), None)
    if not isinstance(config, ExtGRPOConfig):
        raise TypeError("ExtGRPOTrainer needs args=ExtGRPOConfig(...)")
    if config.tools:
        resolve_protocol(config, by_template=False)  # a recipe has done so with the model's template
    return config


@contextlib.contextmanager
def constructing(
    trainer: Any, config: ExtGRPOConfig, args: Iterable[object], kwargs: Mapping[str, object]
) -> Iterator[dict[str, Any]]:
    """TRL's arguments by their names, in the context in which its constructor has to be called; then what it lacks.

    Raises:
        ValueError: the adapter cannot be trained, or not be merged for vLLM.
    """
    if config.stop or config.sampling_min_tokens:
        config.generation_kwargs = sampling_kwargs(config)
    given = inspect.signature(GRPOTrainer).bind(*args, **kwargs).arguments
    refuse_untrainable(given.get("peft_config"), config.gradient_checkpointing, given["model"])
    quantized = quantized_by(given["model"], given.get("quantization_config"))
    check_quantization(quantized, given.get("peft_config"), config)
    if config.use_vllm:
        check_adapter(given["model"], given.get("peft_config"))
        if config.vllm_mode == "colocate":
            check_stored_weights(given["model"])
    loaded = with_adapter_loaded(given, config)
    if config.overlong_buffer is not None:
        given["reward_funcs"] = config.with_overlong_penalty(given["reward_funcs"])
    given["reward_funcs"] = with_environments_reward(given["reward_funcs"], config.tools, trainer)
    with engine_settings(config), loaded:
        yield given
    show_rewards_in_notebook(trainer)
    if None in trainer.eos_token_ids:  # TRL's for a tokenizer without EOS
        trainer.eos_token_ids = [token for token in trainer.eos_token_ids if token is not None]
        if not trainer.use_vllm:
            trainer.generation_config.eos_token_id = trainer.eos_token_ids or None
            trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids or None
    trainer.reward_funcs = [
        function if isinstance(function, torch.nn.Module) else guarded(function, config.reward_timeout)
        for function in trainer.reward_funcs
    ]
    if config.tools:
        use = ToolUse.of(config, trainer._tokenizer)
        trainer.policy_tools = RolloutTools(use, trainer)
        trainer.tools = use.box.functions  # TRL then takes its path of tools, and its loop is ours
