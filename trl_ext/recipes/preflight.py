"""What a recipe loads and refuses before its model loads: settings, the model's folder, the server, the data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import disable_progress_bars
from transformers import AutoConfig
from transformers.trainer import get_reporting_integration_callbacks
from transformers.utils import logging
from trl import ModelConfig

from trl_ext.compat.startup import use_all_cores
from trl_ext.data.lengths import Room, context_of, engine_context, rows_that_fit
from trl_ext.data.references import COMPARING, Checker, check_references, first_rank
from trl_ext.data.source import Source
from trl_ext.errors import InputError
from trl_ext.generation.adapter_models import check_trainable, embedding_rows, load_tokenizer
from trl_ext.generation.determinism import check_model
from trl_ext.generation.gguf import with_file
from trl_ext.generation.merging import check_mergeable
from trl_ext.generation.model_source import ModelSource, loadable, locate
from trl_ext.generation.server import Servers, urls_of
from trl_ext.grpo.teachers import check_taught_problems, check_teachers, shortest_context
from trl_ext.hub.push import check, hide_token
from trl_ext.io import print_line
from trl_ext.recipes.chat import TOOLS, Chat, ShownTools, doubled_begin, needs_a_model, refuse_unused_options
from trl_ext.recipes.model_settings import check_dtype, check_model_is_made, check_model_settings, choose_attention
from trl_ext.recipes.requirements import check_requirements
from trl_ext.recipes.settings import Data, TaskSettings
from trl_ext.rewards.graders import shared_pool
from trl_ext.turns.tools import Toolbox

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainingArguments


CHECKS_GROUP = "trl_ext.checks"  # entry points: functions that get what `run_checks` gets


@dataclass(frozen=True)
class Prepared:
    """Settings that can work together, data that can be trained and measured on, and the policy to begin with."""

    task: TaskSettings
    model: ModelConfig
    config: TrainingArguments
    data: Data
    policy: str  # its folder or its name on the Hub
    seconds_to_make_policy: float

    def say(self, line: str) -> None:
        """Print a line, on the first rank."""
        if not self.config.process_index:
            print_line(line)


def prepare(task: TaskSettings, model: ModelConfig, config: TrainingArguments, load: Callable[[int], Data]) -> Prepared:
    """Load the data, by `load(seed)`, and refuse with an `InputError` what could not work, before a model loads."""
    use_all_cores()
    logging.disable_progress_bar()  # of transformers and datasets: bars of half a second inside the run's own
    disable_progress_bars()
    hide_token(config)
    try:
        model.model_name_or_path = with_file(model.model_name_or_path, task.gguf_file)
        _check_settings(task, model, config)
        first_rank(task.check_judge)
        if not {*COMPARING}.isdisjoint(task.graders.values()):
            shared_pool(False).start()  # half a second of imports, in processes of their own
        data = replace(load(config.seed), benchmarks=task.benchmark_problems())
        first_rank(lambda: check_answers(data, task, config))
        began = time.monotonic()
        policy = loadable(model.model_name_or_path) if model.model_name_or_path else _base_policy(task, config)
        seconds = time.monotonic() - began
        if not model.model_name_or_path:
            check_model_is_made(locate(policy), model, config)
        data = rows_in_context(data, task, policy, model, config)
        first_rank(lambda: run_checks(task, model, config, data, policy))
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    note_overlap(data)
    return Prepared(task, model, config, data, policy, seconds)


def _check_settings(task: TaskSettings, model: ModelConfig, config: TrainingArguments) -> None:
    """What can be known before the data are read."""
    if (line := choose_attention(model)) and not config.process_index:
        print_line(line)
    check_model_settings(model, config)
    check_dtype(model, config)
    if not task.asking.is_chat:
        refuse_unused_options(config.chat_template_kwargs, task.prompt)
    elif not model.model_name_or_path:
        raise needs_a_model(task.prompt)
    if getattr(config, "sync_ref_model", False) and model.use_peft:
        raise ValueError(
            "sync_ref_model with use_peft: the reference of an adapter is the model without it, and nothing that could "
            "follow the policy; leave one of them out"
        )
    check_requirements(config)
    if getattr(config, "tools", None):
        Toolbox.of(config.tools, config.tool_timeout).close()  # refuses what cannot be called, or not be isolated
    if check_weights := getattr(task, "check_weights", None):
        check_weights(config.reward_weights)
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
    for teacher in getattr(config, "teacher_models", {}).values():
        locate(teacher)  # refuses a folder that holds none
    if model.model_name_or_path:
        source = locate(model.model_name_or_path, model.model_revision)
        check_model_is_made(source, model, config)
        if (line := check_policy(model, source)) and not config.process_index:
            print_line(line)
    if config.use_vllm and config.vllm_mode == "server":
        if not config.process_index:
            print_line("waiting for the vLLM server")
        check_server(config)


def _base_policy(task: TaskSettings, config: TrainingArguments) -> str:
    with config.main_process_first(desc="making the base policy"):
        return task.base_policy(config.seed)


def run_checks(task: TaskSettings, model: ModelConfig, config: TrainingArguments, data: Data, policy: str) -> None:
    """The checks of a run that installed distributions bring, such as this one's estimate of memory.

    Raises:
        ValueError: one of them refuses the run, or `check_memory: true` asks for an estimate and none is installed.
    """
    checks = metadata.entry_points(group=CHECKS_GROUP)
    if not checks and task.checks_memory():
        missing = f"no check is installed as an entry point of {CHECKS_GROUP!r}: pip install -e . makes them known"
        if str(task.check_memory).lower() == "true":
            raise ValueError(f"check_memory: true, and {missing}")
        print_line(f"memory is not estimated: {missing}")
    for brought in checks:
        brought.load()(task, model, config, data, policy)


def check_dashboards(report_to: list[str]) -> None:
    """Refuse a dashboard that is not installed, with the package to install or the dashboards that there are."""
    for name, callback in zip(report_to, get_reporting_integration_callbacks(report_to), strict=True):
        try:
            callback()
        except (RuntimeError, ImportError) as error:
            raise ValueError(f"--report_to {name}: {error} Or leave it out: --report_to none") from error


def check_policy(model: ModelConfig, source: ModelSource) -> str | None:
    """Refuse an adapter that cannot be trained, and say what of it is trained; None for a whole model."""
    if source.adapter is None:
        return None
    if model.use_peft:
        check_mergeable(source)
        return f"policy: the adapter {source.name} is merged into {source.base}, and a new one is trained on both"
    check_trainable(source)
    return f"policy: the adapter {source.name} of {source.base} is trained further (use_peft: true begins a new one)"


def check_server(config: TrainingArguments) -> Servers:
    """Wait for the vLLM servers as long as TRL does, before anything is loaded; a ValueError if none answers."""
    urls = urls_of(config.vllm_server_base_url, config.vllm_server_host, config.vllm_server_port)
    servers = Servers(urls, config.vllm_server_timeout, config.device.type)
    if getattr(config, "deterministic", False):
        servers.refuse_dependence_on_batch()
    return servers


def rows_in_context(data: Data, task: TaskSettings, policy: str, model: ModelConfig, config: TrainingArguments) -> Data:
    """The rows whose prompts leave room for the longest response, as texts.

    A tokenizer that is not the model's is refused.
    """
    known = {"revision": model.model_revision, "trust_remote_code": config.trust_remote_code}
    source = locate(policy, model.model_revision)
    tokenizer, shape = tokenizer_and_shape(source, **known)
    refuse_loss_of_experts(getattr(config, "router_aux_loss_coef", None), shape, policy)
    if (row := getattr(config, "covered", None)) is not None:
        check_model(row, shape.get_text_config().model_type, model.attn_implementation or "sdpa")
    data = as_texts(data, task, source, tokenizer, config)
    check_tokenizer(tokenizer, shape, policy, config.stop)
    if getattr(config, "has_teacher", False):
        check_teachers(config, tokenizer, shape.get_text_config().vocab_size)
        check_taught_problems(config, data.train)
    context, setting = context_of_run(shape, tokenizer, source, config)
    response = (config.max_completion_length, "sampling_max_tokens")
    measured = (task.validation_max_tokens, "validation_max_tokens") if task.validation_max_tokens else response
    lengths = {"train": response, "validation": measured}
    if context is not None:

        def that_fit(rows: Any, role: str, source: Source, length: tuple[int, str]) -> Any:
            return rows_that_fit(rows, role, source, tokenizer, Room(context, setting, *length), task.too_long)

        fitting = {
            role: that_fit(getattr(data, role), role, source, lengths[role]) for role, source in data.sources.items()
        }
        benchmarks = {
            name: replace(one, rows=that_fit(one.rows, name, one.source, measured))
            for name, one in data.benchmarks.items()
        }
        data = replace(data, **fitting, benchmarks=benchmarks)
    if config.use_vllm and config.vllm_mode == "colocate" and config.vllm_max_model_length is None:
        sampled = [(getattr(data, role)["prompt"], lengths[role][0]) for role in data.sources]
        sampled += [(one.rows["prompt"], measured[0]) for one in data.benchmarks.values()]
        config.engine_context = engine_context(sampled, tokenizer, context)
    return data


def as_texts(
    data: Data, task: TaskSettings, source: ModelSource, tokenizer: PreTrainedTokenizerBase, config: TrainingArguments
) -> Data:
    """The rows with texts as prompts, by the chat template where they are conversations; and where responses end."""
    tools = ShownTools.of(config, tokenizer, task.asking.is_chat) if getattr(config, "tools", None) else None
    if not task.asking.is_chat:
        data = data if tools is None else with_tools_in_texts(data, tools, task)
        data.note = data.note or doubled_begin(tokenizer, data.validation)
        return data
    chat = Chat.with_model(source, tokenizer, config.chat_template_kwargs, tools)
    asked = {name: replace(one, rows=chat.texts(one.rows)) for name, one in data.benchmarks.items()}
    data = replace(data, train=chat.texts(data.train), validation=chat.texts(data.validation), benchmarks=asked)
    config.stop = list(dict.fromkeys([*(config.stop or []), *chat.more_stops])) or None  # a run's own file has them
    if getattr(config, "eos_token", "") is None:  # of fine-tuning, which ends responses with it
        config.eos_token = chat.end
    data.note = chat.line(data.validation)
    return data


def context_of_run(
    shape: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, source: ModelSource, config: TrainingArguments
) -> tuple[int | None, str]:
    """The shortest context of model, engine, servers and teachers, and the setting that it is of; None for any."""
    context, setting = context_of(shape, config.use_vllm, config.vllm_max_model_length)
    if config.use_vllm and config.vllm_mode == "server":
        servers = check_server(config)
        servers.refuse_another_model(shape, tokenizer, source.base)
        context, setting = min(server.context() for server in servers.each), "the vLLM server's --max-model-len"
    room = shortest_context(config) if getattr(config, "teacher_url", None) else None
    if room is not None and (context is None or room < context):
        context, setting = room, "the --max-model-len of the teacher's server"
    return context, setting


def with_tools_in_texts(data: Data, tools: ShownTools, task: TaskSettings) -> Data:
    """The rows with what a template says of tools; without a place for it, a note."""
    if TOOLS not in str(task.asking.template):
        data.note = f"the prompt does not say which tools there are: {TOOLS} in a template's file stands for that"
        return data
    asked = {name: replace(one, rows=tools.in_texts(one.rows)) for name, one in data.benchmarks.items()}
    train, validation = tools.in_texts(data.train), tools.in_texts(data.validation)
    return replace(data, train=train, validation=validation, benchmarks=asked)


def tokenizer_and_shape(source: ModelSource, **known: Any) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """A model's tokenizer, and the configuration of the model itself or of the one that it is an adapter of.

    Raises:
        ValueError: the folder or the Hub has no such model, or cannot be reached; says which model.
    """
    try:
        shape = AutoConfig.from_pretrained(source.base, **known | source.known)
        tokenizer = load_tokenizer(source, **{name: value for name, value in known.items() if name != "revision"})
    except Exception as error:  # readers of foreign files raise everything that there is
        sought = "" if Path(source.base).is_dir() else ", which is no folder here and was looked for on the Hub"
        whose = f" (base_model_name_or_path of the adapter {source.name!r})" if source.adapter else ""
        said = " ".join(str(error).split())
        raise ValueError(f"model {source.base!r}{whose}{sought}: {said}") from error
    if not tokenizer(text="1 + 1", add_special_tokens=False)["input_ids"]:  # which transformers makes of no file
        raise ValueError(
            f"{source.tokenizer!r} has no tokenizer that makes tokens of a text: copy tokenizer.json and "
            "tokenizer_config.json from the model that it was made of"
        )
    if source.adapter and (rows := embedding_rows(source.adapter)):
        shape.get_text_config().vocab_size = rows
    return tokenizer, shape


def refuse_loss_of_experts(coefficient: float | None, shape: PretrainedConfig, policy: str) -> None:
    """Refuse, by a `ValueError`, a weight of the router's loss for a model that routes nothing."""
    if coefficient and not hasattr(shape.get_text_config(), "output_router_logits"):
        raise ValueError(
            f"router_aux_loss_coef {coefficient}: {policy!r} ({shape.model_type}) has no experts, and no router's loss "
            "to weigh; leave it out"
        )


