"""A recipe's settings, as a machine without its GPUs reads them, to the estimate of the run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from tqdm import tqdm

from trl_ext.compat.given import recorded_names
from trl_ext.errors import InputError
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.io import read_json, read_yaml, write_json
from trl_ext.recipes.cli import read_settings
from trl_ext.registry import unknown
from trl_ext.runs.layout import CONFIG
from trl_ext.runs.recipes import RECIPES
from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.hardware import Gpu, gpu_by_name
from trl_ext.tools.estimate.memory.limits import largest, preempting, refusal
from trl_ext.tools.estimate.memory.parts import Memory
from trl_ext.tools.estimate.memory.step import estimate_memory
from trl_ext.tools.estimate.memory.tables import engine_line, figures, limit_lines, optimizer_lines, table
from trl_ext.tools.estimate.micro_batch_advice import larger_micro_batches
from trl_ext.tools.estimate.networks import network_of, prompt_lengths
from trl_ext.tools.estimate.pilot import read_run
from trl_ext.tools.estimate.planned import Launch, Lengths, PlannedRun
from trl_ext.tools.estimate.roofline import count_costs, estimate_time
from trl_ext.tools.estimate.timing import Timing
from trl_ext.tools.experiments.pipeline.settings import Pipeline, read_pipeline

LENGTHS = ("prompt", "longest_prompt", "completion")  # that --set takes next to the settings, in tokens


def recipe_settings(given: Mapping[str, Any]) -> tuple[type, ...]:
    """The settings' classes of the recipe that a YAML file is for: the one that knows most of its names."""
    classes = [recipe.settings() for recipe in RECIPES.values()]
    known = [{field.name for kind in kinds for field in fields(kind)} for kinds in classes]
    return min(zip(classes, known, strict=True), key=lambda pair: len(given.keys() - pair[1]))[0]


def planned_run(config: Path, changes: Sequence[str], launch: Launch) -> PlannedRun:
    """The run that a YAML file describes.

    Args:
        changes: `name=value`, settings of the recipe or one of `LENGTHS`.

    Raises:
        InputError: a setting is unknown, or the model's configuration cannot be had.
    """
    pairs = [change.partition("=") for change in changes]
    if wrong := [name for name, sign, _ in pairs if not sign]:
        raise InputError(f"--set {wrong[0]}: give it as NAME=VALUE, such as --set micro_train_batch_size=4")
    changed = {name: value for name, _, value in pairs}
    own = {name: changed.pop(name) for name in LENGTHS if name in changed}
    if not config.is_file():
        raise unknown("recipe", str(config), map(str, config.parent.glob("*.yaml")))
    written = dict(read_yaml(config) or {})
    if "stages" in written:
        said = f"{config}: it is run in stages, which are estimated one by one:"
        raise InputError("\n".join([said, *_commands(read_pipeline(config))]))
    asked = {**written, **changed}
    # With GPUs and vLLM, without which what needs them is not read.
    use_vllm, ahead = str(asked.get("use_vllm", "auto")).lower() != "false", str(asked.get("rollout_ahead", 0))
    flags = [f"--{name}={value}" for name, value in changed.items() if name != "use_vllm"]
    flags += ["--rollout_ahead", "0"] * ("rollout_ahead" in asked)
    flags += ["--use_cpu", "true", "--use_vllm", "false", "--output_dir", "estimated"]
    task, model, parsed = read_settings(recipe_settings(written), None, config, flags)
    if not model.model_name_or_path:
        raise InputError(f"{config}: without model_name_or_path it trains the embedded policy, which fits anywhere")
    if model.attn_implementation == "auto":
        model.attn_implementation = "flash_attention_2"  # as a GPU with flash-attn has it
    network = network_of(model.model_name_or_path, model.model_revision)
    parsed.use_vllm = use_vllm
    if ahead != "0":
        if ahead != "1" or not use_vllm or parsed.vllm_mode != "server":
            raise InputError(f"rollout_ahead {ahead}: 0, or 1 with use_vllm: true and vllm_mode: server")
        parsed.rollout_ahead = 1
    for_processes(parsed, launch.gpus)
    return PlannedRun(task, model, parsed, network, launch, _lengths(task, parsed, own))


