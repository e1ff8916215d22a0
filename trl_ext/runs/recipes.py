"""`RECIPES`: what a recipe is called, and everything that follows from the name: script, settings, words of a card.

`programs` are all commands by name, and `shipped` is where the files of `recipes/` and `accelerate_configs/` are.
"""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    """One way to train."""

    script: str  # in the folder `recipes`, next to its YAML file
    place: str  # the tuple of the settings' dataclasses, as `module:name`; imported by `settings` only
    tags: tuple[str, ...]  # on the Hub
    story: str  # what was done to the model, as a template of what its card, `hub/card.md`, knows
    learned: str  # what the card's limits say of what was learned
    samples: str = "the last validation"  # where the card's samples are from

    def settings(self) -> tuple[type, ...]:
        """The dataclasses that its arguments are parsed into: task, model, trainer."""
        classes: tuple[type, ...] = pkgutil.resolve_name(self.place)
        return classes


_BY_ANSWER = "Training went by the final answer only, so a correct answer may follow incorrect reasoning"
RECIPES = {
    "grpo": Recipe(
        script="grpo_math.py",
        place="trl_ext.recipes.grpo:GRPO_SETTINGS",
        tags=("grpo", "reinforcement-learning"),
        story="trained by GRPO on {{ dataset }} with verified rewards "
        "({{ settings.reward | default('strict') | code }}).\n"
        "The algorithm as a point on the axes: preset {{ settings.get('preset') | code }}; "
        "{% for axis in ('advantage', 'policy_loss', 'aggregation', 'kl_estimator') if settings.get(axis) %}"
        "{{ axis }} {{ settings[axis] | code }}{{ '; ' if not loop.last }}{% else %}TRL's own loss{% endfor %}."
        "{% if summary.get('taught_by') %} Taught by "
        "{{ summary.taught_by | without_paths | map('code') | join(', ') }}: "
        "{{ settings.get('distillation', 'reverse_kl') | code }} of the teacher's probabilities of its own responses."
        "{% for name, found in summary.get('teachers', {}).items() %} Teacher {{ name | code }} solves "
        "{{ '%.3f' | format(found.accuracy) }} of the validation problems.{% endfor %}"
        "{% endif %}",
        learned=_BY_ANSWER,
        samples="the last logged rollout of the training",
    ),
    "sft": Recipe(
        script="sft_math.py",
        place="trl_ext.recipes.sft:SFT_SETTINGS",
        tags=("sft",),
        story="fine-tuned on {{ counts.get('chosen', 0) - counts.get('too_long', 0) }} reasoning traces"
        "{{ ' with the correct answer' if summary.get('filter_correct') }} of "
        "{{ summary.get('traces') | without_paths | code }}.",
        learned="Training imitated the traces, mistakes in them included",
    ),
    "expert_iteration": Recipe(
        script="expert_iteration.py",
        place="trl_ext.recipes.expert_iteration:EXPERT_ITERATION_SETTINGS",
        tags=("expert-iteration", "sft"),
        story="fine-tuned by expert iteration on its own correct answers to {{ dataset }}: "
        "{{ steps | length }} steps of {{ summary.get('questions_per_step') }} questions with "
        "{{ summary.get('group_size') }} rollouts each, of which "
        "{{ summary.get('selection') | code }} kept {{ steps | sum('kept') }}.",
        learned=_BY_ANSWER,
    ),
}


def recipe_of(task: object) -> str:
    """The name of the recipe that a task's class, or one that it inherits from, is of; grpo where none is."""
    modules = {recipe.place.partition(":")[0]: name for name, recipe in RECIPES.items()}
    return next((modules[kind.__module__] for kind in type(task).__mro__ if kind.__module__ in modules), "grpo")


# Scripts of `recipes/` that train nothing by themselves, or train by the recipes above.
SCRIPTS = {
    "evaluate": "evaluate.py",
    "best-of-n": "best_of_n.py",
    "compare": "compare.py",
    "pipeline": "pipeline.py",
    "lab": "lab.py",
    "leaderboard": "leaderboard.py",
    "speedrun": "speedrun.py",
    "sft-sizes": "sft_sizes.py",
    "plot-runs": "plot_runs.py",
    "golomb-ruler": "golomb_ruler/discover.py",
    "kissing-number": "kissing_number/discover.py",
}
PROGRAMS_GROUP = "trl_ext.programs"  # entry points: modules that are run as `python -m`, of any installed distribution
_INSTALLED = Path(__file__).parents[1] / "_data"  # where a wheel has the two folders; a checkout has them at its top


def programs() -> dict[str, str]:
    """Script or module of every command, by the name that it has there, recipes first."""
    trains = {name.replace("_", "-"): recipe.script for name, recipe in RECIPES.items()}
    modules = {entry.name: entry.module for entry in metadata.entry_points(group=PROGRAMS_GROUP)}
    return {**trains, **SCRIPTS, **modules}


def shipped(path: str = "") -> Path:
    """Where a file of `recipes/` or `accelerate_configs/` is, of the installed package or of the checkout."""
    return (_INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1]) / path


def shown_command(script: str, arguments: Sequence[str]) -> list[str]:
    """The words that run a script: `trl-ext NAME` for one of the installed package, else `python SCRIPT`.

    The installed package's files are named as in the repository, which `trl-ext` understands, and not by where this
    machine has them.
    """
    if _INSTALLED not in Path(os.path.abspath(script)).parents:
        return ["python", script, *arguments]
    names = {str(_INSTALLED / "recipes" / target): name for name, target in programs().items()}
    installed = re.escape(f"{_INSTALLED}{os.sep}") + "|" + re.escape(f"{os.path.relpath(_INSTALLED)}{os.sep}")
    words = [re.sub(installed, "", argument) for argument in arguments]
    name = names.get(os.path.abspath(script))
    return ["trl-ext", name, *words] if name else ["python", re.sub(installed, "", script), *words]
