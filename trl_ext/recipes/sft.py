"""The settings of `recipes/sft_math.py`, and the traces that they choose."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from datasets import Dataset
from trl import ModelConfig

from trl_ext.data.traces import first_unique, load_traces, only_correct, prompt_key, with_answers
from trl_ext.errors import InputError, brief_in_notebooks
from trl_ext.generation.adapter_models import load_tokenizer
from trl_ext.generation.model_source import locate
from trl_ext.imitation.sft import ExtSFTConfig, tokenized
from trl_ext.recipes.settings import Data, TaskSettings
from trl_ext.setting import Group, setting

log = logging.getLogger(__name__)


@brief_in_notebooks
@dataclass
class SFTTask(TaskSettings):
    """Traces to fine-tune on, and problems that the policy is measured on."""

    traces: str = setting(
        "mini_math",
        (
            "The traces come from mini_math, gsm8k, a Hub id, or a file (.jsonl, .json, .csv, .parquet; "
            "{split} in its path). Solutions as GSM8K and MATH have them are put into --prompt and the answer format."
        ),
        Group.TRACES,
    )
    traces_split: str = setting("train", "The split of the traces.", Group.TRACES)
    traces_config: str | None = setting(None, "The configuration of a Hub dataset of traces.", Group.TRACES)
    trace_prompt: str = setting("prompt", "The column that holds the prompt as the model reads it.", Group.TRACES)
    trace_response: str = setting("response", "The column that holds the response to learn.", Group.TRACES)
    trace_answer: str = setting(
        "answer",
        (
            "The column that holds the reference answer, for --filter_correct. Without one, the "
            "answer is that of the problem with the same prompt in --dataset."
        ),
        Group.TRACES,
    )
    num_unique_examples: str = setting(
        "full", "Fine-tune on this many of the traces, such as 128, or on all of them: full.", Group.TRACES
    )
    filter_correct: bool = setting(False, "Keep only traces whose answer the validation grader accepts.", Group.TRACES)

    def __post_init__(self) -> None:
        super().__post_init__()
        number = self.num_unique_examples
        if number != "full" and not (number.isdecimal() and int(number) > 0):
            raise ValueError(f"num_unique_examples must be a positive number or full, got {number!r}")

    def data(self, seed: int) -> Data:
        """`train`: the traces chosen, with how many there were; `validation`: problems."""
        traces = load_traces(
            self.traces,
            self.traces_split,
            prompt_column=self.trace_prompt,
            response_column=self.trace_response,
            answer_column=self.trace_answer,
            dataset_config=self.traces_config,
            n=self.train_problems,
            seed=seed,
            sample_seed=self.sample_seed,
            asking=self.asking,
            answer_format=str(self.answer_format),
        )
        counts = {"unique": len(traces)}
        if self.filter_correct:
            if any("answer" not in row for row in traces):
                problems = self.read(self.train_split, None, seed).rows
                answers = dict(zip(map(prompt_key, problems["prompt"]), problems["answer"], strict=True))
                traces = with_answers(traces, answers, f"{self.dataset!r}, split {self.train_split!r}")
            traces = only_correct(traces, self.grader())
            counts["correct"] = len(traces)
        traces = first_unique(traces, self.num_unique_examples, seed)
        counts["chosen"] = len(traces)
        if not traces:
            raise ValueError(f"{self.traces!r}: no trace is left to fine-tune on ({counts})")
        held_out = self.held_out(seed)
        return Data(traces, held_out.rows, {"validation": held_out.source}, counts)

    @property
    def trains_on(self) -> tuple[str, str]:
        """The traces and their split."""
        return self.traces, self.traces_split


def tokenized_traces(data: Data, model: ModelConfig, config: ExtSFTConfig) -> Dataset:
    """The traces' tokens; those longer than `max_length` are left out, and their number is put into `data.counts`."""
    source = locate(str(model.model_name_or_path), model.model_revision)
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    tokenizer.eos_token = config.eos_token or tokenizer.eos_token
    rows, too_long = tokenized(data.train, tokenizer, config.max_length)
    data.counts["too_long"] = too_long
    if too_long:
        longest = f"{too_long} of {too_long + len(rows)} traces are longer than max_length ({config.max_length})"
        if not rows:
            raise InputError(f"{longest}; raise --max_length")
        log.warning("%s and left out: half a trace has no answer", longest)
    return Dataset.from_list(rows)


SFT_SETTINGS = (SFTTask, ModelConfig, ExtSFTConfig)
