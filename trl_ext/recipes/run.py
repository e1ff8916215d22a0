"""A recipe's run, in a folder of its own: trained, validated on the way, reported, and pushed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.contrib.logging import logging_redirect_tqdm
from trl import ModelConfig

from trl_ext.compat.given import given
from trl_ext.compat.on_resume import on_resume
from trl_ext.data.dataset import problems_are
from trl_ext.errors import Stopped
from trl_ext.evaluation.validation_conditions import fingerprint, validation_conditions
from trl_ext.grpo.teachers import fingerprints_of_teachers
from trl_ext.hub.card import gguf_origin, write_model_card
from trl_ext.hub.push import push
from trl_ext.io import as_yaml, plain, write_json, write_text
from trl_ext.ranks import run_on_main_and_broadcast
from trl_ext.recipes.model_settings import init_kwargs
from trl_ext.recipes.preflight import Prepared
from trl_ext.recipes.settings import Data, TaskSettings
from trl_ext.recipes.teachers import teachers_of
from trl_ext.redaction import redact
from trl_ext.runs import folder as runs
from trl_ext.runs.fingerprint import fingerprint_of_model
from trl_ext.runs.layout import CONFIG, CURVE, METRICS, RESOLVED, SUMMARY
from trl_ext.runs.provenance import provenance
from trl_ext.runs.recipes import recipe_of
from trl_ext.runs.resume import SettingsKnowledge, recorded, settings_of
from trl_ext.runs.summary import write_summary
from trl_ext.runs.tables_and_plots import before_after_table, selection_note, write_curve
from trl_ext.setting import OnResume
from trl_ext.training.benchmarks import BenchmarkValidation, latest_benchmarks
from trl_ext.training.callbacks import JsonlLog, Validation
from trl_ext.training.progress import show_progress
from trl_ext.training.stopping import EarlyStop, TimeBasedLRDecay, TimeBudget
from trl_ext.training.trackers import send_summary, tracker_runs_ended

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from trl_ext.training.trainer import ReliableTrainer

# Set by Trainer or TRL from other settings (which are written), or refused when given together with them.
_DERIVED = ("accelerator_config", "debug", "steps_per_generation")


@contextlib.contextmanager
def open_run(prepared: Prepared) -> Iterator[RecipeRun]:
    """A run's folder while the block runs: a new one, or that of the run which is resumed.

    The model's settings then name the policy to begin with and how to load it.
    """
    task, model, config, data = prepared.task, prepared.model, prepared.config, prepared.data
    settings = settings_of((task, model, config), policy=prepared.policy, processes=config.world_size)
    settings |= {"training_problems": fingerprint(data.train), "problems_are": problems_are(data.sources.values())}
    settings |= {} if task.judge_is is None else {"judge_is": task.judge_is}
    settings |= validation_conditions(task, config, list(data.validation)[: task.validation_problems])
    policy_is = functools.partial(fingerprint_of_model, prepared.policy, model.model_revision)
    settings["policy_is"] = plain(run_on_main_and_broadcast(policy_is))
    if getattr(config, "has_teacher", False):
        settings["teachers_are"] = plain(run_on_main_and_broadcast(functools.partial(fingerprints_of_teachers, config)))
    for line in data.lines():
        prepared.say(line)
    known = SettingsKnowledge.of(type(part) for part in (task, model, config))
    resume = config.resume or config.resume_from_checkpoint
    opened = runs.open_run(Path(config.output_dir), settings, known, resume, config.resume_changed)
    with opened as run, tracker_runs_ended():
        if not run.validations:
            run.seconds_to_make_policy = prepared.seconds_to_make_policy
        config.output_dir = str(run.folder)
        write_config(run.folder / CONFIG, task, model, config)
        config.run_name = config.run_name or run.folder.name  # by which trackers resume a run
        model.model_name_or_path = prepared.policy
        config.model_init_kwargs = init_kwargs(model, config.model_init_kwargs)
        if not config.disable_tqdm:
            served = config.use_vllm and config.vllm_mode == "server"
            engine = "vLLM servers" if served else "colocated vLLM" if config.use_vllm else "HF generate"
            prepared.say(f"rollouts by {engine}: {config.engine_reason}")
            if config.precision_reason:
                prepared.say(f"training in {config.precision_reason}")
        if config.save_only_model and config.save_strategy != "no":
            prepared.say("save_only_model: checkpoints have no optimizer and no schedule: this run cannot be resumed")
        yield RecipeRun(prepared, run, run.folder, data, teachers_of(prepared, run))


@dataclass(frozen=True)
class RecipeRun:
    """What a recipe trains in: `train`, then `finish`."""

    prepared: Prepared
    run: runs.Run  # the record in the folder
    folder: Path  # where everything is written to
    data: Data  # what is trained on and measured on
    teachers: Mapping[str, Any]  # how good each is, where that was asked for

    def train(
        self,
        trainer: ReliableTrainer,
        validate_when: Callable[[Any], bool] | None = None,
        log_responses_to: Path | None = None,
    ) -> None:
        """Train, from the checkpoint if there is one, with validations; leave the model in the folder.

        Args:
            validate_when: by the trainer's state after an optimizer step (default: every `validate_every` steps).
            log_responses_to: a JSONL file for a few responses of each validation.

        `Stopped` is raised where SIGTERM came; there is a checkpoint to resume from.
        """
        every = self.prepared.task.validate_every
        self._add_callbacks(trainer, validate_when or (lambda state: state.global_step % every == 0), log_responses_to)
        trainer.run_record = self.run.record
        with trainer.stopping_on_sigterm(), logging_redirect_tqdm():  # else a warning stands behind the bar
            trainer.train(resume_from_checkpoint=str(self.run.checkpoint) if self.run.checkpoint else None)
        if trainer.stop_signal is not None:
            raise Stopped(trainer.stop_signal, trainer.state.global_step)
        trainer.save_final_model()

    def finish(self, trainer: ReliableTrainer, **more: Any) -> Mapping[str, Any]:
        """Write curve, card and the summary with `more`, print the table of before and after, push if asked for.

        The first rank does so, and returns the summary.
        """
        if not trainer.is_world_process_zero():
            return {}
        summary = self._report(trainer, more)
        send_summary(trainer, summary)
        if self.prepared.config.push_to_hub:
            config = trainer.args
            address = push(self.folder, trainer.hub_model_id, config.hub_private_repo, config.hub_merge_adapter)
            self.prepared.say(f"pushed to {address}")
        return summary

    def _add_callbacks(
        self, trainer: ReliableTrainer, validate_when: Callable[[Any], bool], log_to: Path | None
    ) -> None:
        task, config, run, problems = self.prepared.task, trainer.args, self.run, list(self.data.validation)
        sampling = {name: getattr(task, f"validation_{name}") for name in ("batch_size", "temperature", "max_tokens")}
        validation = Validation(
            problems[: task.validation_problems],
            task.grader(),
            validate_when,
            {**sampling, "seed": config.seed},
            run,
            trainer,
            log_to,
            final=problems[: task.final_validation_problems or task.validation_problems],
            restore_best=task.restore_best,
            samples=task.validation_samples,
        )
        trainer.add_callback(validation)
        rows = {name: one.rows.to_list() for name, one in self.data.benchmarks.items()}
        measured = {**sampling, "seed": config.seed}
        benchmarks = BenchmarkValidation(
            task.benchmarks, rows, task.build, validate_when, measured, run.folder, trainer
        )
        trainer.add_callback(benchmarks)
        trainer.add_callback(JsonlLog(run.folder / METRICS, run.clock))
        rules = (task.collapse_threshold, task.stop_after_zero_variance_steps, task.target_accuracy)
        trainer.add_callback(EarlyStop(run, *rules, task.validation_patience))
        if config.time_budget is not None:
            at_the_end = (validation, benchmarks)
            trainer.budget = TimeBudget(
                trainer, run.clock, config.time_budget, lambda: sum(one.seconds_to_end() for one in at_the_end)
            )
            trainer.add_callback(trainer.budget)
            if config.lr_decay_fraction is not None:
                trainer.add_callback(TimeBasedLRDecay(trainer.budget, config.lr_decay_fraction))
        show_progress(trainer)

    def _taught_by(self) -> list[str]:
        """What each teacher is, by its folder, its id or what a server calls it."""
        models = getattr(self.prepared.config, "teacher_models", {})
        return [
            models.get(name, known.get("served")) for name, known in self.run.settings.get("teachers_are", {}).items()
        ]

    def _report(self, trainer: ReliableTrainer, more: dict[str, Any]) -> Mapping[str, Any]:
        output, history, task = self.folder, self.run.validations, self.prepared.task
        levels = {f"teacher {name}": found["accuracy"] for name, found in self.teachers.items()}
        write_curve(output / CURVE, {output.name: history}, title=output.name, levels=levels)
        known = {
            "recipe": recipe_of(task),
            "seed": trainer.args.seed,
            "sampling": {
                "rollouts": trainer.sampling_parameters(),
                "validations": trainer.sampling_parameters(task.validation_temperature, task.validation_max_tokens),
            },
            "ended_early": self.run.ended_early,
            **({"benchmarks": latest} if (latest := latest_benchmarks(output)) else {}),
            **({"taught_by": taught_by} if (taught_by := self._taught_by()) else {}),
            **({"teachers": self.teachers} if self.teachers else {}),
            "data": {role: source.summary() for role, source in self.data.sources.items()},
            **({"gguf": gguf} if (gguf := gguf_origin(self.prepared.policy)) else {}),
            "seconds_to_make_policy": round(self.run.seconds_to_make_policy, 2),
            "seconds_to_save": round(trainer.seconds_to_save, 2),
        }
        everything = {**known, **more, **provenance()}
        summary = write_summary(output / SUMMARY, history, self.run.clock.seconds(), everything)
        write_model_card(output, trainer.args.hub_model_id)
        print("\n" + before_after_table(history[0], history[-1]))
        if note := selection_note(history[-1].get("selection"), history[-1]["problems"]):
            print(note)
        print(f"{summary['wall_clock_s']:.0f} s in all; everything is in {output}: curve.png, summary.json, ...")
        return summary


def write_config(path: Path, task: TaskSettings, model: ModelConfig, config: TrainingArguments) -> None:
    """Every setting as resolved, in a file that `--config` reads again; those that nobody gave as comments.

    `resolved.json` next to it holds all of them for programs. The Hub token is left out.
    """
    if config.process_index:
        return
    settings: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    meaning = on_resume(type(part) for part in (task, model, config))
    for part in (task, model, config):
        values = recorded(part)
        written = given(part, values)
        for name, value in values.items():
            is_set = name in written and name not in _DERIVED and meaning.get(name) is not OnResume.OF_PROCESS
            (settings if is_set else defaults)[name] = value
    passes = config.gradient_accumulation_steps * config.world_size  # forward passes of an optimizer step
    settings["train_batch_size"] = config.per_device_train_batch_size * passes
    if getattr(config, "uses_axes", False):
        defaults["scale_rewards"] = settings.pop("scale_rewards", None)
    write_json(path.with_name(RESOLVED), redact(plain({**defaults, **settings})))
    rest = "".join(f"# {line}\n" for line in as_yaml(defaults).splitlines())
    write_text(path, f"{as_yaml(settings)}\n# Defaults, and what follows from the settings above:\n{rest}")
