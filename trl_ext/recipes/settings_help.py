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
from pathlib import Path

from trl_ext.compat.startup import silence_misleading_messages
from trl_ext.registry import defaults_of
from trl_ext.setting import Group, facts, facts_of

_WIDTH, _NAMES = 120, 36  # characters of a line, and of the column with the names


@dataclass(frozen=True)
class Theirs:
    """What is said of a setting of TRL's or transformers'."""

    group: Group | None  # in which it is shown; None where `--help` alone does not
    text: str = ""  # in place of theirs
    also_called: str = ""  # by the course's handout; words separated by spaces


THEIRS = {
    "model_name_or_path": Theirs(
        Group.MODEL, "A folder, a GGUF file, smollm2 or a Hub id. The default is a policy built locally.", "model_id"
    ),
    "use_peft": Theirs(Group.MODEL, "Train a LoRA adapter instead of all weights."),
    "beta": Theirs(Group.ALGORITHM, "The coefficient of the KL penalty; 0 loads no reference model."),
    "max_steps": Theirs(Group.OPTIMIZER, "The number of optimizer steps.", "n_train_steps n_sft_steps"),
    "learning_rate": Theirs(Group.OPTIMIZER, "The peak learning rate.", "lr"),
    "lr_scheduler_type": Theirs(Group.OPTIMIZER, "The learning rate schedule, such as constant, linear or cosine."),
    "gradient_checkpointing": Theirs(
        Group.OPTIMIZER, "Recompute activations in the backward pass: slower, less memory."
    ),
    "adam_beta1": Theirs(None, also_called="betas"),
    "seed": Theirs(Group.OPTIMIZER, "The seed of everything that is random."),
    "vllm_gpu_memory_utilization": Theirs(
        Group.SAMPLING, "The fraction of GPU memory that vLLM takes.", "gpu_memory_utilization"
    ),
    "vllm_max_model_length": Theirs(
        Group.SAMPLING,
        "The maximum length of prompt and response together, in tokens. The default is what the longest prompt and "
        "response of the rows need.",
    ),
    "output_dir": Theirs(Group.OUTPUT, "The run's folder. The default is runs/ and the name of the YAML file."),
    "save_steps": Theirs(Group.OUTPUT, "Save a checkpoint every N optimizer steps."),
    "report_to": Theirs(Group.OUTPUT, "Dashboards, separated by commas: tensorboard, wandb, trackio."),
    "push_to_hub": Theirs(Group.OUTPUT, "Push the model, its card and its figures at the end; needs hub_model_id."),
}


@dataclass(frozen=True)
class Setting:
    """A setting of a recipe."""

    name: str
    default: str  # as the recipe's own YAML file or the field has it; empty for none
    text: str  # what it does
    group: Group | None  # None where `--help` alone does not show it
    is_ours: bool  # not TRL's
    is_rare: bool = False  # `--help` alone does not show it

    def flag(self) -> str:
        """As a command line has it, with the default in brackets."""
        return f"--{self.name}" + (f" [{self.default}]" if self.default else "")

    def first_sentence(self) -> str:
        """What a line has room for; with the choices, where there are some."""
        head, stop, rest = self.text.partition(". ")
        return self.text if rest.startswith("One of") or not stop else head + "."


def settings_in(classes: Iterable[type], defaults: Mapping[str, object]) -> list[Setting]:
    """Every setting of a recipe's dataclasses, with the defaults of its YAML file, in the order in which help has them.

    In a group ours come first, but TRL's of the model before all.
    """
    listed = []
    for kind in classes:
        usual, ours = {**defaults_of(kind), **defaults}, facts_of(kind)
        written = [name for base in reversed(kind.__mro__) for name in inspect.get_annotations(base)]
        place = {name: number for number, name in enumerate(written)}  # of the last one, where a class has another's
        for f in sorted((f for f in dataclasses.fields(kind) if f.init), key=lambda f: place[f.name]):
            text = str(f.metadata.get("help", "")).replace("%%", "%")
            is_ours, theirs = f.name in ours, THEIRS.get(f.name, Theirs(None))
            text, group = (text, ours[f.name].group) if is_ours else (theirs.text or text, theirs.group)
            is_rare = is_ours and ours[f.name].rare
            listed.append(Setting(f.name, _shown(usual[f.name]), text, group, is_ours, is_rare))
    return sorted(listed, key=lambda setting: setting.is_ours == (setting.group is Group.MODEL))


def other_words(classes: Iterable[type]) -> dict[str, str]:
    """The words that are no settings and mean one, with its flag; ours win over TRL's."""
    ours: dict[str, str] = {}
    theirs: dict[str, str] = {}
    for kind in classes:
        for name in (f.name for f in dataclasses.fields(kind)):
            theirs |= dict.fromkeys(THEIRS[name].also_called.split() if name in THEIRS else (), f"--{name}")
        ours |= {word: f"--{name}" for name, words in facts(kind, lambda k: k.also_called).items() for word in words}
    return theirs | ours


def short_help(settings: Sequence[Setting]) -> str:
    """Two screens: a line or two per setting that is shown and not rare, under the group's name."""
    lines = []
    for group in Group:
        by_text: dict[str, list[Setting]] = {}
        for setting in (setting for setting in settings if setting.group is group and not setting.is_rare):
            by_text.setdefault(setting.first_sentence(), []).append(setting)
        lines += [f"{group.value}:"] if by_text else []
        for text, same in by_text.items():
            flags = "  " + ", ".join(setting.flag() for setting in same)
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
        f"usage: {script} [--config FILE] [--NAME VALUE ...]; --help NAME: one, --help all: all; brackets: if unset\n"
        f"{(doc or '').strip()}\n\n{short_help(settings)}"
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
    """Answer a plain `--help` from the text that is kept for a script, and end the process.

    Else the imports that follow say nothing of missing GPUs on a CPU.
    """
    silence_misleading_messages()
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
