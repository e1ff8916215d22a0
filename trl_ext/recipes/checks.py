"""What a recipe loads and refuses before its model loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer
from trl import ModelConfig

from trl_ext.data.lengths import Room, context_of, rows_that_fit
from trl_ext.data.references import Checker, check_references, first_rank
from trl_ext.data.source import Source
from trl_ext.hub.push import check
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.model_settings import check_model_settings
from trl_ext.recipes.preflight import check_dashboards, check_model_folder, check_server

if TYPE_CHECKING:
    from trl_ext.recipes.run import Task

Data = dict[str, Any]  # rows by what they are for: train, validation


@dataclass(frozen=True)
class Checked:
    """Data that can be trained and measured on, and the folder or name of the policy to begin with."""

    data: Data
    policy: str
    seconds_to_make_policy: float


def load_and_check(task: Task, model: ModelConfig, config: Any, say: Callable[[str], None]) -> Checked:
    """The data and the policy's place, after everything that can be checked without a model.

    Raises:
        ValueError: with what does not fit and the settings to change.
        OSError: there is no such model.
    """
    _refuse_settings_that_cannot_work(task, model, config)
    if config.push_to_hub and not config.process_index:
        check(config.hub_model_id)
    check_dashboards(config.report_to)
    if model.model_name_or_path:
        check_model_folder(model.model_name_or_path)
    if config.use_vllm and config.vllm_mode == "server":
        say("waiting for the vLLM server")
        check_server(config)
    data = task.data(config, say)
    first_rank(lambda: check_answers(data, task, config))
    began = time.monotonic()
    policy = model.model_name_or_path or _base_policy(config)
    seconds = time.monotonic() - began
    data = rows_in_context(data, task, policy, model, config)
    note_overlap(data, task.sources)
    task.check(data, config, say)
    return Checked(data, policy, seconds)


def _refuse_settings_that_cannot_work(task: Task, model: ModelConfig, config: Any) -> None:
    check_model_settings(model, config.use_vllm)
    if task.restore_best and config.save_strategy == "no":
        raise ValueError("restore_best goes back to a checkpoint, and save_strategy is no: leave one of them out")
    if config.n_gpu > 1:
        raise ValueError(
            f"{config.n_gpu} GPUs are visible to a single process: start it with accelerate launch --config_file "
            "accelerate_configs/two_gpus_zero2.yaml, or give it one with CUDA_VISIBLE_DEVICES=0"
        )


def _base_policy(config: Any) -> str:
    with config.main_process_first(desc="making the base policy"):
        return str(make_base_policy(seed=config.seed))


def rows_in_context(data: Data, task: Task, policy: str, model: ModelConfig, config: Any) -> Data:
    """The rows whose prompts leave room for the longest response; a tokenizer that is not the model's is refused.

    Raises:
        ValueError: with what does not fit and the settings to change.
        OSError: there is no such model.
    """
    known = {"revision": model.model_revision, "trust_remote_code": config.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(policy, **known)
    shape = AutoConfig.from_pretrained(policy, **known)
    check_tokenizer(tokenizer, shape, policy, config.stop)
    context, setting = context_of(shape, config.use_vllm, config.vllm_max_model_length)
    if context is None:
        return data
    response = (config.max_completion_length, "sampling_max_tokens")
    measured = (task.validation_max_tokens, "validation_max_tokens") if task.validation_max_tokens else response
    rooms = {"train": Room(context, setting, *response), "validation": Room(context, setting, *measured)}
    return data | {
        role: rows_that_fit(data[role], role, source, tokenizer, rooms[role], task.too_long)
        for role, source in task.sources.items()
    }


def check_answers(data: Data, task: Task, config: Any) -> None:
    """Grade every reference answer against itself.

    Raises:
        ValueError: most of a split's cannot be matched.
    """
    assert task.answer_format is not None
    for role, grader in task.graders().items():
        checker = Checker(grader, task.answer_format, task.answer_source)
        check_references(data[role], role, task.sources[role], checker, quiet=config.disable_tqdm)


def note_overlap(data: Data, sources: Mapping[str, Source]) -> None:
    """Count the validation problems that are trained on too, such as those that a public dataset has twice."""
    trained_on = {row["prompt"] for row in data["train"]}
    sources["validation"].also_in_training = sum(prompt in trained_on for prompt in data["validation"]["prompt"])


def check_tokenizer(tokenizer: Any, shape: Any, policy: str, stop: Sequence[str] | None) -> None:
    """Refuse what would index outside the embeddings, or never end a completion.

    Raises:
        ValueError: with the numbers and what to do.
    """
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= shape.get_text_config().vocab_size:
        raise ValueError(
            f"{policy!r}: the tokenizer has a token number {largest} and the model's vocabulary ends at "
            f"{shape.get_text_config().vocab_size - 1}; they do not belong together"
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
