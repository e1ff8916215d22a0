"""Expert iteration: sample, keep what is correct, fine-tune on it, repeat (arXiv:1705.08439; STaR, arXiv:2203.14465).

One training run of `ExtSFTTrainer` that makes its rows while it trains, so that the optimizer, the engine, the
checkpoints and the logs are those of one run. What step N sampled and kept is in the run's `expert_iteration/step_N/`.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import IterableDataset
from tqdm import tqdm

from trl_ext.compat.given import given
from trl_ext.errors import brief_in_notebooks
from trl_ext.evaluation.evaluator import grade_rows, tool_figures
from trl_ext.generation.completion import derive_seed
from trl_ext.imitation.schedule import optimizer_steps, questions_of_step, step_counts, step_line
from trl_ext.imitation.selection import SELECTIONS, Row
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer, tokenized
from trl_ext.io import append_jsonl, drop_torn_line, print_line, read_jsonl, write_jsonl
from trl_ext.ranks import run_on_main_and_broadcast
from trl_ext.registry import parse_options
from trl_ext.setting import Group, OnResume, setting
from trl_ext.training.policy_tools import PolicyTools
from trl_ext.training.stopping import TimeBudget
from trl_ext.training.trl_settings import check_needs, rules_of
from trl_ext.turns.responses import ToolUse
from trl_ext.turns.settings import ToolSettings, check_tools, resolve_protocol

FOLDER, ROLLOUTS, KEPT, STEPS = "expert_iteration", "rollouts.jsonl", "kept.jsonl", "steps.jsonl"
_WITHOUT_MEANING = {
    "completion_only_loss": "only responses are learned",
    "num_train_epochs": "see epochs_per_step",
    "padding_free": "rows are made during the run",
}
_SCHEDULES = ("constant", "constant_with_warmup")

log = logging.getLogger(__name__)


@brief_in_notebooks
@dataclass
class ExpertIterationConfig(ToolSettings, ExtSFTConfig):
    """What a step samples, keeps and fine-tunes on; the rest is as in SFT.

    Raises:
        UnknownName: a selection or an option that is not in its table.
        ValueError: settings that have no meaning here or contradict each other.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*ExtSFTConfig._VALID_DICT_FIELDS, "selection_options"]

    n_ei_steps: int = setting(
        5, "The number of expert-iteration steps.", Group.OPTIMIZER, on_resume=OnResume.LENGTH, within="[1, inf)"
    )
    questions_per_step: int = setting(
        512,
        "The number of questions per step (handout: 512, 1024 or 2048).",
        Group.OPTIMIZER,
        also_called="n_prompts_per_rollout_batch D_b",
        within="[1, inf)",
    )
    group_size: int = setting(
        4, "The number of rollouts per question.", Group.OPTIMIZER, also_called="G", within="[1, inf)"
    )
    epochs_per_step: int = setting(
        1,
        "The number of passes over the rows that a step keeps.",
        Group.OPTIMIZER,
        also_called="n_sft_steps",
        within="[1, inf)",
    )
    selection: str = setting(
        "every",
        f"Which correct rollouts are kept. One of: {', '.join(sorted(SELECTIONS))}, or file.py:function.",
        Group.ALGORITHM,
    )
    selection_options: dict[str, Any] | str | None = setting(
        None, "Options of the selection: a mapping in YAML, and `k=2` or JSON as a flag.", Group.ALGORITHM
    )
    rollout_batch_size: int = setting(
        256,
        "The number of rollouts per batch of HF generate; vLLM takes a chunk at once.",
        Group.OPTIMIZER,
        within="[1, inf)",
    )
    rollout_chunk: int = setting(
        4096,
        "Sample, grade and write this many rollouts at a time, the most that a kill can lose.",
        Group.OPTIMIZER,
        within="[1, inf)",
    )

    def __post_init__(self) -> None:
        self.selection_options = parse_options("selection_options", self.selection_options)
        select = self.selection_function()
        if self.selection in SELECTIONS:
            select([])  # which refuses an option out of range
        if self.packing:
            raise ValueError("packing: true does not go with expert iteration, whose rows are made during the run")
        for name, value in given(self, _WITHOUT_MEANING, off=False).items():
            raise ValueError(f"{name}: {value} has no meaning in expert iteration: {_WITHOUT_MEANING[name]}")
        asked: int = self.max_steps  # type: ignore[has-type]
        super().__post_init__()
        check_needs(self, rules_of(ToolSettings))
        check_tools(self)
        schedule = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        if schedule not in _SCHEDULES:
            raise ValueError(
                f"lr_scheduler_type is {schedule!r}, and how many optimizer steps there will be "
                f"depends on how many rollouts are correct; take one of: {', '.join(_SCHEDULES)}"
            )
        rows = self.questions_per_step * self.group_size
        self.max_steps = self.n_ei_steps * self.epochs_per_step * math.ceil(rows / self.rows_per_optimizer_step)
        if asked not in (-1, self.max_steps):
            raise ValueError(
                f"max_steps is {asked}, but it follows from n_ei_steps (at most {self.max_steps}); leave it out"
            )

    @property
    def rows_per_optimizer_step(self) -> int:
        """Over all ranks."""
        rows: int = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size
        return rows

    def selection_function(self) -> Callable[[Sequence[Row]], list[Row]]:
        """A function from a step's graded rollouts to those that are kept."""
        assert not isinstance(self.selection_options, str)
        return SELECTIONS.build(self.selection, **(self.selection_options or {}))


