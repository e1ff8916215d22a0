"""`config.yaml` of a run: every setting, in a file that `--config` reads again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.compat.on_resume import OnResume, on_resume
from trl_ext.io import as_yaml, plain, write_json, write_text
from trl_ext.redaction import redact
from trl_ext.registry import defaults_of
from trl_ext.runs.layout import RESOLVED
from trl_ext.runs.resume import recorded

if TYPE_CHECKING:
    from trl import ModelConfig

    from trl_ext.recipes.settings import Task

# Set by Trainer or TRL from other settings (which are written), or refused when given together with them.
_DERIVED = ("accelerator_config", "debug", "steps_per_generation")


def write_config(path: Path, task: Task, model: ModelConfig, config: Any) -> None:
    """Every setting as resolved, in a file that `--config` reads again; those at their defaults as comments.

    `resolved.json` next to it holds all of them for programs. The Hub token is left out.
    """
    if config.process_index:
        return
    settings: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    meaning = on_resume(type(part) for part in (task, model, config))
    for part in (task, model, config):
        usual = defaults_of(part)
        for name, value in recorded(part).items():
            is_set = value != usual[name] and name not in _DERIVED and meaning.get(name) is not OnResume.OF_PROCESS
            (settings if is_set else defaults)[name] = value
    passes = config.gradient_accumulation_steps * config.world_size  # forward passes of an optimizer step
    settings["train_batch_size"] = config.per_device_train_batch_size * passes
    if getattr(config, "uses_axes", False):
        defaults["scale_rewards"] = settings.pop("scale_rewards", None)
    write_json(path.with_name(RESOLVED), redact(plain({**defaults, **settings})))
    rest = "".join(f"# {line}\n" for line in as_yaml(defaults).splitlines())
    write_text(path, f"{as_yaml(settings)}\n# Defaults, and what follows from the settings above:\n{rest}")
