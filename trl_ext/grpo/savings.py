"""Which savings of a step are exact for a model and its settings, and why one is off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_ext.generation.adapters import LILY_S_MEAN, adapter_of_places, has_mean_over_a_pass
from trl_ext.generation.kv_sharing import unsupported_checkpointing, unsupported_in_a_step
from trl_ext.generation.positions import unsupported_positions
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.step import Batching

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNDER_FSDP = "under FSDP the decoder cannot run alone"


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
    refusal = moved or unsupported_in_a_step(model) or (UNDER_FSDP if fsdp else None)
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
        rows=config.per_device_train_batch_size,
        tokens=config.micro_batch_tokens,
        dynamic=on["dynamic_micro_batches"],
        skip_zero_advantage=on["skip_zero_advantage_rows"],
        share_prompts=on["share_prompt_prefix"] and config.dynamic_micro_batches,
        attention=attention_cost(model) if on["share_prompt_prefix"] else 0.0,
        multiple_of=config.pad_to_multiple_of,
        checkpointing=config.gradient_checkpointing,
        separate_prompt_backward=one_process,
    )
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


def attention_cost(model: PreTrainedModel) -> float:
    """The work of comparing a token with another one in all layers, in that of a token's matrix products.

    Floating-point operations of a forward pass: 4 for each dimension of a head (scores, and their weighted sum of
    values) against 2 for each parameter outside of the embeddings.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    embeddings = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    parameters = {id(p): getattr(p, "ds_numel", p.numel()) for p in model.parameters() if id(p) not in embeddings}
    return 4 * width * config.num_hidden_layers / (2 * sum(parameters.values()))
