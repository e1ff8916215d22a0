"""The course handout's vocabulary, resolved into the fields of TRL and Trainer, with its divisibility checks."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Protocol

from trl_ext.algorithms.presets import LOSS_TYPES
from trl_ext.compat.given import given, reset
from trl_ext.setting import facts


class BatchConfig(Protocol):
    """A config with the handout's batch sizes next to Trainer's."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    train_batch_size: int | None
    micro_train_batch_size: int | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int


class HandoutConfig(BatchConfig, Protocol):
    """`ExtGRPOConfig` as it is read here."""

    rollout_batch_size: int | None
    group_size: int | None
    n_grpo_steps: int | None
    num_generations: int
    num_iterations: int
    max_steps: int
    preset: str | None
    loss_type: str
    use_std_normalization: bool | None
    advantage: str | None
    advantage_eps: float | None
    advantage_options: Any
    cliprange: float | None
    policy_loss_options: Any


def resolve_handout(args: HandoutConfig) -> None:
    """Write the handout's fields into TRL's, in place; refuse what disagrees or does not divide, with the numbers."""
    _check_rollout(args)
    resolve_train_batch(args)
    take_over_names(args)
    _resolve_steps(args)
    _resolve_loss_type(args)
    _resolve_axes(args)


def take_over_names(args: BatchConfig) -> None:
    """Write each setting that has another name in TRL into TRL's; refuse another value that was given for that."""
    for name, trl in facts(type(args), lambda known: known.trl).items():
        value, current = getattr(args, name), getattr(args, trl)
        if value is None:
            continue
        if current != value and given(args, [trl], off=False):
            raise ValueError(f"{name}={value} and {trl}={current} contradict each other; set one of them")
        setattr(args, trl, value)


def _divide(numerator: tuple[str, int], denominator: tuple[str, int]) -> int:
    (what, total), (by, part) = numerator, denominator
    if total % part:
        raise ValueError(f"{what} ({total}) must be divisible by {by} ({part})")
    return total // part


def _check_rollout(args: HandoutConfig) -> None:
    rollout, train, group = args.rollout_batch_size, args.train_batch_size, args.group_size or args.num_generations
    if rollout is not None:
        _divide(("rollout_batch_size", rollout), ("group_size", group))
    if train is None:
        return
    if train < group:
        raise ValueError(f"train_batch_size ({train}) must be at least group_size ({group})")
    if rollout is not None:
        _divide(("rollout_batch_size", rollout), ("train_batch_size", train))


def resolve_train_batch(args: BatchConfig) -> None:
    """train_batch_size = micro batch x accumulation x ranks: two of them give the third, in a config of any trainer."""
    train, world_size = args.train_batch_size, int(os.environ.get("WORLD_SIZE", "1"))
    if train is None:
        return
    per_rank = _divide(("train_batch_size", train), ("the number of processes", world_size))
    accumulation, micro = args.gradient_accumulation_steps, args.micro_train_batch_size
    is_given = bool(given(args, ["gradient_accumulation_steps"]))
    if micro is None and is_given and not given(args, ["per_device_train_batch_size"]):
        args.micro_train_batch_size = _divide(
            ("train_batch_size per process", per_rank), ("gradient_accumulation_steps", accumulation)
        )
        return
    if micro is None:
        micro = args.per_device_train_batch_size = min(args.per_device_train_batch_size, per_rank)
    elif micro > per_rank:  # a recipe's number for one process, on several
        if args.per_device_train_batch_size == micro:
            args.per_device_train_batch_size = per_rank
        micro = args.micro_train_batch_size = per_rank
    steps = _divide(("train_batch_size per process", per_rank), ("micro_train_batch_size", micro))
    if is_given and accumulation != steps:
        raise ValueError(
            f"train_batch_size ({train}) over {world_size} process(es) in micro-batches of {micro} takes {steps} "
            f"accumulation steps, but gradient_accumulation_steps is {accumulation}"
        )
    args.gradient_accumulation_steps = steps


def _resolve_steps(args: HandoutConfig) -> None:
    """n_grpo_steps rollouts, each trained on for epochs x (rollout / train) optimizer steps."""
    if args.n_grpo_steps is None:
        return
    if args.rollout_batch_size is None or args.train_batch_size is None:
        raise ValueError("n_grpo_steps needs rollout_batch_size and train_batch_size, or set max_steps instead")
    per_rollout = args.num_iterations * (args.rollout_batch_size // args.train_batch_size)
    steps = args.n_grpo_steps * per_rollout
    if args.max_steps not in (-1, steps):
        raise ValueError(
            f"n_grpo_steps={args.n_grpo_steps} is {steps} optimizer steps, but max_steps={args.max_steps}; set "
            "max_steps to -1 as well, or max_steps alone"
        )
    args.max_steps = steps


def _resolve_loss_type(args: HandoutConfig) -> None:
    """The handout's loss types are presets, and none of TRL's."""
    if args.loss_type not in LOSS_TYPES:
        return
    if args.preset not in (None, args.loss_type):
        raise ValueError(
            f"loss_type {args.loss_type!r} is the preset of that name, and preset is {args.preset!r}; set preset"
        )
    args.preset = args.loss_type
    reset(args, "loss_type")


def _resolve_axes(args: HandoutConfig) -> None:
    """use_std_normalization, advantage_eps and cliprange are members and options of the axes."""
    if args.use_std_normalization is not None:
        name = "group_std" if args.use_std_normalization else "group_mean"
        if args.advantage not in (None, name):
            raise ValueError(
                f"use_std_normalization={args.use_std_normalization} means advantage {name!r}, "
                f"but advantage is {args.advantage!r}"
            )
        args.advantage = name
    if args.advantage_eps is not None and args.advantage != "group_mean":
        args.advantage_options = {"eps": args.advantage_eps, **(args.advantage_options or {})}
    if args.cliprange is not None:
        own = args.policy_loss_options or {}
        args.policy_loss_options = {"eps_low": args.cliprange, "eps_high": args.cliprange, **own}
