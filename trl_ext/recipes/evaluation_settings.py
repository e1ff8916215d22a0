"""`Evaluation`: the settings of recipes/evaluate.py, checked when they are made."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from trl_ext.compat.given import given, recorded_names
from trl_ext.data.dataset import DatasetSettings
from trl_ext.data.published import BENCHMARKS, names_of_benchmarks
from trl_ext.data.responses import OPTIONAL, fields_of
from trl_ext.errors import InputError
from trl_ext.evaluation.evaluator import HANDOUT_NAMES, OUTCOMES
from trl_ext.generation import determinism
from trl_ext.generation.completion import Sampling
from trl_ext.generation.engine_choice import choose_engine, dtype_to_sample_in
from trl_ext.generation.gguf import with_file
from trl_ext.generation.merging import check_mergeable
from trl_ext.generation.model_files import check_loadable
from trl_ext.generation.model_source import MERGE, ModelSource, locate
from trl_ext.generation.samplers import HFSampler, Sampler, VLLMSampler
from trl_ext.recipes.chat import needs_a_model, refuse_unused_options
from trl_ext.recipes.settings_help import THEIRS
from trl_ext.registry import parse_options
from trl_ext.rewards.graders import GRADERS
from trl_ext.setting import Group, OnResume, setting
from trl_ext.training.options import stop_strings
from trl_ext.training.trl_settings import check_needs, rules_of
from trl_ext.turns.responses import ToolUse
from trl_ext.turns.settings import ToolSettings, check_tools
from trl_ext.turns.tools import Toolbox

# What a benchmark's name says of the data.
SAID_BY_A_BENCHMARK = (
    "dataset", "dataset_config", "dataset_options", "problem_column", "answer_column", "answer_source", "split",
    "responses", "export",
)  # fmt: skip


@dataclass
class Evaluation(ToolSettings, DatasetSettings):
    """What is measured, and how it is sampled."""

    model_name_or_path: str | None = setting(
        None, THEIRS["model_name_or_path"].text, Group.MODEL, also_called="model_id"
    )
    chat_template_kwargs: dict[str, Any] | str | None = setting(
        None, "Variables of the model's chat template, such as enable_thinking=false.", Group.MODEL
    )
    benchmark: list[str] = setting(
        list,
        (
            f"Published benchmarks in place of a dataset, such as math500,aime24: {', '.join(BENCHMARKS)}. Each says "
            "its rows, and how its authors grade; the rest is asked as usual."
        ),
        Group.MODEL,
    )
    split: str = setting("validation", "The split to evaluate on.", Group.MODEL, aliases="--validation_split")
    problems: int | None = setting(
        None, "Evaluate on a sample of this many problems. The default is all.", Group.MODEL, within="[1, inf)"
    )
    samples: int = setting(1, "The number of responses per problem.", Group.SAMPLING, within="[1, inf)")
    grader: str = setting(
        "compatible",
        f"The grader of the responses. One of: {', '.join(sorted(GRADERS))}, or file.py:function.",
        Group.REWARD,
    )
    temperature: float = setting(
        1.0, "The sampling temperature; 0 means greedy decoding.", Group.SAMPLING, within="[0, inf)"
    )
    top_p: float = setting(1.0, "The probability mass of nucleus sampling.", Group.SAMPLING, within="(0, 1]")
    max_tokens: int = setting(1024, "The maximum response length in tokens.", Group.SAMPLING, within="[1, inf)")
    min_tokens: int = setting(0, "The minimum response length in tokens.", Group.SAMPLING, within="[0, inf)")
    stop: list[str] = setting(
        lambda: ["</answer>"], "Generation stops at any of these strings, which stay in the text.", Group.SAMPLING
    )
    use_vllm: str = setting(
        "auto",
        (
            "Generate with vLLM: auto, true or false. auto uses it where there are a GPU and vLLM, and on a CPU where "
            "its build for CPUs is installed and the model is large enough; HF generate otherwise."
        ),
        Group.SAMPLING,
    )
    batch_size: int = setting(
        256,
        "Sample, grade and write this many responses at a time; vLLM is fastest with 4096.",
        Group.SAMPLING,
        within="[1, inf)",
    )
    dtype: str = setting("auto", "The dtype of the weights: auto, bfloat16, float16 or float32.", Group.MODEL)
    vllm_gpu_memory_utilization: float = setting(
        0.9,
        THEIRS["vllm_gpu_memory_utilization"].text,
        Group.SAMPLING,
        on_resume=OnResume.MAY_CHANGE,
        also_called="gpu_memory_utilization",
    )
    vllm_max_model_length: int | None = setting(None, THEIRS["vllm_max_model_length"].text, Group.SAMPLING)
    vllm_enforce_eager: bool | None = setting(
        None,
        (
            "Disable compilation and CUDA graphs: slower sampling, faster start-up. The default is false on a GPU, "
            "true on a CPU."
        ),
        Group.SAMPLING,
        on_resume=OnResume.MAY_CHANGE,
    )
    deterministic: bool = setting(
        False,
        (
            "Compute so that two evaluations are bit-identical: torch's deterministic algorithms and, on GPUs, "
            "vLLM's kernels that do not depend on the batch. What is not covered is refused."
        ),
        Group.SAMPLING,
        rare=True,
    )
    seed: int = setting(0, "The seed of the samples, of mini-MATH and of the base policy.", Group.OPTIMIZER)
    ddp_timeout: int = setting(
        1800,
        "Seconds after which a rank gives up waiting for the others.",
        Group.LIMITS,
        on_resume=OnResume.MAY_CHANGE,
        within="[1, inf)",
    )
    responses: str | None = setting(
        None,
        (
            "Grade the responses of this JSONL file, which someone else drew: a line has prompt, response and truth. "
            "No model is loaded."
        ),
        Group.OTHERS,
    )
    response_fields: list[str] = setting(
        list,
        (
            "What that file calls its fields, such as prompt=question response=resps.0.0 truth=target; dots go into "
            f"objects and lists. Optional: {', '.join(OPTIONAL)}; verdict is someone else's, to compare with."
        ),
        Group.OTHERS,
    )
    response_stop: str = setting(
        "",
        (
            "What another harness took away from the responses' ends, such as </answer>: put back where it is missing "
            "and the response is not known to be cut off."
        ),
        Group.OTHERS,
    )
    export: str | None = setting(
        None,
        "Write this evaluation as tasks for lm-eval, lighteval and inspect into this new folder, and end.",
        Group.OTHERS,
        on_resume=OnResume.MAY_CHANGE,
    )
    show: int = setting(
        0, "Print this many examples at the end.", Group.OUTPUT, on_resume=OnResume.MAY_CHANGE, within="[0, inf)"
    )
    category: str | None = setting(
        None,
        f"Print only examples of one category: {', '.join((*OUTCOMES, *HANDOUT_NAMES))}.",
        Group.OUTPUT,
        on_resume=OnResume.MAY_CHANGE,
    )
    output_dir: str = setting(
        "",
        "The folder of the results. The default is runs/ and the name of the YAML file.",
        Group.OUTPUT,
        on_resume=OnResume.MAY_CHANGE,
    )

    def __post_init__(self) -> None:
        asks_by_chat = bool(self.chat_template_kwargs or self.system_prompt)
        if self.benchmark and asks_by_chat and "prompt" not in recorded_names(self):
            self.prompt = "chat"  # as benchmarks are asked where there is a template
        super().__post_init__()
        self.benchmark = names_of_benchmarks(self.benchmark)
        if self.benchmark and (said := given(self, SAID_BY_A_BENCHMARK, off=False)):
            name = next(iter(said))
            raise ValueError(f"{name} is what --benchmark {','.join(self.benchmark)} says: leave one of them out")
        self.model_name_or_path = with_file(self.model_name_or_path, self.gguf_file)
        self.build(GRADERS, self.grader)
        usual = self.benchmark and not given(self, ["grader"])
        self.check_grading("strict" if usual else self.grader)
        self.chat_template_kwargs = parse_options("chat_template_kwargs", self.chat_template_kwargs)
        if not self.asking.is_chat:
            refuse_unused_options(self.chat_template_kwargs, self.prompt)
        elif not (self.model_name_or_path or self.responses):
            raise needs_a_model(self.prompt)
        choose_engine(self.use_vllm)  # refuses what it cannot be
        self.stop = stop_strings(self.stop)
        self.sampling()
        self._check_tools()
        if self.deterministic:
            self._check_determinism()
        fields_of(self.response_fields)
        if (self.response_fields or self.response_stop) and not self.responses:
            raise ValueError(
                "response_fields and response_stop say how the responses are: give --responses FILE as well"
            )
        if self.responses and self.export:
            raise ValueError("responses are graded here and have no task to export: give one of responses and export")
        if self.export and self.judge:
            raise ValueError("export: other harnesses have no judge: give one of export and judge")
        self.category = HANDOUT_NAMES.get(self.category or "", self.category)
        if self.category is not None and self.category not in OUTCOMES:
            raise ValueError(f"unknown category {self.category!r}. Known: {', '.join((*OUTCOMES, *HANDOUT_NAMES))}")

    def _check_tools(self) -> None:
        check_needs(self, rules_of(ToolSettings))
        check_tools(self)
        if not self.tools:
            return
        for name in ("responses", "export", "min_tokens"):
            if getattr(self, name):
                raise ValueError(f"tools with {name}: no tool would be called as it says; leave one of them out")
        Toolbox.of(self.tools, self.tool_timeout).close()  # refuses what cannot be called, or not be isolated

    def _check_determinism(self) -> None:
        if self.responses or self.export:
            raise ValueError("deterministic is of what is sampled here: leave it out with responses and export")
        engine, device = self.engine_and_device
        determinism.prepare_process(engine, determinism.check_covered(engine, device, self.dtype))

    @property
    def engine_and_device(self) -> tuple[str, str]:
        """What samples and where, as the table of `determinism` has them."""
        return determinism.EVALUATION if self.engine()[0] else determinism.HF, determinism.device_of(use_cpu=False)

    @property
    def covered(self) -> determinism.Row | None:
        """What `deterministic` covers here; None without it."""
        return determinism.row_of(*self.engine_and_device) if self.deterministic else None

    def sampling(self) -> Sampling:
        """How responses are drawn."""
        stop = tuple(self.stop)
        return Sampling(self.temperature, self.top_p, self.max_tokens, self.min_tokens, stop, self.seed)

    def check_model(self, source: ModelSource) -> None:
        """Refuse, by an `InputError`, files that are no model, and an adapter that these settings cannot use."""
        if source.adapter and self.export:
            merge = f"{MERGE} {source.name} {source.name}-merged makes a whole model"
            raise InputError(f"export: every harness loads adapters in another way, and {source.name} is one: {merge}")
        with_vllm = self.engine()[0]
        check_loadable(source, with_hf=not with_vllm or source.adapter is not None)
        if with_vllm:
            check_mergeable(source)

    def engine(self) -> tuple[bool, str]:
        """Whether vLLM samples, and why."""
        return choose_engine(self.use_vllm, self.model_name_or_path)

    def sampler(self, model: str, context: int | None = None) -> Sampler:
        """The engine, loaded; with vLLM for `context` tokens, unless `vllm_max_model_length` says how many."""
        dtype = dtype_to_sample_in(self.dtype, locate(model).dtype)
        turns = functools.partial(ToolUse.of, self) if self.tools else None
        if self.deterministic:
            determinism.enable_full_determinism(self.seed)
        row = self.covered
        if not self.engine()[0]:
            return HFSampler(model, self.sampling(), self.batch_size, dtype, turns)
        return VLLMSampler(
            model,
            self.sampling(),
            turns,
            max_model_len=context if self.vllm_max_model_length is None else self.vllm_max_model_length,
            gpu_memory_utilization=self.vllm_gpu_memory_utilization,
            enforce_eager=self.vllm_enforce_eager,
            **({"dtype": dtype} if row is None else determinism.engine_arguments(row, None)),
        )
