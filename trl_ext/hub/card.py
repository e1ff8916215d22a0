"""A run's files -> the README that the Hub shows: what was trained, how, how well, and how to do it again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import StrictUndefined, Template

from trl_ext.io import read_jsonl, read_yaml, write_text
from trl_ext.runs.layout import CONFIG, RunFolder
from trl_ext.runs.provenance import devices_of, versions_of
from trl_ext.runs.recipes import RECIPES
from trl_ext.runs.report import selection_note
from trl_ext.runs.summary import RunSummary

_AXES = ("advantage", "policy_loss", "aggregation", "kl_estimator")
_SAMPLES = 3
_TEMPLATE = Path(__file__).with_name("card.md")


def write_model_card(run: Path, repo_id: str | None = None) -> ModelCard:
    """Write `README.md` into a finished run's folder, from what the run has left there, and return the card."""
    summary = RunFolder(run).summary()
    settings = read_yaml(run / CONFIG) or {}
    name = (repo_id or run.name).rpartition("/")[2]
    data = card_data(name, summary, settings, is_adapter=(run / "adapter_config.json").exists())
    template = Template(_TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, undefined=StrictUndefined)
    body = template.render(_values(run, name, repo_id, summary, settings))
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")
    write_text(run / "README.md", str(card))
    return card


def card_data(name: str, summary: RunSummary, settings: Mapping[str, Any], is_adapter: bool) -> ModelCardData:
    """The card's metadata: base model, dataset, and the validation as the Hub's `model-index` has it."""
    base, dataset = settings.get("model_name_or_path"), settings.get("dataset", "mini_math")
    last = summary["validations"][-1]
    result = EvalResult(
        task_type="text-generation",
        task_name="Math word problems",
        dataset_type=one_line(dataset),
        dataset_name=one_line(dataset),
        dataset_config=one_line(settings["dataset_config"]) if settings.get("dataset_config") else None,
        dataset_split=one_line(settings.get("validation_split", "validation")),
        metric_type="accuracy",
        metric_name=f"accuracy, {last['problems']} problems, one sample each",
        metric_value=round(summary["validation_accuracy_after"], 4),
    )
    return ModelCardData(
        model_name=name,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base if is_hub_id(base) else None,
        datasets=[dataset] if is_hub_id(dataset) else None,
        tags=["trl", *RECIPES[summary.get("recipe", "grpo")].tags, "math", "trl_ext"],
        eval_results=[result],
    )


def is_hub_id(name: object) -> TypeGuard[str]:
    """Whether this may name a repository of the Hub, and is no path of this machine."""
    return isinstance(name, str) and bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def _values(run: Path, name: str, repo_id: str | None, summary: RunSummary, settings: Mapping[str, Any]) -> Any:
    """What `card.md` has a place for."""
    recipe = RECIPES[summary.get("recipe", "grpo")]
    first, last = summary["validations"][0], summary["validations"][-1]
    levels = {level: accuracy for level, accuracy in last["by_level"].items() if level not in ("", "0", "None")}
    return {
        "title": without_markup(name),
        "source": _source(settings.get("model_name_or_path")),
        "story": recipe.story.format_map(facts_of(summary, settings)),
        "recipe": recipe,
        "summary": summary,
        "first": first,
        "last": last,
        "prompt": code(settings.get("prompt", "r1_zero")),
        "grader": code(settings.get("validation_grader", "compatible")),
        "levels": [(without_markup(level), first["by_level"].get(level, 0.0), last) for level, last in levels.items()],
        "note": selection_note(last.get("selection"), last["problems"]),
        "devices": without_markup(devices_of(summary)),
        "has_curve": (run / "curve.png").exists(),
        "usage": _usage(repo_id or name, settings.get("stop"), (run / "adapter_config.json").exists()),
        "samples": "\n".join(_samples(run / "generations.jsonl")),
        "commit": code(summary["commit"]),
        "command": fenced(without_paths(summary["command"])),
        "versions": versions_of(summary),
        "settings": fenced(yaml.safe_dump(without_paths(settings), allow_unicode=True).rstrip(), "yaml"),
    }


def _source(base: str | None) -> str:
    """What the model was made from, as a sentence begins."""
    if is_hub_id(base):
        return code(base)
    is_ours = base is None or Path(base).name.startswith("base-policy-")
    return "A base policy that the recipe makes itself" if is_ours else "A model of an earlier run"


def facts_of(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe's story may tell, by the names that it has there; of another recipe, empty or 0."""
    counts, steps = summary.get("trace_counts", {}), summary.get("steps", [])
    axes = "; ".join(f"{axis} {code(settings[axis])}" for axis in _AXES if settings.get(axis))
    return {
        "dataset": code(settings.get("dataset", "mini_math")),
        "reward": code(settings.get("reward", "strict")),
        "preset": code(settings.get("preset")),
        "axes": axes or "TRL's own loss",
        "traces": code(without_paths(summary.get("traces"))),
        "traces_used": counts.get("chosen", 0) - counts.get("too_long", 0),
        "only_right": " with the correct answer" if summary.get("filter_correct") else "",
        "steps": len(steps),
        "kept": sum(step["kept"] for step in steps),
        "questions_per_step": summary.get("questions_per_step"),
        "group_size": summary.get("group_size"),
        "selection": code(summary.get("selection")),
    }


def _usage(name: str, stop: object, is_adapter: bool) -> str:
    loader = "AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM"
    package = "peft" if is_adapter else "transformers"
    lines = [
        f"from {package} import {loader}",
        "from transformers import AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})",
        f"model = {loader}.from_pretrained({json.dumps(name)})",
        "output = model.generate(**tokenizer(prompt, return_tensors='pt'), tokenizer=tokenizer)",
    ]
    note = f"The generation config stops at {code(stop)}, for which `generate` needs the tokenizer.\n\n" if stop else ""
    return note + fenced("\n".join(lines), "python")


def _samples(path: Path) -> list[str]:
    rows = read_jsonl(path) if path.exists() else []
    lines: list[str] = []
    for row in rows[-_SAMPLES:]:
        told = f"{row['prompt'][-600:]}{row['response'][:1200]}"
        head = f"Step {row['step']}, reference answer {code(row['ground_truth'])}, reward {row['reward']}:"
        lines += [head, "", fenced(told), ""]
    return lines or ["none were logged", ""]


def code(value: object) -> str:
    """A span of code in a line, whatever the text has in it: backticks, markup, line ends."""
    text = one_line(value)
    fence = _fence(text, 1)
    return f"{fence} {text} {fence}" if "`" in text or not text else f"{fence}{text}{fence}"


def without_markup(value: object) -> str:
    """A text in a line, of which nothing is Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>|#~&!])", r"\\\1", one_line(value))


def one_line(value: object) -> str:
    """A text without its line ends, which could end what it stands in."""
    return " ".join(str(value).split())


def fenced(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any in the text, which may be what a model wrote."""
    fence = _fence(text, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def _fence(text: str, shortest: int) -> str:
    return "`" * max([shortest, *(len(run) + 1 for run in re.findall("`+", text))])


def without_paths(value: object) -> Any:
    """Texts with absolute paths cut to their last part: they say nothing to anyone else."""
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", "", value) if isinstance(value, str) else value
