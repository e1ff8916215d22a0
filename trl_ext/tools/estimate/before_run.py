"""A run that is about to start: its memory is estimated in a process of its own, without its GPUs and its ranks."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from trl_ext.generation.adapter_models import load_tokenizer
from trl_ext.generation.model_source import locate
from trl_ext.generation.tokens import prompt_ids
from trl_ext.io import print_line
from trl_ext.tools.estimate.planned import Launch, Lengths, NoEstimateError, PlannedRun, zero_stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainingArguments

# What would have the child join the run's ranks or take its GPU.
_OF_A_RANK = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_",
    "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_",
)  # fmt: skip
VERDICT = "verdict of trl_ext.tools.estimate: "  # begins the process's answer, among a library's lines
_SECONDS = 300.0  # for it, and no more than half of what the other ranks wait for the first one


@dataclass(frozen=True)
class MemoryCheck:
    """Of a run on a GPU."""

    refusal: str | None  # why it would not fit, with the setting to change
    peak: str  # the moment
    bytes: int  # at the peak
    slows: str | None = None  # why its engine would preempt, by lengths that are guessed, with the setting to change
    paged: int = 0  # bytes of the optimizer's state that may be in the host's memory, in addition


def estimate_in_subprocess(run: PlannedRun, capacity: int, seconds: float = _SECONDS) -> MemoryCheck:
    """The estimate for this run on a GPU with so many bytes.

    Raises:
        NoEstimateError: it cannot be estimated, or not in so many seconds.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*_OF_A_RANK, "ACCELERATE_", "FSDP_", "DEEPSPEED_"))
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trl_ext.tools.estimate"],
            # Without the task, whose class may be of the script that was started.
            input=pickle.dumps((replace(run, task=None), capacity)),
            capture_output=True,
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NoEstimateError(f"it took more than {seconds:g} s") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise NoEstimateError(said[-1] if said else f"the process ended with {done.returncode}")
    lines = done.stdout.decode(errors="replace").splitlines()
    answers = [line.removeprefix(VERDICT) for line in lines if line.startswith(VERDICT)]
    if len(answers) != 1:
        raise NoEstimateError("the process ended without a verdict")
    return MemoryCheck(**json.loads(answers[0]))


def refuse_what_does_not_fit(task: Any, model: Any, config: TrainingArguments, data: Any, policy: str) -> None:
    """Estimate the memory of the run about to start, where `check_memory` says so; of several ranks on the first.

    Raises:
        ValueError: it would run out of memory, or its engine would not start; the message has the setting to change.
    """
    if not task.checks_memory():
        return
    try:
        verdict = _verdict(task, model, config, data, policy)
    except NoEstimateError as error:
        if str(task.check_memory).lower() == "true":
            raise ValueError(f"check_memory: true, and memory cannot be estimated here: {error}") from error
        print_line(f"memory is not estimated: {error}")
        return
    if verdict.refusal:
        raise ValueError(f"{verdict.refusal}. (check_memory: false starts the run as it is)")
    paged = f", and {verdict.paged / 2**30:.1f} GiB that are paged, here or on the host" if verdict.paged else ""
    print_line(f"estimated memory: {verdict.bytes / 2**30:.1f} GiB at the peak ({verdict.peak}){paged}")
    if verdict.slows:
        print_line(f"memory: {verdict.slows}")


def _verdict(task: Any, model: Any, config: TrainingArguments, data: Any, policy: str) -> MemoryCheck:
    """Of this run on this GPU.

    Raises:
        NoEstimateError: for whatever reason there is none, since the run may fit all the same.
    """
    try:
        known = {"revision": model.model_revision, "trust_remote_code": config.trust_remote_code}
        source = locate(policy, model.model_revision)
        network = AutoConfig.from_pretrained(source.base, **known | source.known)
        tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
        launch, lengths = launch_of_process(config), _lengths_of_rows(data, config, tokenizer)
        run = PlannedRun(task, model, config, network, launch, lengths)
        return estimate_in_subprocess(run, torch.cuda.mem_get_info()[1], min(_SECONDS, config.ddp_timeout / 2))
    except NoEstimateError:
        raise
    except Exception as error:
        raise NoEstimateError(f"{type(error).__name__}: {error}") from error


def launch_of_process(config: TrainingArguments) -> Launch:
    """How this process has been started, by what accelerate hands over in the environment.

    Raises:
        NoEstimateError: by FSDP or with settings of DeepSpeed that are not modeled.
    """
    own = {name.removeprefix("ACCELERATE_"): value for name, value in os.environ.items()}
    is_on = [own.get(f"USE_{name}", "false").lower() == "true" for name in ("FSDP", "DEEPSPEED")]
    sharded = is_on[0] or bool(getattr(config, "fsdp", None))
    kind = "FSDP" if sharded else "DEEPSPEED" if is_on[1] or getattr(config, "deepspeed", None) else "NO"
    offloads = [own.get(f"DEEPSPEED_OFFLOAD_{what}_DEVICE") for what in ("OPTIMIZER", "PARAM")]
    file = getattr(config, "deepspeed", None) or own.get("DEEPSPEED_CONFIG_FILE")
    stage = zero_stage(kind, file, own.get("DEEPSPEED_ZERO_STAGE"), offloads)
    hosts = config.world_size // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", config.world_size)))
    return Launch(config.world_size, max(1, hosts), stage)


def _lengths_of_rows(data: Any, config: TrainingArguments, tokenizer: PreTrainedTokenizerBase) -> Lengths:
    lengths = [len(ids) for ids in prompt_ids(tokenizer, data.train["prompt"])]
    most = config.max_completion_length
    return Lengths(fmean(lengths), max(lengths), most / 2, most)
