"""What a recipe loads and refuses before its model loads: settings, the model's folder, the server, the data."""

from __future__ import annotations

from trl_ext.compat.startup import use_all_cores

# isort: split
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import disable_progress_bars
from transformers import AutoConfig, AutoTokenizer
from transformers.trainer import get_reporting_integration_callbacks
from transformers.utils import logging
from trl import ModelConfig

from trl_ext.data.lengths import Room, context_of, engine_context, rows_that_fit
from trl_ext.data.references import COMPARING, Checker, check_references, first_rank
from trl_ext.errors import InputError
from trl_ext.foresight.before_run import refuse_what_does_not_fit
from trl_ext.generation.server import Servers, urls_of
from trl_ext.hub.push import check, hide_token
from trl_ext.io import print_line
from trl_ext.recipes.model_settings import check_model_settings, choose_attention
from trl_ext.recipes.requirements import check_requirements
from trl_ext.recipes.settings import Data, Task
from trl_ext.registry import unknown
from trl_ext.rewards.graders import shared_pool

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainingArguments


@dataclass(frozen=True)
class Prepared:
    """Settings that can work together, data that can be trained and measured on, and the policy to begin with."""

    task: Task
    model: ModelConfig
    config: TrainingArguments
    data: Data
    policy: str  # its folder or its name on the Hub
    seconds_to_make_policy: float

    def say(self, line: str) -> None:
        """Print a line, on the first rank."""
        if not self.config.process_index:
            print_line(line)


def prepare(task: Task, model: ModelConfig, config: TrainingArguments, load: Callable[[int], Data]) -> Prepared:
    """Load the data, by `load(seed)`, and refuse with an `InputError` what could not work, before a model loads."""
    use_all_cores()
    logging.disable_progress_bar()  # of transformers and datasets: bars of half a second inside the run's own
    disable_progress_bars()
    hide_token(config)
    try:
        _check_settings(task, model, config)
        if not {*COMPARING}.isdisjoint(task.graders.values()):
            shared_pool().start()  # half a second of imports, in processes of their own
        data = load(config.seed)
        first_rank(lambda: check_answers(data, task, config))
        began = time.monotonic()
        policy = model.model_name_or_path or _base_policy(task, config)
        seconds = time.monotonic() - began
        data = rows_in_context(data, task, policy, model, config)
        first_rank(lambda: refuse_what_does_not_fit(task, model, config, data, policy))
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    note_overlap(data)
    return Prepared(task, model, config, data, policy, seconds)


def _check_settings(task: Task, model: ModelConfig, config: TrainingArguments) -> None:
    """What can be known before the data are read."""
    if (line := choose_attention(model)) and not config.process_index:
        print_line(line)
    check_model_settings(model, config.use_vllm)
    check_requirements(config)
    if task.restore_best and config.save_strategy == "no":
        raise ValueError("restore_best goes back to a checkpoint, and save_strategy is no: leave one of them out")
    if config.n_gpu > 1:
        raise ValueError(
            f"{config.n_gpu} GPUs are visible to a single process: start it with accelerate launch --config_file "
            "accelerate_configs/two_gpus_zero2.yaml, or give it one with CUDA_VISIBLE_DEVICES=0"
        )
    if config.push_to_hub and not config.process_index:
        check(config.hub_model_id)
    check_dashboards(config.report_to)
    if model.model_name_or_path:
        check_model_folder(model.model_name_or_path)
    if config.use_vllm and config.vllm_mode == "server":
        if not config.process_index:
            print_line("waiting for the vLLM server")
        check_server(config)


def _base_policy(task: Task, config: TrainingArguments) -> str:
    with config.main_process_first(desc="making the base policy"):
        return task.base_policy(config.seed)


def check_dashboards(report_to: list[str]) -> None:
    """Refuse a dashboard that is not installed, with the package to install or the dashboards that there are."""
    for name, callback in zip(report_to, get_reporting_integration_callbacks(report_to), strict=True):
        try:
            callback()
        except (RuntimeError, ImportError) as error:
            raise ValueError(f"--report_to {name}: {error} Or leave it out: --report_to none") from error