def for_processes(config: Any, processes: int) -> None:
    """Resolve the sizes of batches, which are those of one process, for several."""
    given, micro = recorded_names(config), config.per_device_train_batch_size
    if "train_batch_size" in given:  # it is divided among them, else a step has so many times its rows
        rows = max(1, micro * config.gradient_accumulation_steps // processes)
        config.per_device_train_batch_size = micro = min(micro, rows)
        config.gradient_accumulation_steps = rows // micro
    if isinstance(config, ExtGRPOConfig):
        if not {"train_batch_size", "rollout_batch_size", "generation_batch_size"} & {*given}:
            config.generation_batch_size *= processes
        config.steps_per_generation = max(1, config.generation_batch_size // (micro * processes))


def _commands(pipeline: Pipeline) -> list[str]:
    """The command for each stage that has a file of its own, with its part of the time."""
    options = pipeline.launch
    launch = ["--accelerate", options[options.index("--config_file") + 1]] if "--config_file" in options else []
    commands = []
    for stage in [stage for stage in pipeline.stages if stage.config]:
        own = dict(stage.settings)
        if pipeline.time_budget:
            others = sum(one.share or 0.0 for one in pipeline.stages if one.arm == stage.arm)
            own["time_budget"] = round(pipeline.time_budget * (stage.share or 1 - others))
        changes = ["--set", *(f"{name}={value}" for name, value in own.items())] if own else []
        commands.append(" ".join([f"trl-ext estimate --config {stage.config}", *launch, *changes]))
    return commands


def pace_of_pilot(run: Path, launch: Launch, gpu: Gpu) -> Efficiency:
    """What a finished run on such GPUs says of them.

    Args:
        run: its folder.
        launch: how it was started.

    Raises:
        ValueError: it is no run of recipes/grpo_math.py, or too short.
    """
    rates, work = read_run(run)
    pilot = replace(planned_run(run / CONFIG, [f"completion={work.tokens}"], launch), trained_fraction=work.pilot_rows)
    if pilot.samples_ahead:
        raise InputError(
            f"--pilot {run}: its rollouts were sampled ahead, so it says how long the policy waited and not "
            "how long sampling took; give a run with rollout_ahead: 0"
        )
    return Efficiency().measured(estimate_time(pilot, gpu), rates)


def pace_of_check(file: Path, recipe: Path, launch: Launch, gpu: Gpu) -> Efficiency:
    """What `python -m scripts.benchmarks.gpu --json` says of such GPUs; its recipe is the one of the real model.

    Raises:
        ValueError: a figure is missing.
    """
    measured = read_json(file)
    if missing := [name for name in ("prompt_tokens", "completion_tokens") if not measured.get(name)]:
        raise ValueError(f"{file}: no {', '.join(missing)}; python -m scripts.benchmarks.gpu --json writes them")
    prompt, completion = measured["prompt_tokens"], measured["completion_tokens"]
    lengths = [f"prompt={prompt}", f"longest_prompt={math.ceil(prompt)}", f"completion={completion}"]
    return Efficiency().checked(estimate_time(planned_run(recipe, lengths, launch), gpu), measured)


def _lengths(task: Any, config: Any, own: Mapping[str, str]) -> Lengths:
    """Known of the dataset, or given; completions have half of what they may have until a run says better."""
    mean, longest = prompt_lengths(task.dataset)
    most = config.max_completion_length
    context = config.vllm_max_model_length
    if context is not None:
        longest = min(longest, max(1, context - most))
    return Lengths(
        prompt=float(own.get("prompt", min(mean, longest))),
        longest_prompt=int(own.get("longest_prompt", longest)),
        completion=float(own.get("completion", most / 2)),
        max_completion=most,
    )


def timing_of(run: PlannedRun, gpu: Gpu, args: argparse.Namespace, costs: ModelCosts) -> Timing:
    """Time at the pace of a pilot or a check of the machine, where there is one; costs are of the run's model."""
    if args.pilot is not None:
        _, work = read_run(args.pilot)
        of_pilot = replace(run, lengths=replace(run.lengths, completion=work.tokens))
        return estimate_time(of_pilot, gpu, pace_of_pilot(args.pilot, run.launch, gpu), costs)
    reached = pace_of_check(args.check, args.config, run.launch, gpu) if args.check is not None else None
    return estimate_time(run, gpu, reached, costs)


def report(args: argparse.Namespace) -> str | None:
    """Print the estimate, and return why the run does not fit or would waste its time, if so.

    Raises:
        ValueError: an argument or a setting is wrong, or the run cannot be estimated.
    """
    if args.gpus is not None and args.gpus < 1:
        raise InputError(f"--gpus {args.gpus}: at least 1")
    if args.budget is not None and args.budget <= 0:
        raise InputError(f"--budget {args.budget:g}: more than 0 seconds")
    disable_progress_bars()
    gpu = gpu_by_name(args.gpu)
    launch = Launch.of_accelerate(args.accelerate) if args.accelerate else Launch()
    run = planned_run(args.config, args.set, replace(launch, gpus=args.gpus or launch.gpus))
    time = partial(timing_of, gpu=gpu, args=args, costs=count_costs(run))
    timing = time(run)
    with tqdm(desc="optimizer steps on fake tensors", unit="", leave=False) as bar:

        def compute(other: PlannedRun) -> Memory:
            estimated = estimate_memory(other, gpu.memory)
            bar.update()
            return estimated

        memory = compute(run)
        limits = None if args.quick else largest(run, memory, compute)
        reason = refusal(run, memory, compute) or preempting(run, memory)
        advice = None if reason else larger_micro_batches(run, timing, time, lambda other: compute(other).free >= 0)
    said = [*engine_line(memory), *optimizer_lines(memory, run.config)]
    print("\n".join([*table(memory), *said, *(limit_lines(limits) if limits else [])]))
    print("\n" + timing.table(args.budget or run.config.time_budget))
    if advice:
        print("\n" + advice)
    if args.json:
        phases = [asdict(phase) for phase in timing.phases]
        write_json(args.json, {"refusal": reason, **figures(memory, limits), "phases": phases})
    return reason
