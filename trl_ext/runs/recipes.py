"""`RECIPES`: what a recipe is called, and everything that follows from the name: script, settings, words of a card."""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """One way to train."""

    script: str  # in the folder `recipes`, next to its YAML file
    place: str  # the tuple of the settings' dataclasses, as `module:name`; imported by `settings` only
    tags: tuple[str, ...]  # on the Hub
    story: str  # what was done to the model, in the words of its card, with the facts of `hub.card.facts_of`
    learned: str  # what the card's limits say of what was learned
    samples: str = "the last validation"  # where the card's samples are from

    def settings(self) -> tuple[type, ...]:
        """The dataclasses that its arguments are parsed into: task, model, trainer."""
        module, _, name = self.place.partition(":")
        found: tuple[type, ...] = getattr(importlib.import_module(module), name)
        return found


_BY_ANSWER = "Training went by the final answer only, so a correct answer may follow incorrect reasoning"
RECIPES = {
    "grpo": Recipe(
        script="grpo_math.py",
        place="trl_ext.recipes.grpo:GRPO_SETTINGS",
        tags=("grpo", "reinforcement-learning"),
        story="trained by GRPO on {dataset} with verified rewards ({reward}).\n"
        "The algorithm as a point on the axes: preset {preset}; {axes}.",
        learned=_BY_ANSWER,
        samples="the last logged rollout of the training",
    ),
    "sft": Recipe(
        script="sft_math.py",
        place="trl_ext.recipes.sft:SFT_SETTINGS",
        tags=("sft",),
        story="fine-tuned on {traces_used} reasoning traces{only_right} of {traces}.",
        learned="Training imitated the traces, mistakes in them included",
    ),
    "expert_iteration": Recipe(
        script="expert_iteration.py",
        place="trl_ext.recipes.expert_iteration:EXPERT_ITERATION_SETTINGS",
        tags=("expert-iteration", "sft"),
        story="fine-tuned by expert iteration on its own correct answers to {dataset}: {steps} steps of "
        "{questions_per_step} questions with {group_size} rollouts each, of which {selection} kept {kept}.",
        learned=_BY_ANSWER,
    ),
}


def recipe_of(task: object) -> str:
    """The name of the recipe that a task's class, or one that it inherits from, is of; grpo where none is."""
    modules = {recipe.place.partition(":")[0]: name for name, recipe in RECIPES.items()}
    return next((modules[kind.__module__] for kind in type(task).__mro__ if kind.__module__ in modules), "grpo")