def check_model_folder(name: str) -> None:
    """Refuse a local path at which there is no model, which would be looked for on the Hub for a minute."""
    path = Path(name).expanduser()
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return
    if path.is_dir():
        raise ValueError(f"model {name!r}: the folder has no config.json, so it holds no model")
    models = sorted(str(config.parent) for config in path.parent.glob("*/*config.json"))
    looks_like_a_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith(".")
    if looks_like_a_hub_id and not (path.parent != Path() and (models or path.parent.name == "runs")):
        return
    raise unknown("model folder", name, set(models))


def check_server(config: TrainingArguments) -> Servers:
    """Wait for the vLLM servers as long as TRL does, before anything is loaded; a ValueError if none answers."""
    urls = urls_of(config.vllm_server_base_url, config.vllm_server_host, config.vllm_server_port)
    return Servers(urls, config.vllm_server_timeout, config.device.type)


def rows_in_context(data: Data, task: Task, policy: str, model: ModelConfig, config: TrainingArguments) -> Data:
    """The rows whose prompts leave room for the longest response; a tokenizer that is not the model's is refused."""
    known = {"revision": model.model_revision, "trust_remote_code": config.trust_remote_code}
    tokenizer, shape = tokenizer_and_shape(policy, policy, **known)
    check_tokenizer(tokenizer, shape, policy, config.stop)
    context, setting = context_of(shape, config.use_vllm, config.vllm_max_model_length)
    if config.use_vllm and config.vllm_mode == "server":
        servers = check_server(config)
        servers.refuse_another_model(shape, tokenizer, policy)
        context, setting = min(server.context() for server in servers.each), "the vLLM server's --max-model-len"
    response = (config.max_completion_length, "sampling_max_tokens")
    measured = (task.validation_max_tokens, "validation_max_tokens") if task.validation_max_tokens else response
    lengths = {"train": response, "validation": measured}
    if context is not None:
        fitting = {
            role: rows_that_fit(
                getattr(data, role), role, source, tokenizer, Room(context, setting, *lengths[role]), task.too_long
            )
            for role, source in data.sources.items()
        }
        data = replace(data, **fitting)
    if config.use_vllm and config.vllm_mode == "colocate" and config.vllm_max_model_length is None:
        sampled = [(getattr(data, role)["prompt"], lengths[role][0]) for role in data.sources]
        config.engine_context = engine_context(sampled, tokenizer, context)
    return data


def tokenizer_and_shape(model: str, base: str, **known: Any) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """A model's tokenizer, and the configuration of the model itself or of the one that it is an adapter of.

    Raises:
        ValueError: the folder or the Hub has no such model, or cannot be reached; says which model.
    """
    try:
        return AutoTokenizer.from_pretrained(model, **known), AutoConfig.from_pretrained(base, **known)
    except OSError as error:
        sought = "" if Path(model).is_dir() else ", which is no folder here and was looked for on the Hub"
        raise ValueError(f"model {model!r}{sought}: {error}") from error


def check_answers(data: Data, task: Task, config: TrainingArguments) -> None:
    """Grade every reference answer against itself; refuse a split of which most cannot be matched."""
    for role, grader in task.graders.items():
        if role in data.sources:
            checker = Checker(grader, str(task.answer_format), task.answer_source)
            check_references(getattr(data, role), role, data.sources[role], checker, quiet=config.disable_tqdm)


def note_overlap(data: Data) -> None:
    """Count the validation problems that are trained on too, such as those that a public dataset has twice."""
    if source := data.sources.get("validation"):
        trained_on = {row["prompt"] for row in data.train}
        source.also_in_training = sum(row["prompt"] in trained_on for row in data.validation)


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, shape: PretrainedConfig, policy: str, stop: Sequence[str] | None
) -> None:
    """Refuse what would index outside the embeddings, or never end a completion."""
    largest, vocabulary = max(tokenizer.get_vocab().values(), default=0), shape.get_text_config().vocab_size
    if largest >= vocabulary:
        raise ValueError(
            f"{policy!r}: token id {largest} is outside the model's vocabulary (size {vocabulary}): tokenizer and "
            "model do not match"
        )
    if tokenizer.eos_token_id is None and not stop:
        raise ValueError(
            f"{policy!r}: the tokenizer has no EOS token, so no completion would end before "
            "--sampling_max_tokens; set eos_token in its tokenizer_config.json, or give --stop"
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"{policy!r}: the tokenizer has neither a pad nor an EOS token; set pad_token in its tokenizer_config.json"
        )
