"""Are an evaluation's problems among what the model's run was trained on? Word for word, or by 13 words in a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data.dataset import DatasetSettings
from trl_ext.data.traces import load_traces
from trl_ext.generation.conversation import is_conversation
from trl_ext.generation.prompts import Asking
from trl_ext.io import read_json
from trl_ext.runs.layout import RESOLVED

N = 13  # words, as Brown et al. looked for (arXiv:2005.14165, appendix C)
_WORD = re.compile(r"\w+")
_OF_A_DATASET = (
    "dataset", "dataset_config", "dataset_options", "problem_column", "answer_column", "answer_source", "sample_seed",
    "benchmark_dir",
)  # fmt: skip

Words = tuple[str, ...]


def words_of(text: str) -> Words:
    """A text's words and numbers, in lower case, without punctuation and LaTeX's signs."""
    return tuple(_WORD.findall(text.lower()))


def overlaps(problems: Sequence[str], trained_on: Iterable[str]) -> dict[int, str]:
    """By their places, the problems that the other texts hold: `word for word`, or `13 words in a row`.

    Texts are compared as `words_of` them, so that white space, case and punctuation do not matter. What is kept in
    memory is the problems', which are few, and not what was trained on.
    """
    asked = list(map(words_of, problems))
    places: dict[Words, list[int]] = {}
    for place, words in enumerate(asked):
        for part in {words, *_ngrams(words)}:
            places.setdefault(part, []).append(place)
    found: dict[int, str] = {}
    for words in map(words_of, trained_on):
        for part in {words, *_ngrams(words)}:
            for place in places.get(part, ()):
                if asked[place] == words:
                    found[place] = "word for word"
                elif len(part) == N:
                    found.setdefault(place, f"{N} words in a row")
    return dict(sorted(found.items()))


def _ngrams(words: Words) -> Iterable[Words]:
    return (words[i : i + N] for i in range(len(words) - N + 1))


def contamination(model: str | None, problems: Sequence[str]) -> dict[str, Any] | None:
    """What of the problems the run that left a model, and the runs before it, trained on.

    Returns:
        `checked` says with which data, or why not; `problems` has the places of the problems and how they overlap.
        None of a model that no run of ours has left.
    """
    checked: list[str] = []
    found: dict[int, str] = {}
    for folder, settings in _runs_behind(model):
        try:
            texts = _trained_on(settings)
            named = settings.get("traces") or settings["dataset"]
            checked.append(f"{folder.name}: {len(texts)} problems of {named!r}")
            found = {**overlaps(problems, texts), **found}
        except Exception as error:  # whatever a dataset's reader raises: other ranks wait, and no figure depends on it
            checked.append(f"{folder.name}: its training data cannot be read ({' '.join(str(error).split())})")
    return (
        {"checked": checked, "problems": {str(place): how for place, how in sorted(found.items())}} if checked else None
    )


def contamination_line(found: Mapping[str, Any], problems: int) -> str:
    """The same for a person."""
    kinds = list(found["problems"].values())
    counts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    listed = f" ({', '.join(counts)}; the summary lists them)" if kinds else ""
    seen = f"contamination: {len(kinds)} of {problems} problems are in the model's training data{listed}"
    return f"{seen}. Looked at: {'; '.join(found['checked'])}"


def _runs_behind(model: str | None) -> Iterable[tuple[Path, dict[str, Any]]]:
    """The folders and settings of the run that left a model, of the run that left its first model, and so on."""
    seen: set[str] = set()
    while model and model not in seen:
        seen.add(model)
        folder = next((place for place in (Path(model), Path(model).parent) if (place / RESOLVED).is_file()), None)
        if folder is None:
            return
        try:
            settings = read_json(folder / RESOLVED)
        except ValueError:  # cut off
            return
        yield folder, settings
        model = settings.get("model_name_or_path")


def _trained_on(settings: Mapping[str, Any]) -> list[str]:
    """The problems that a run trained on, or the prompts of its traces."""
    seed = int(settings.get("seed") or 0)
    if traces := settings.get("traces"):
        config = settings.get("traces_config")
        asking = Asking.named("question_only")
        rows = load_traces(traces, settings["traces_split"], dataset_config=config, seed=seed, asking=asking)
        return [_text(row["prompt"]) for row in rows]
    known = {name: settings[name] for name in _OF_A_DATASET if settings.get(name) is not None}
    data = DatasetSettings(prompt="question_only", **known)
    rows = data.read(settings["train_split"], settings.get("train_problems"), seed).rows
    return list(rows["problem"])


def _text(prompt: Any) -> str:
    """A trace's prompt without the r1_zero template, in which some traces are written."""
    text = "\n".join(message["content"] for message in prompt) if is_conversation(prompt) else str(prompt)
    before, after = str(Asking.named("r1_zero").prompt("\0")).split("\0")
    return text.removeprefix(before).removesuffix(after)
