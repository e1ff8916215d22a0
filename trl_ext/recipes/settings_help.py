"""`--help` for people: our settings and the few of TRL's that are often changed; the reference is the same text.

Imports neither torch nor TRL. What `--help` alone prints is kept in `recipes/help/`, which `python
scripts/docs_pages.py` writes, so that it is there at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from trl_ext.registry import defaults_of

_WIDTH, _NAMES = 120, 36  # characters of a line, and of the column with the names
GROUPS = {
    "Model, problems and prompts": "model_name_or_path gguf_file base_policy_seed dtype use_peft "
    "dataset dataset_config dataset_options train_split validation_split split problem_column "
    "answer_column answer_source prompt system_prompt chat_template_kwargs answer_format "
    "train_problems problems pass_rates_from sample_seed too_long",
    "Traces": "traces traces_split traces_config trace_prompt trace_response trace_answer num_unique_examples "
    "filter_correct",
    "Algorithm": "preset advantage policy_loss aggregation kl_estimator advantage_options policy_loss_options "
    "aggregation_options kl_estimator_options sampler_weight sampler_rejection rollout_selection_options "
    "sampler_weight_options sampler_rejection_options vllm_importance_sampling_mode beta cliprange "
    "use_std_normalization advantage_eps "
    "rollout_selection uninformative_keep_prob dynamic_sampling_tries overlong_buffer "
    "selection selection_options "
    "normalize_constant completion_only_loss",
    "Reward and grading": "reward reward_timeout grader numeric_tolerance worked_out",
    "Steps, batches and the optimizer": "max_steps n_grpo_steps n_ei_steps questions_per_step rollout_batch_size "
    "group_size train_batch_size micro_train_batch_size epochs_per_rollout_batch epochs_per_step rollout_chunk "
    "learning_rate lr_scheduler_type lr_decay_fraction bf16 gradient_checkpointing seed",
    "Sampling and its engine": "sampling_temperature sampling_max_tokens sampling_min_tokens stop samples at "
    "first_from temperature top_p max_tokens min_tokens batch_size "
    "use_vllm vllm_gpu_memory_utilization vllm_max_model_length vllm_max_num_seqs "
    "vllm_dtype vllm_quantization vllm_enable_prefix_caching vllm_enforce_eager vllm_enable_sleep_mode vllm_mode "
    "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port",
    "Computation that a step saves": "skip_zero_advantage_rows dynamic_micro_batches micro_batch_tokens "
    "share_prompt_prefix reuse_log_probs",
    "Validation": "validate_every validation_problems final_validation_problems validation_grader "
    "validation_samples validation_temperature validation_max_tokens validation_batch_size restore_best",
    "Limits and early stopping": "time_budget target_accuracy collapse_threshold stop_after_zero_variance_steps "
    "max_nonfinite_steps ddp_timeout check_memory",
    "Responses of others, harnesses of others": "responses response_fields response_stop export",
    "Output, checkpoints and the Hub": "output_dir resume resume_changed save_steps "
    "log_generations_every show category report_to push_to_hub hub_merge_adapter",
}
# Those of TRL's that are shown, in a line each.
COMMON = {
    "model_name_or_path": "A folder, a GGUF file, smollm2 or a Hub id. The default is a policy built locally.",
    "gguf_file": "The GGUF file of the model's folder, where it has several.",
    "use_peft": "Train a LoRA adapter instead of all weights.",
    "beta": "The coefficient of the KL penalty; 0 loads no reference model.",
    "max_steps": "The number of optimizer steps.",
    "learning_rate": "The peak learning rate.",
    "lr_scheduler_type": "The learning rate schedule, such as constant, linear or cosine.",
    "gradient_checkpointing": "Recompute activations in the backward pass: slower, less memory.",
    "seed": "The seed of everything that is random.",
    "vllm_gpu_memory_utilization": "The fraction of GPU memory that vLLM takes.",
    "vllm_max_model_length": "The maximum length of prompt and response together, in tokens. The default is what the "
    "longest prompt and response of the rows need.",
    "output_dir": "The run's folder. The default is runs/ and the name of the YAML file.",
    "save_steps": "Save a checkpoint every N optimizer steps.",
    "report_to": "Dashboards, separated by commas: tensorboard, wandb, trackio.",
    "push_to_hub": "Push the model, its card and its figures at the end; needs hub_model_id.",
}


@dataclass(frozen=True)
class Setting:
    """A setting of a recipe."""

    name: str
    default: str  # as the recipe's own YAML file or the field has it; empty for none
    text: str  # what it does
    group: str | None  # of `GROUPS`; None where `--help` alone does not show it
    is_ours: bool  # not TRL's

    def flag(self) -> str:
        """As a command line has it, with the default in brackets."""
        return f"--{self.name}" + (f" [{self.default}]" if self.default else "")

    def first_sentence(self) -> str:
        """What a line has room for; with the choices, where there are some."""
        head, stop, rest = self.text.partition(". ")
        return self.text if rest.startswith("One of") or not stop else head + "."


def settings_in(classes: Iterable[type], defaults: Mapping[str, object]) -> list[Setting]:
    """Every setting of a recipe's dataclasses, with the defaults of its YAML file."""
    groups = {name: group for group, names in GROUPS.items() for name in names.split()}
    found = []
    for kind in classes:
        usual = {**defaults_of(kind), **defaults}
        for f in dataclasses.fields(kind):
            if not f.init:
                continue
            # The class that defines the field, the last one if several do.
            owner = next(base for base in kind.__mro__ if f.name in inspect.get_annotations(base))
            is_ours = owner.__module__.startswith("trl_ext.")
            text = str(f.metadata.get("help", "")).replace("%%", "%")
            text = text if is_ours else COMMON.get(f.name, text)
            group = groups.get(f.name) if is_ours or f.name in COMMON else None
            found.append(Setting(f.name, _shown(usual[f.name]), text, group, is_ours))
    return found


