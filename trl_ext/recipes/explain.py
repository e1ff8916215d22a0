"""What a configuration of GRPO optimizes, before anything is trained: objective, batches, settings without effect.

    python -m trl_ext.recipes.explain recipes/grpo_math.yaml
    python -m trl_ext.recipes.explain recipes/grpo_math.yaml --preset dapo_full --epochs_per_rollout_batch 2
    python -m trl_ext.recipes.explain runs/my_run
    python -m trl_ext.recipes.explain my_trl_config.yaml --loss_type dr_grpo

Takes a YAML file or the folder of a run, and settings as flags, which win. Of a configuration of stock TRL, such as one
for `trl grpo`, without a preset or an axis, it names the axes that train the same way.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from trl.scripts.grpo import GRPOScriptArguments

from trl_ext.algorithms.presets import PRESETS
from trl_ext.errors import InputError
from trl_ext.grpo.config import AXES, ExtGRPOConfig
from trl_ext.grpo.ineffective_settings import ineffective_settings, updates_per_rollout
from trl_ext.io import read_yaml
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.registry import UnknownName, fits, parse_options, unknown
from trl_ext.runs.layout import CONFIG

# TRL's loss types: policy loss, aggregation and its options, and how ours differs.
LOSS_TYPES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "grpo": ("ppo_clip", "sequence_mean", {}, ""),
    "dapo": ("ppo_clip", "token_mean", {}, ""),
    "bnpo": (
        "ppo_clip",
        "token_mean",
        {},
        "TRL divides by the tokens of a micro-batch, token_mean by those of the step",
    ),
    "dr_grpo": ("ppo_clip", "constant", {}, ""),
    "luspo": ("ppo_clip", "constant", {"normalize_constant": 1.0}, ""),
    "cispo": ("cispo", "token_mean", {}, ""),
    "sapo": ("sapo", "sequence_mean", {}, ""),
    "vespo": ("vespo", "token_mean", {}, ""),
}
_AXES = ("advantage", "policy_loss", "aggregation")


def main() -> None:
    """Print the explanation of what the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m trl_ext.recipes.explain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", type=Path, help="a YAML file, or the folder of a run")
    parser.add_argument("settings", nargs=argparse.REMAINDER, help="--NAME VALUE, any setting of recipes/grpo_math.py")
    given = sys.argv[1:]
    if given and given[0].startswith("--") and given[0] != "--help":
        given = ["", *given]
    asked = parser.parse_args(given)
    try:
        print("\n".join(explain(read(asked.config if given[:1] != [""] else None, asked.settings))))
    except (InputError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def read(config: Path | None, flags: Sequence[str]) -> dict[str, Any]:
    """The settings of `ExtGRPOConfig` in a file, a run's folder and flags; those of the task and the model left out.

    Raises:
        InputError: there is no such file, it has no settings, or a value is not of its setting's type.
        UnknownName: a name is no setting of `recipes/grpo_math.py`, nor an argument of `trl grpo`.
    """
    given = {} if config is None else _in_file(config / CONFIG if config.is_dir() else config)
    pairs = [flag.partition("=")[::2] if "=" in flag else (flag, None) for flag in flags]
    while pairs:
        name, value = pairs.pop(0)
        if value is None:
            value = pairs.pop(0)[0] if pairs and not pairs[0][0].startswith("--") else "true"
        given[name.removeprefix("--")] = yaml.safe_load(value)
    known = {field.name for settings in (*GRPO_SETTINGS, GRPOScriptArguments) for field in dataclasses.fields(settings)}
    for name in given:
        if name not in known:
            said = str(unknown("setting of recipes/grpo_math.py", name, known)).partition(" Known: ")[0]
            raise UnknownName(f"{said} Its --help all lists every one")
    types, ours = typing.get_type_hints(ExtGRPOConfig), {field.name for field in dataclasses.fields(ExtGRPOConfig)}
    return {name: _value_of(name, value, types[name]) for name, value in given.items() if name in ours}


def _in_file(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(f"no file {str(file)!r}; give a YAML file or the folder of a run")
    try:
        content = read_yaml(file) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is no YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file} has no settings, but a {type(content).__name__}; a line is `name: value`")
    return {str(name): value for name, value in content.items()}


def _value_of(name: str, value: Any, wanted: Any) -> Any:
    """The value, or the number that it writes as `1e-6`, which YAML reads as a text."""
    value = (parse_options(name, {name: value}) or {})[name]
    if not fits(value, wanted) or (isinstance(value, bool) and wanted in (float, float | None)):
        raise InputError(f"{name} must be {getattr(wanted, '__name__', wanted)}, got {value!r}")
    return value


def explain(settings: Mapping[str, Any]) -> list[str]:
    """The lines of an explanation.

    Args:
        settings: of `ExtGRPOConfig`.
    """
    config = _config(settings)
    lines: list[str] = []
    if not config.uses_axes:
        config, lines = _stock_trl_axes(config, settings)
    names = [*_AXES, *["kl_estimator"] * bool(config.beta)]
    names += ["sampler_weight", "sampler_rejection"] * bool(config.sampler_weight)
    names += ["rollout_selection"] * bool(config.rollout_selection) + ["distillation"] * config.has_teacher
    lines += ["objective", f"    {_formula(config)}"]
    lines += [line for name in names for line in _member(config, name)]
    lines += ["batches", *(f"    {line}" for line in _batches(config))]
    if row := config.covered:
        lines += ["deterministic", f"    two runs are the same, with {' on a '.join(config.engine_and_device)}"]
        lines += [f"    a response is the same whatever it is sampled with: {row.whatever_batch}"]
    if idle := ineffective_settings(config):
        lines += ["without effect here", *(f"    {name}={getattr(config, name)}: {why}" for name, why in idle.items())]
    return [*lines, "nearest preset", f"    {_nearest(config)}"]


def _config(settings: Mapping[str, Any]) -> ExtGRPOConfig:
    return ExtGRPOConfig(**{"output_dir": "explained", "use_cpu": True, "bf16": False, **settings})


def _stock_trl_axes(config: ExtGRPOConfig, settings: Mapping[str, Any]) -> tuple[ExtGRPOConfig, list[str]]:
    """The axes that train as stock TRL does, and what to say of them."""
    if config.loss_type not in LOSS_TYPES:
        raise unknown("loss_type of TRL", config.loss_type, LOSS_TYPES)
    loss, aggregation, options, remark = LOSS_TYPES[config.loss_type]
    group = {"advantage": "group_std", "advantage_options": {"eps": 1e-4}}
    is_default = config.scale_rewards in ("group", True) and config.multi_objective_aggregation == "sum_then_normalize"
    axes = {
        "policy_loss": loss,
        "aggregation": aggregation,
        "aggregation_options": options,
        **(group if is_default else {}),
    }
    rest = {name: value for name, value in settings.items() if name != "loss_type"}
    equivalent = _config({**rest, **axes})
    flags = [f"--{axis} {getattr(equivalent, axis)}{_options(equivalent, axis)}" for axis in _AXES]
    lines = [f"stock TRL, loss_type {config.loss_type}; the same by axes", f"    {' '.join(flags)}"]
    return equivalent, [*lines, *([f"    but {remark}"] if remark else [])]


def _options(config: ExtGRPOConfig, axis: str) -> str:
    given = getattr(config, f"{axis}_options") or {}
    return f" --{axis}_options " + ",".join(f"{name}={value}" for name, value in given.items()) if given else ""


def _formula(config: ExtGRPOConfig) -> str:
    rewards = f"{config.rollout_selection} of rewards" if config.rollout_selection else "rewards"
    advantage = f"{config.advantage}({rewards})"
    if config.has_teacher and not config.learns_divergence:
        advantage = f"{advantage} + {_coefficient(config)} * {config.distillation}(teacher)"
    loss = f"{config.policy_loss}(A = {advantage})"
    if config.off_policy_mask_threshold is not None:
        loss = f"off-policy mask(threshold {config.off_policy_mask_threshold:g}) * {loss}"
    if config.top_entropy_quantile < 1:
        loss = f"mask of the top {config.top_entropy_quantile:g} by entropy * {loss}"
    if config.sampler_rejection not in (None, "keep_all"):
        loss = f"{config.sampler_rejection} * {loss}"
    if config.sampler_weight not in (None, "unweighted"):
        loss = f"{config.sampler_weight} weight * {loss}"
    if config.beta:
        loss = f"{loss} + {config.beta:g} * {config.kl_estimator}"
    if config.learns_divergence:
        loss = f"{loss} + {_coefficient(config)} * {config.distillation}(teacher)"
    if config.entropy_coef or config.use_adaptive_entropy:
        coefficient = "adaptive coefficient" if config.use_adaptive_entropy else f"{config.entropy_coef:g}"
        loss = f"{loss} - {coefficient} * entropy"
    return f"{config.aggregation}({loss})"


def _coefficient(config: ExtGRPOConfig) -> str:
    end = config.distillation_coef_end
    return f"{config.distillation_coef:g}" if end is None else f"({config.distillation_coef:g} falling to {end:g})"


def _member(config: ExtGRPOConfig, axis: str) -> list[str]:
    """The member's name with its options, and what its docstring begins with."""
    name, table = str(getattr(config, axis)), AXES[axis]
    options = {**table.options(name), **(getattr(config, f"{axis}_options") or {})}
    said = (inspect.getdoc(table.get_function(name)) or "a function of your own").splitlines()[0]
    shown = ", ".join(f"{option}={value}" for option, value in options.items())
    return [f"    {axis}: {name}{f'({shown})' if shown else ''}", f"        {said}"]


def _batches(config: ExtGRPOConfig) -> list[str]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rollout, group = int(config.generation_batch_size or 0), int(config.num_generations or 1)
    step = config.per_device_train_batch_size * config.gradient_accumulation_steps * ranks
    updates = updates_per_rollout(config)
    if config.old_log_probs == "sampler":
        on = "off-policy from the first on: ratios are to the sampler's log-probabilities"
    else:
        on = "on-policy: every rollout is used in one step" if updates <= 1 else "off-policy from the second step on"
    return [
        f"rollout: {rollout} completions, {_counted(rollout // group, 'problem')} of {group}"
        + (f", tried up to {config.dynamic_sampling_tries} times" if config.dynamic_sampling_tries > 1 else ""),
        f"step: {step} completions in {_counted(config.gradient_accumulation_steps, 'micro-batch', 'es')} of "
        f"{config.per_device_train_batch_size} on each of {_counted(ranks, 'process', 'es')}",
        f"{_counted(updates, 'optimizer step')} per rollout, {on}",
        *["sampled with the weights of one rollout before; the ratio or the sampler's correction weighs it"]
        * config.rollout_ahead,
    ]


def _counted(number: float, noun: str, more: str = "s") -> str:
    return f"{number:g} {noun}{more * (number != 1)}"


def _nearest(config: ExtGRPOConfig) -> str:
    """The preset with the most members in common, then options and settings, and what differs."""

    def differing(name: str) -> list[str]:
        preset = PRESETS[name]
        parts = {part: getattr(preset, part) for axis in _AXES for part in (axis, f"{axis}_options")} | preset.settings
        return [part for part, value in parts.items() if (getattr(config, part) or {}) != (value or {})]

    def distance(name: str) -> tuple[int, int, bool]:
        differences = differing(name)
        return len(set(differences) & set(_AXES)), len(differences), name != config.preset

    nearest = min(PRESETS, key=distance)
    different = [f"{part}={getattr(config, part)}" for part in differing(nearest)]
    return nearest + (f", but {', '.join(different)}" if different else "")


if __name__ == "__main__":
    main()
