"""A run's files -> the README that the Hub shows: what was trained, how, how well, and how to do it again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined

from trl_ext.generation.gguf import origin_of
from trl_ext.generation.model_source import ADAPTER, locate
from trl_ext.io import fence_of, read_json, read_jsonl, read_yaml, write_text
from trl_ext.runs.layout import CONFIG, CURVE, GENERATIONS, SUMMARY, RunFolder
from trl_ext.runs.provenance import devices_of, versions_of
from trl_ext.runs.recipes import RECIPES
from trl_ext.runs.summary import RunSummary
from trl_ext.runs.tables_and_plots import selection_note

_SAMPLES = 3
_TEMPLATE = Path(__file__).with_name("card.md")


def write_model_card(run: Path, repo_id: str | None = None) -> ModelCard:
    """Write `README.md` into a finished run's folder, from what the run has left there, and return the card."""
    summary = RunFolder(run).summary()
    settings = read_yaml(run / CONFIG) or {}
    environment = Environment(trim_blocks=True, undefined=StrictUndefined)
    environment.filters |= {f.__name__: f for f in (code, fenced, json.dumps, without_markup, without_paths)}
    known = _values(run, repo_id, summary, settings)
    started_from = {**settings, "model_name_or_path": known["base"]}
    data = card_data(known["name"], summary, started_from, known["library"])
    story = environment.from_string(known["recipe"].story).render(known)
    body = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(known, story=story)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")
    write_text(run / "README.md", str(card))
    return card


def card_data(name: str, summary: RunSummary, settings: Mapping[str, Any], library: str) -> ModelCardData:
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
        library_name=library,
        pipeline_tag="text-generation",
        base_model=base if is_hub_id(base) else None,
        datasets=[dataset] if is_hub_id(dataset) else None,
        tags=["trl", *RECIPES[summary.get("recipe", "grpo")].tags, "math", "trl_ext"],
        eval_results=[result],
    )


def is_hub_id(name: object) -> TypeGuard[str]:
    """Whether this may name a repository of the Hub, and is no path of this machine."""
    looks_like_one = isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith(".gguf")
    return bool(looks_like_one) and not Path(str(name)).exists()


def base_of(run: Path) -> str | None:
    """What the adapter in a folder is an adapter of; None for a whole model."""
    base = read_json(run / ADAPTER).get("base_model_name_or_path") if (run / ADAPTER).exists() else None
    return str(base) if base else None


def _values(run: Path, repo_id: str | None, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `card.md` and a recipe's story have a place for."""
    first, last = summary["validations"][0], summary["validations"][-1]
    generations, is_adapter = run / GENERATIONS, (run / ADAPTER).exists()
    base = base_of(run) or settings.get("model_name_or_path")
    return {
        "base": base,
        "name": (repo_id or run.name).rpartition("/")[2],
        "address": repo_id or run.name,
        "source": _source(base, summary.get("gguf")),
        "quantized": without_markup(lost_by_quantization(gguf)) if (gguf := summary.get("gguf")) else "",
        "recipe": RECIPES[summary.get("recipe", "grpo")],
        "summary": summary,
        "settings": settings,
        "dataset": code(settings.get("dataset", "mini_math")),
        "counts": summary.get("trace_counts", {}),
        "steps": summary.get("steps", []),
        "first": first,
        "last": last,
        "note": selection_note(last.get("selection"), last["problems"]),
        "devices": devices_of(summary),
        "has_curve": (run / CURVE).exists(),
        "library": "peft" if is_adapter else "transformers",
        "loader": "AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM",
        "samples": read_jsonl(generations)[-_SAMPLES:] if generations.exists() else [],
        "command": without_paths(summary["command"]),
        "versions": versions_of(summary),
        "shown_settings": yaml.safe_dump(without_paths(settings), allow_unicode=True).rstrip(),
    }


def gguf_origin(policy: str) -> dict[str, Any] | None:
    """What is known of the GGUF file that a policy, or the earlier run that it is of, began with; else None."""
    folder = Path(locate(policy).base)
    if origin := origin_of(folder):
        return {**origin, "of_base": True}
    summaries = (place / SUMMARY for place in (folder, folder.parent))
    earlier = next((read_json(file).get("gguf") for file in summaries if file.is_file()), None)
    return {**earlier, "of_base": False} if earlier else None


def lost_by_quantization(gguf: Mapping[str, Any]) -> str:
    """What a model that was read from a GGUF file is not, in sentences."""
    kinds = ", ".join(
        f"{kind} ({tensors} tensors, {elements / 1e6:.1f} million weights)"
        for kind, (tensors, elements) in gguf["elements"].items()
    )
    whose = "The base model" if gguf["of_base"] else "The base model of the earlier run"
    about = ", ".join(filter(None, (gguf["name"], gguf["license"] and f"license {gguf['license']}")))
    said = [f"{whose} was read from the GGUF file {gguf['file']} ({about or 'no name in it'}), which stores {kinds}."]
    if gguf["quantized"]:
        said.append(
            f"What {' and '.join(gguf['quantized'])} had rounded away, to {gguf['bits_per_weight']} bits per weight, "
            f"is lost: the weights were written out in {gguf['dtype']}, and scores are not those of the original "
            "checkpoint."
        )
    else:
        said.append(f"None of it is quantized; the weights were written out in {gguf['dtype']}.")
    if gguf["tied"]:
        said.append(
            "The file had one matrix quantized twice, as embedding and as output head: both are the finer of the two, "
            f"{gguf['tied']}."
        )
    said += [f"Not read from the file: {part}." for part in gguf["not_read"]]
    return " ".join(said)


def _source(base: str | None, gguf: Mapping[str, Any] | None = None) -> str:
    """What the model was made from, as a sentence begins."""
    if gguf and gguf["of_base"]:
        return f"The model of the GGUF file {code(gguf['file'])}"
    if is_hub_id(base):
        return code(base)
    is_ours = base is None or Path(base).name.startswith("base-policy-")
    return "A base policy that the recipe makes itself" if is_ours else "A model of an earlier run"


def code(value: object) -> str:
    """A span of code in a line, whatever the text has in it: backticks, markup, line ends."""
    text = one_line(value)
    fence = fence_of(text, 1)
    return f"{fence} {text} {fence}" if "`" in text or not text else f"{fence}{text}{fence}"


def without_markup(value: object) -> str:
    """A text in a line, of which nothing is Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>|#~&!])", r"\\\1", one_line(value))


def one_line(value: object) -> str:
    """A text without its line ends, which could end what it stands in."""
    return " ".join(str(value).split())


def fenced(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any in the text, which may be what a model wrote."""
    fence = fence_of(text)
    return f"{fence}{language}\n{text}\n{fence}"


def without_paths(value: object) -> Any:
    """Texts with absolute paths cut to their last part: they say nothing to anyone else."""
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", "", value) if isinstance(value, str) else value