def short_help(settings: Sequence[Setting]) -> str:
    """Two screens: a line or two per setting that is shown, under the group's name."""
    lines, by_name = [], {setting.name: setting for setting in settings if setting.group is not None}
    for group, names in GROUPS.items():
        members = [by_name[name] for name in names.split() if name in by_name]
        lines += [f"{group}:"] if members else []
        for text, same in groupby(members, key=Setting.first_sentence):
            flags = "  " + ", ".join(s.flag() for s in same)
            in_line = len(flags) < _NAMES + 20 or len(flags) + len(text) < _WIDTH
            begin = f"{flags} ".ljust(_NAMES) if in_line else " " * _NAMES
            lines += [flags] if not begin.strip() else []
            lines += textwrap.wrap(text, _WIDTH, initial_indent=begin, subsequent_indent=" " * _NAMES)
    return "\n".join(lines)


def help_on(topic: str, settings: Sequence[Setting]) -> str:
    """All that is known of the settings with `topic` in their names; of one with that very name, of it alone."""
    asked = topic.lstrip("-").replace("-", "_")
    names = [setting.name for setting in settings]
    chosen = [s for s in settings if s.name == asked] or [s for s in settings if asked in s.name]
    if not chosen:
        nearest = difflib.get_close_matches(asked, names, n=3)
        hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
        return f"no setting has {asked!r} in its name.{hint} --help all lists every one"
    lines = []
    for setting in chosen:
        lines.append(setting.flag())
        lines += textwrap.wrap(setting.text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def page_of(doc: str | None, script: str, settings: Sequence[Setting]) -> str:
    """What `--help` prints."""
    return (
        f"usage: {script} [--config FILE] [--NAME VALUE ...]\n{(doc or '').strip()}\n"
        "--config FILE reads these from YAML. In brackets: what holds unless set. --help NAME: one; --help all: all."
        f"\n\n{short_help(settings)}"
    )


def topic_of(arguments: Sequence[str]) -> str | None:
    """What help is asked for: a name, `all`, or empty for `--help` alone; None where none is."""
    for place, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag in ("-h", "--help"):
            after = arguments[place + 1] if place + 1 < len(arguments) else ""
            return value or ("" if after.startswith("--") else after)
    return None


def answer_help(script: str) -> None:
    """Answer a plain `--help` from the text that is kept for a script, and end the process; else do nothing."""
    kept = kept_help(Path(script))
    if sys.argv[1:] in (["-h"], ["--help"]) and kept.is_file():
        print(kept.read_text(encoding="utf-8"), end="")
        sys.exit(0)


def kept_help(script: Path) -> Path:
    """Where the text of a script's `--help` is kept."""
    return script.parent / "help" / f"{script.stem}.txt"


def _shown(default: object) -> str:
    if default is None or default is dataclasses.MISSING or default == "" or default == []:
        return ""
    default = getattr(default, "value", default)
    if isinstance(default, bool):
        return str(default).lower()
    return " ".join(str(part) for part in default) if isinstance(default, (list, tuple)) else str(default)
