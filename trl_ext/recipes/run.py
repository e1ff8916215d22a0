"""What every recipe does: load and check, train in a folder of its own, report, and push."""

from __future__ import annotations

from trl_ext.compat.startup import use_all_cores

# isort: split
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from datasets import disable_progress_bars
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging
from trl import ModelConfig

from trl_ext.data.dataset import DatasetSettings
from trl_ext.data.load import GENERATED_PROBLEMS, GENERATORS, READERS
from trl_ext.errors import InputError, Stopped
from trl_ext.evaluation.yardstick import fingerprint, yardstick
from trl_ext.hub.card import write_model_card
from trl_ext.hub.push import hide_token, push
from trl_ext.io import print_line
from trl_ext.recipes.checks import Data, load_and_check
from trl_ext.recipes.config_file import write_config
from trl_ext.recipes.model_settings import init_kwargs
from trl_ext.rewards.graders import GRADERS
from trl_ext.runs.folder import Run, open_run, settings_of
from trl_ext.runs.provenance import provenance
from trl_ext.runs.report import before_after_table, selection_note, write_curve, write_summary
from trl_ext.training.callbacks import JsonlLog, ProgressBar, Validation
from trl_ext.training.ending import Decay, EarlyStop, TimeBudget


@dataclass
class Task(DatasetSettings):
    """What to learn and how it is measured; every recipe has its own, which makes the trainer."""

    recipe: ClassVar[str]  # its name, in the summary and on the model's card

    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    validation_split: str = field(default="validation", metadata={"help": "Split to validate on."})
    train_problems: int | None = field(
        default=None,
        metadata={
            "help": f"Train on so many problems, a sample of them (default: all; {GENERATED_PROBLEMS} of a generated "
            "dataset)."
        },
    )
    validation_problems: int | None = field(
        default=None, metadata={"help": "Validate on so many problems, a sample of them (default: all)."}
    )
    validation_grader: str = field(
        default="compatible",
        metadata={"help": f"Grader of validation: {', '.join(sorted(GRADERS))}, or file.py:function."},
    )
    validate_every: int = field(default=20, metadata={"help": "Optimizer steps between validations."})
    validation_batch_size: int = field(default=256, metadata={"help": "Prompts per batch of a validation."})
    validation_temperature: float | None = field(
        default=None, metadata={"help": "Of validation; 0 takes the likeliest token (default: as in training)."}
    )
    validation_max_tokens: int | None = field(
        default=None, metadata={"help": "Longest response of a validation (default: as in training)."}
    )
    final_validation_problems: int | None = field(
        default=None,
        metadata={
            "help": "Problems of the validation at the end (default: validation_problems, which are among them)."
        },
    )
    restore_best: bool = field(
        default=False,
        metadata={
            "help": "End with the weights of the best validation, not with the last ones; of several that its standard "
            "error does not tell apart, with the latest."
        },
    )
    collapse_threshold: float | None = field(
        default=None,
        metadata={"help": "End a run whose last two validations are below this share of its best one."},
    )
    stop_after_zero_variance_steps: int | None = field(
        default=None,
        metadata={"help": "End a run in which for so many logged steps no group has had different rewards."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grader()
        self.refuse_unused_tolerance(self.validation_grader, getattr(self, "reward", ""))
        if self.train_problems is None and self.trains_on()[0] in GENERATORS:
            self.train_problems = GENERATED_PROBLEMS
        self._refuse_to_validate_on_what_is_trained_on()
        for name in (
            "validate_every",
            "validation_batch_size",
            "final_validation_problems",
            "stop_after_zero_variance_steps",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.collapse_threshold is not None and not 0 < self.collapse_threshold < 1:
            raise ValueError(f"collapse_threshold must be between 0 and 1, got {self.collapse_threshold}")

    def grader(self) -> Callable[..., Any]:
        """Validation's grader: responses and truths to verdicts."""
        return self.build(GRADERS, self.validation_grader)

    def data(self, config: Any, say: Callable[[str], None]) -> Data:
        """`train` and `validation`: rows with `prompt` and `answer`.

        Raises:
            ValueError: a dataset that cannot be used.
        """
        return {
            "train": self.load(self.train_split, self.train_problems, config.seed, "train"),
            "validation": self.validation_rows(config.seed),
        }

    def validation_rows(self, seed: int) -> Any:
        """The problems of all validations together; the first `validation_problems` are those on the way."""
        counts = (self.validation_problems, self.final_validation_problems)
        n = self.validation_problems if None in counts else max(count for count in counts if count)
        return self.load(self.validation_split, n, seed, "validation", in_sample_order=counts != (None, None))

    def trains_on(self) -> tuple[str, str]:
        """The dataset and the split that are trained on."""
        return self.dataset, self.train_split

    def _refuse_to_validate_on_what_is_trained_on(self) -> None:
        dataset, split = self.trains_on()
        if dataset != self.dataset:
            return
        if Path(dataset).suffix in READERS and "{split}" not in dataset:
            name = Path(dataset)
            raise ValueError(
                f"dataset {dataset!r} is one file, which training and validation would both read: put {{split}} in "
                f"its path, such as {name.stem}_{{split}}{name.suffix} for {name.stem}_{split}{name.suffix} and "
                f"{name.stem}_{self.validation_split}{name.suffix}"
            )
        if split == self.validation_split:
            raise ValueError(
                f"training and validation are both on the split {split!r} of {dataset!r}: choose another "
                "--validation_split"
            )

    def trainer(self, model: ModelConfig, config: Any, data: Data, run: Run) -> Any:
        """The trainer, with the callbacks that only this recipe has."""
        raise NotImplementedError

    def graders(self) -> dict[str, str]:
        """What grades the rows that are sampled for, by what they are for."""
        return {"validation": self.validation_grader}

    def check(self, data: Data, config: Any, say: Callable[[str], None]) -> None:
        """Look at the data before a model loads.

        Raises:
            ValueError: the recipe cannot train on them.
        """

    def is_due(self, trainer: Any) -> Callable[[Any], bool]:
        """Whether the policy is to be validated, by the trainer's state after an optimizer step."""
        return lambda state: state.global_step % self.validate_every == 0

    def log_responses_to(self, run: Run) -> Path | None:
        """Where a few responses of each validation go; GRPO logs rollouts instead."""
        return run.folder / "generations.jsonl"

    def finish(self, trainer: Any, run: Run) -> dict[str, Any]:
        """What this recipe adds to the summary; it may leave files of its own."""
        return {}


def run_recipe(task: Task, model: ModelConfig, config: Any) -> dict[str, Any]:
    """Train, validate on the way, and leave everything in the run's folder. Returns the summary.

    Raises:
        InputError: a dataset, a folder or a checkpoint that cannot be used; raised before a model loads.
        Stopped: SIGTERM came; there is a checkpoint to go on from.
    """
    use_all_cores()
    logging.disable_progress_bar()  # of transformers and datasets: bars of half a second inside the run's own
    disable_progress_bars()
    hide_token(config)
    say = ignore if config.process_index else print_line
    try:
        checked = load_and_check(task, model, config, say)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    data, policy = checked.data, checked.policy
    settings = settings_of((task, model, config), policy=policy, processes=config.world_size)
    settings |= {"training_problems": fingerprint(data["train"]), "problems_are": task.problems_are()}
    settings |= yardstick(task, config, list(data["validation"])[: task.validation_problems])
    for role, source in task.sources.items():
        if source.available is not None or source.too_long:
            say(source.line(role))
    resume = config.resume or config.resume_from_checkpoint
    with open_run(Path(config.output_dir), settings, resume, config.resume_changed, say) as run:
        if not run.validations:
            run.seconds_to_make_policy = checked.seconds_to_make_policy
        config.output_dir = str(run.folder)
        write_config(run.folder / "config.yaml", task, model, config)
        model.model_name_or_path = policy
        engine = "colocated vLLM" if config.use_vllm else "HF generate"
        if not config.disable_tqdm:
            say(f"rollouts by {engine}: {config.engine_reason}")
            if config.precision_reason:
                say(f"training in {config.precision_reason}")
        trainer = assemble(task, model, config, data, run)
        with trainer.stopping_on_sigterm():
            trainer.train(resume_from_checkpoint=str(run.checkpoint) if run.checkpoint else None)
        if trainer.stop_signal is not None:
            raise Stopped(trainer.stop_signal, trainer.state.global_step)
        _save_final_model(trainer, run.folder)
        summary = finish(task, trainer, run) if trainer.is_world_process_zero() else {}
        if config.push_to_hub and trainer.is_world_process_zero():
            say(
                f"pushed to {push(run.folder, trainer.hub_model_id, config.hub_private_repo, config.hub_merge_adapter)}"
            )
        return summary


def _save_final_model(trainer: Any, folder: Path) -> None:
    """The model as it is rolled out: its generation config says how it was sampled and where it stops."""
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    unwrapped.generation_config.update(**generation_settings(trainer.args))
    trainer.save_final_model()
    if trainer.is_world_process_zero():
        unwrapped.generation_config.save_pretrained(folder)  # which an adapter is saved without


def generation_settings(config: Any) -> dict[str, Any]:
    """How the policy was sampled, for the generation config that the model is saved with."""
    known = {
        "do_sample": config.temperature > 0,
        "temperature": config.temperature or None,
        "top_p": getattr(config, "top_p", None),
        "max_new_tokens": config.max_completion_length,
        "stop_strings": config.stop,
    }
    return {name: value for name, value in known.items() if value is not None}


def ignore(line: str) -> None:
    """Print nothing."""


def assemble(task: Task, model: ModelConfig, config: Any, data: Data, run: Run) -> Any:
    """The trainer with its callbacks."""
    config.model_init_kwargs = init_kwargs(model, config.model_init_kwargs)
    trainer = task.trainer(model, config, data, run)
    trainer.run_record = run.record
    sampling = {
        "batch_size": task.validation_batch_size,
        "seed": config.seed,
        "temperature": task.validation_temperature,
        "max_tokens": task.validation_max_tokens,
    }
    problems, due, log_to = list(data["validation"]), task.is_due(trainer), task.log_responses_to(run)
    final = problems[: task.final_validation_problems or task.validation_problems]
    problems = problems[: task.validation_problems]
    validation = Validation(
        problems, task.grader(), due, sampling, run, trainer, log_to, final=final, restore_best=task.restore_best
    )
    trainer.add_callback(validation)
    trainer.add_callback(JsonlLog(run.folder / "metrics.jsonl", run.clock))
    trainer.add_callback(EarlyStop(run, task.collapse_threshold, task.stop_after_zero_variance_steps))
    if config.time_budget is not None:
        trainer.budget = TimeBudget(trainer, run.clock, config.time_budget, validation.seconds_to_end)
        trainer.add_callback(trainer.budget)
        if config.lr_decay_fraction is not None:
            trainer.add_callback(Decay(trainer.budget, config.lr_decay_fraction))
    trainer.remove_callback(PrinterCallback if config.disable_tqdm else ProgressCallback)
    trainer.add_callback(PrinterCallback if config.disable_tqdm else ProgressBar)  # last: it changes what it prints
    return trainer


def finish(task: Task, trainer: Any, run: Run) -> dict[str, Any]:
    """Write the curve and the summary, and print the table of before and after."""
    output, history = run.folder, run.validations
    write_curve(output / "curve.png", {output.name: history}, title=output.name)
    more = {"recipe": task.recipe, "seed": trainer.args.seed, "ended_early": run.ended_early}
    more["data"] = {role: source.summary() for role, source in task.sources.items()}
    more["seconds_to_make_policy"] = round(run.seconds_to_make_policy, 2)
    more["seconds_to_save"] = round(trainer.seconds_to_save, 2)
    more |= {**task.finish(trainer, run), **provenance()}
    summary = write_summary(output / "summary.json", history, run.clock.seconds(), more)
    write_model_card(output, trainer.args.hub_model_id)
    print("\n" + before_after_table(history[0], history[-1]))
    if note := selection_note(history[-1].get("selection"), history[-1]["problems"]):
        print(note)
    print(f"{summary['wall_clock_s']:.0f} s in all; everything is in {output}: curve.png, summary.json, ...")
    return summary