def check_answers(data: Data, task: TaskSettings, config: TrainingArguments) -> None:
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


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, shape: PretrainedConfig, policy: str) -> None:
    """Refuse, by a `ValueError`, a tokenizer with tokens that the model has no embeddings for."""
    vocabulary = shape.get_text_config().vocab_size
    beyond = {token: name for name, token in tokenizer.get_vocab().items() if token >= vocabulary}
    if beyond:
        largest = max(beyond)
        raise ValueError(
            f"{policy!r}: token id {largest} ({beyond[largest]!r}) is outside the model's vocabulary (size "
            f"{vocabulary}): tokenizer and model do not match. If tokens were added to the tokenizer, resize the "
            "model's embeddings (model.resize_token_embeddings) and save both"
        )


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, shape: PretrainedConfig, policy: str, stop: Sequence[str] | None
) -> None:
    """Refuse what would index outside the embeddings, or never end a completion."""
    check_vocabulary(tokenizer, shape, policy)
    if tokenizer.eos_token_id is None and not stop:
        raise ValueError(
            f"{policy!r}: the tokenizer has no EOS token, so no completion would end before "
            "--sampling_max_tokens; set eos_token in its tokenizer_config.json, or give --stop"
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"{policy!r}: the tokenizer has neither a pad nor an EOS token; set pad_token in its tokenizer_config.json"
        )