class ExpertIterationTrainer(ExtSFTTrainer):
    """`ExtSFTTrainer` that samples its rows from the current policy, before each expert-iteration step.

    Args:
        questions: rows with `prompt` and `answer`.
        grader: (responses, reference answers) -> grades.
        folder: of rollouts and kept rows.
    """

    args: ExpertIterationConfig

    def __init__(self, *args: Any, questions: Sequence[Row], grader: Callable[..., Any], folder: Path, **kwargs: Any):
        config = kwargs["args"]
        if config.tools:
            resolve_protocol(config, by_template=False)  # a recipe has done so with the model's template
        config.dataset_kwargs = {"skip_prepare_dataset": True}  # there is nothing to prepare yet
        config.ignore_data_skip = True  # `load_resume_state` finds the place
        super().__init__(*args, train_dataset=IterableDataset.from_generator(_nothing_yet), **kwargs)
        if config.tools:
            self.policy_tools = PolicyTools(ToolUse.of(config, self._tokenizer), self)
        self.questions, self.grader, self.folder = list(questions), grader, folder
        self.budget: TimeBudget | None = None
        self.ei_step = 0  # the current one, from 1
        self._left: list[list[Row]] = []  # rows of the optimizer steps that are left of the current step
        self._planned = 0  # optimizer steps of the current step in all
        self._seconds_of_rollouts = 0.0  # of the last step's

    # What an optimizer step trains on.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """This rank's micro-batches of the next optimizer step, after the rollouts of its expert-iteration step."""
        while not self._left:
            if self.ei_step >= self.args.n_ei_steps or self._is_to_stop(self._seconds_of_rollouts):
                self.control.should_training_stop = True
                return [], None
            with self.saving_last_step():
                self._begin_step(self.ei_step + 1)
        batches = [self._prepare_inputs(batch) for batch in self._micro_batches(self._left.pop(0))]
        return batches, self._get_num_items_in_batch(batches, device)

    def is_step_over(self) -> bool:
        """Whether the optimizer step just done was the last one of its expert-iteration step."""
        return not self._left

    def ei_steps_done(self) -> float:
        """Expert-iteration steps so far, the current one in part."""
        return self.ei_step - len(self._left) / max(self._planned, 1)

    def _is_to_stop(self, ahead: float = 0.0) -> bool:
        """Whether less than `ahead` seconds are left or a signal was received; the same on every rank."""
        return (self.budget is not None and self.budget.is_spent(ahead)) or self.stop_requested()

    def _micro_batches(self, rows: list[Row]) -> list[Any]:
        """Equally many on every rank, of similar size; where rows run out, one without a trained token."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine = [rows[i] for i in range(rank, len(rows), ranks)]
        number = self.args.gradient_accumulation_steps
        empty = {"input_ids": [self._tokenizer.pad_token_id] * 2, "labels": [-100, -100]}
        return [self.data_collator(mine[i::number] or [empty]) for i in range(number)]

    # A step.

    def _begin_step(self, step: int) -> None:
        """Sample, grade, select, and plan the optimizer steps."""
        if step == 1 and self.state.global_step == 0 and self.args.save_strategy != "no":
            self._save_checkpoint(self.model, None)  # the first rollouts may take long, and belong to this run
        began = time.monotonic()
        rollouts = self._rollouts(step)
        self._seconds_of_rollouts = time.monotonic() - began
        if self.budget is not None:
            self.budget.leave_out(self._seconds_of_rollouts)
        if rollouts is None:
            return  # a resumed run continues with what has been sampled of it
        self.ei_step = step
        kept = self.args.selection_function()(rollouts)
        rows, too_long = tokenized(kept, self._tokenizer, self.args.max_length)
        self._lay_out(step, rows, done=0)
        counts = step_counts(step, self.state.global_step, rollouts, kept, too_long, len(self._left))
        if self.accelerator.is_main_process:
            write_jsonl(self._step_folder(step) / KEPT, kept)
            _replace_row(self.folder / STEPS, counts)
        if not self.args.disable_tqdm and self.accelerator.is_main_process:
            print_line(step_line(counts, self.args.n_ei_steps))
        if not rows:
            log.warning(
                "expert-iteration step %d keeps nothing to fine-tune on: %d of %d rollouts are correct. More rollouts "
                "(--group_size, --questions_per_step) or a model that knows the format (recipes/sft_math.py) help",
                step, counts["correct"], counts["rollouts"],
            )  # fmt: skip
        logged = {f"expert_iteration/{k}": float(v) for k, v in counts.items() if v is not None and k != "step"}
        entropy = counts["entropy_estimate"]
        logged |= {f"tools/{name}": figure for name, figure in tool_figures(rollouts).items()}
        self.log_now(logged | ({} if entropy is None else {"sampling/entropy_estimate": entropy}))  # as in GRPO

    def _lay_out(self, step: int, rows: Sequence[Row], done: int) -> None:
        """Plan the step's optimizer steps on these rows, of which the first `done` are over."""
        labeled = [
            {
                "input_ids": row["input_ids"],
                "labels": [i if m else -100 for i, m in zip(row["input_ids"], row["completion_mask"], strict=True)],
            }
            for row in rows
        ]
        plan = optimizer_steps(
            labeled, self.args.rows_per_optimizer_step, self.args.epochs_per_step, f"{self.args.seed} {step}"
        )
        self._left, self._planned = plan[done:], len(plan)
        later = (self.args.n_ei_steps - step) * max(len(plan), 1)
        self.state.max_steps = max(self.state.global_step + len(self._left) + later, 1)  # as far as it is known by now

    def _rollouts(self, step: int) -> list[Row] | None:
        """The step's graded rollouts: what an interrupted process has written, and the others sampled now.

        None if the run has to stop before it has all of them.
        """
        folder = self._step_folder(step)
        chosen = questions_of_step(len(self.questions), self.args.questions_per_step, step, self.args.seed)
        todo = [(n, self.questions[i]) for n, i in enumerate(chosen) for _ in range(self.args.group_size)]
        rows = run_on_main_and_broadcast(lambda: _rows_of_whole_chunks(folder, len(todo), self.args.rollout_chunk))
        bar = tqdm(
            total=len(todo),
            initial=len(rows),
            desc=f"rollouts of step {step}",
            disable=self.args.disable_tqdm or not self.accelerator.is_main_process or None,  # None: in a terminal only
            leave=False,
        )
        with bar:
            for start in range(len(rows), len(todo), self.args.rollout_chunk):
                if start and self._is_to_stop():
                    return None
                part = todo[start : start + self.args.rollout_chunk]
                rows += self._sample_and_grade(part, seed=derive_seed(self.args.seed, step * 10_007 + start))
                if self.accelerator.is_main_process:
                    append_jsonl(folder / ROLLOUTS, rows[start:])
                bar.update(len(part))
        return rows

    def _sample_and_grade(self, part: Sequence[tuple[int, Row]], seed: int) -> list[Row]:
        asked = [row for _, row in part]
        prompts, size = [row["prompt"] for row in asked], self.args.rollout_batch_size
        completions = self.sample(prompts, size, seed, purpose="sampling", rows=asked)
        rows = run_on_main_and_broadcast(lambda: grade_rows(asked, completions, self.grader))
        return [{"question": n, **row} for (n, _), row in zip(part, rows, strict=True)]

    def _step_folder(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    # What a resumed run needs in addition to what `Trainer` saves.

    def resume_state(self) -> dict[str, Any]:
        """The expert-iteration step, and how many of its optimizer steps are left."""
        return super().resume_state() | {
            "ei_step": self.ei_step,
            "ei_left": len(self._left),
            "rows_per_step": self.args.rows_per_optimizer_step,
            "seconds_of_rollouts": self._seconds_of_rollouts,
        }

    def load_resume_state(self, state: dict[str, Any] | None) -> None:
        """Resume within the step, on the rows that it kept; later steps that had begun are sampled again."""
        super().load_resume_state(state)
        if state is None:
            return
        self.ei_step = state["ei_step"]
        self._seconds_of_rollouts = state.get("seconds_of_rollouts", 0.0)
        if self.accelerator.is_main_process:
            _forget_after(self.folder, self.ei_step + (0 if self.args.resume_changed else 1))
        self.accelerator.wait_for_everyone()
        if state["ei_left"]:
            kept = run_on_main_and_broadcast(lambda: read_jsonl(self._step_folder(self.ei_step) / KEPT))
            rows, _ = tokenized(kept, self._tokenizer, self.args.max_length)
            per_epoch = math.ceil(len(rows) / self.args.rows_per_optimizer_step)
            self._lay_out(self.ei_step, rows, done=self.args.epochs_per_step * per_epoch - state["ei_left"])


def _nothing_yet() -> Any:
    """TRL looks at a row when the trainer is made."""
    yield {"input_ids": [0, 0], "labels": [0, 0]}


def _rows_of_whole_chunks(folder: Path, wanted: int, chunk: int) -> list[Row]:
    """The rollouts in a step's folder, which is created; those of an incomplete chunk are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    path, rows = folder / ROLLOUTS, []
    if path.exists():
        drop_torn_line(path)
        rows = read_jsonl(path)
    rows = rows[: len(rows) - len(rows) % chunk] if len(rows) < wanted else rows
    write_jsonl(path, rows)
    return rows


def _replace_row(path: Path, row: Row) -> None:
    """Append a step's row, which replaces those of the same and of later steps."""
    rows = read_jsonl(path) if path.exists() else []
    write_jsonl(path, [*(r for r in rows if r["step"] < row["step"]), row])


def _forget_after(folder: Path, step: int) -> None:
    """Remove the folders of later steps, which will be sampled again."""
    for path in folder.glob("step_*"):
        if int(path.name.partition("_")[2]) > step:
            shutil.rmtree(path)
