"""How responses are sampled, by settings alone: of a model's `generation_config.json` only its tokens are inherited.

HF `generate` fills every field that it is not given from the model's own config, and a vLLM server some of them, so
that a penalty, a cut or beams which a model arrives with would be in one engine's samples and not in the other's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from trl_ext.generation.policy import sampling_kwargs

# Each field of transformers' `GenerationConfig` is in one of these three; a test compares them with the installed one.
# Of the model: inherited.
OF_MODEL = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
# Of sampling: never inherited. The values that change nothing; for None, transformers' default is such a value.
NEUTRAL: dict[str, Any] = {
    # Lengths, and what ends a response.
    "max_length": None, "max_new_tokens": None, "min_length": 0, "min_new_tokens": None, "max_time": None,
    "stop_strings": None,
    # The strategy.
    "do_sample": None, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "early_stopping": None,
    "length_penalty": 1.0, "diversity_penalty": 0.0, "constraints": None, "force_words_ids": None,
    "penalty_alpha": None, "dola_layers": None, "use_mtp": None, "token_healing": None,
    # What is drawn from, once it is a distribution.
    "temperature": None, "top_k": 0, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "watermarking_config": None,
    # Scores before that.
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "sequence_bias": None, "guidance_scale": None, "remove_invalid_values": None, "renormalize_logits": None,
    # Drafts by a smaller model, or from the prompt.
    "is_assistant": None, "num_assistant_tokens": None, "num_assistant_tokens_schedule": None,
    "assistant_confidence_threshold": None, "prompt_lookup_num_tokens": None, "max_matching_ngram_size": None,
    "assistant_early_exit": None, "assistant_lookbehind": None, "target_lookbehind": None,
    "assistant_ensemble_weight": None, "speculation_type": None,
}  # fmt: skip
# Of the machinery: not inherited either, since it is slower, or (a quantized cache) of other numbers; never saved.
MACHINERY: dict[str, Any] = {
    "use_cache": None, "cache_implementation": None, "cache_config": None, "max_cache_len": None, "low_memory": None,
    "prefill_chunk_size": None, "compile_config": None, "disable_compile": True, "continuous_batching_config": None,
    "output_attentions": None, "output_hidden_states": None, "output_scores": None, "output_logits": None,
    "return_dict_in_generate": None,
}  # fmt: skip
# What of it HF generate does not take for a batch of rollouts, TRL's trainer neither, and why.
_ONE_ROW, _CODE = "works on a single prompt, not on a batch", "needs code from the Hub, which is not run here"
NOT_FOR_ROLLOUTS = {
    "num_return_sequences": "makes other rollouts than the trainer asks for: group_size says how many a prompt has",
    "stop_strings": "has no tokenizer there: stop says which strings end a completion",
    "constraints": _CODE, "force_words_ids": _CODE, "dola_layers": _CODE,
    "use_mtp": "needs weights that no causal language model is loaded with", "token_healing": "changes the prompt",
    "is_assistant": "is for a model that drafts for another", "prompt_lookup_num_tokens": _ONE_ROW,
    "assistant_early_exit": _ONE_ROW,
}  # fmt: skip
# Further entries of a `generation_config.json` that vLLM applies; a server does so to requests that leave them out.
OF_SERVERS = {"presence_penalty": 0.0, "frequency_penalty": 0.0}

# With these the distribution of the scores at a temperature is not what a token is drawn from.
_CUTS = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "watermarking_config")
# What transformers refuses to save where it has no effect.
_OF_DRAWING, _OF_BEAMS = ("temperature", *_CUTS[:-1]), ("early_stopping", "length_penalty")
_ALWAYS_SHOWN = ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens", *OF_MODEL)
# What vLLM calls a field of transformers.
_IN_VLLM = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}


def sampling_config(of_model: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """The whole config of HF `generate`: the settings, the model's tokens, and nothing else of the model's.

    Args:
        of_model: what the model arrived with. Entries that transformers does not know, which are for its own code, are
            kept.
        settings: fields by name; None is as good as none.

    `ValueError` if the settings contradict each other.
    """
    config = GenerationConfig(**{name: value for name, value in settings.items() if value is not None})
    known = vars(GenerationConfig())
    inherited = {
        name: value
        for name, value in vars(of_model).items()
        if name in OF_MODEL or not (name in known or name in OF_SERVERS or name.startswith("_"))
    }
    for name, value in {**inherited, **NEUTRAL, **MACHINERY}.items():
        if getattr(config, name, None) is None and (name in known or name in inherited):  # some versions lack a field
            setattr(config, name, copy.deepcopy(value))
    return config


def rollout_settings(config: Any) -> dict[str, Any]:
    """Fields of a `GenerationConfig` as a trainer's config has them, whichever engine it generates with."""
    given = sampling_kwargs(config)
    if config.use_vllm:
        given = {_IN_VLLM.get(name, name): value for name, value in given.items()}
        given = {name: value for name, value in given.items() if name in NEUTRAL or name in OF_SERVERS}
    named = ("top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")
    settings = {
        "max_new_tokens": config.max_completion_length,
        "temperature": config.temperature,
        **{name: getattr(config, name, None) for name in named},
        **given,
    }
    is_drawn = (settings["temperature"] or 0) > 0
    settings["top_k"] = max(settings["top_k"] or 0, 0)  # vLLM takes -1, too, for all tokens
    return {"do_sample": is_drawn, **settings, "temperature": settings["temperature"] if is_drawn else 1.0}


def saved_config(config: GenerationConfig, stop: Sequence[str] | None = None) -> GenerationConfig:
    """What a model that is sampled with `config` and these stop strings is saved with."""
    saved = copy.deepcopy(config)
    left_out = [*MACHINERY, *(() if config.do_sample else _OF_DRAWING)]
    left_out += _OF_BEAMS if (config.num_beams or 1) == 1 else ()
    left_out += [name for name in NEUTRAL if name != "top_k" and is_neutral(name, getattr(config, name, None))]
    for name in left_out:
        if hasattr(saved, name):
            setattr(saved, name, None)
    saved.stop_strings = list(stop or []) or None
    if isinstance(saved.eos_token_id, list) and len(saved.eos_token_id) == 1:
        saved.eos_token_id = saved.eos_token_id[0]
    return saved


def is_neutral(name: str, value: object) -> bool:
    """Whether a field of sampling with this value changes nothing."""
    return value is None or value == NEUTRAL[name] or (not value and not NEUTRAL[name])


def samples_whole_distribution(config: GenerationConfig) -> bool:
    """Whether tokens are drawn from the distribution of the scores at the temperature, with none left out."""
    cuts = [name for name in _CUTS if not is_neutral(name, getattr(config, name, None))]
    return bool(config.do_sample) and (config.num_beams or 1) == 1 and not cuts


def shown(config: GenerationConfig, stop: Sequence[str] | None) -> dict[str, Any]:
    """The fields that say how a response is sampled: some always, the others where they change something."""
    values = {name: getattr(config, name, None) for name in (*_ALWAYS_SHOWN, *NEUTRAL)}
    told = {name: value for name, value in values.items() if name in _ALWAYS_SHOWN or not is_neutral(name, value)}
    return {name: value for name, value in told.items() if value is not None} | {"stop": list(stop or [])}


def without_adapter(model: nn.Module) -> PreTrainedModel:
    """The model that an adapter, if there is one, was put around."""
    untyped: Any = model
    return untyped.get_base_model() if hasattr(model, "get_base_model") else untyped
