"""`WholeCheckpoints`: what makes a `Trainer` save checkpoints whole, with all that its run needs to go on as it was."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME

from trl_ext.compat.torch_devices import load_to_numbered_cpus
from trl_ext.errors import NotSavedError
from trl_ext.io import is_disk_fault
from trl_ext.runs.checkpoints import SCRATCH, checkpoints, prune, publish, seal, size
from trl_ext.runs.layout import RUN_RECORD
from trl_ext.training.preemption import StopOnSigterm

_SPARE = 1.05  # of the last checkpoint's size, which the next one will not differ much from

log = logging.getLogger(__name__)

load_to_numbered_cpus()


class WholeCheckpoints:
    """To be inherited beside a `Trainer`: atomic checkpoints, and the state that `Trainer` forgets.

    Attributes:
        run_record: what the run wants to find again beside the trainer's state, as JSON; asked for at every save.
        best_step: the step whose checkpoint is kept whatever `save_total_limit` says, if there is one.
        stop_signal: what told the run to stop before its end.
        failed_saves: checkpoints that could not be written.
        seconds_to_save: what the slowest checkpoint has taken.
    """

    args: Any
    state: Any
    accelerator: Any
    model: Any
    run_record: Callable[[], dict[str, Any]] | None = None
    best_step: int | None = None
    stop_signal: int | None = None
    failed_saves: int = 0
    seconds_to_save: float = 0.0
    _saving: Path | None = None
    _being_pushed: Sequence[Path] = ()
    _to_restore: str | None = None
    _sampler: Any = None
    _listener: StopOnSigterm | None = None

    @contextlib.contextmanager
    def stopping_on_sigterm(self) -> Iterator[None]:
        """While the block trains, SIGTERM lets the step end, saves a checkpoint and ends the training."""
        trainer: Any = self
        callback = self._listener = StopOnSigterm(self)
        trainer.add_callback(callback)
        try:
            with callback.listening():
                yield
        finally:
            trainer.remove_callback(callback)

    def stop_requested(self) -> bool:
        """Whether SIGTERM has come to any rank while none trains; if so the run is to end. A collective operation."""
        if self._listener is not None and self._listener.has_come():
            self.stop_signal = signal.SIGTERM
        return self.stop_signal is not None

    def own_state(self) -> dict[str, Any]:
        """This rank's state beside what `Trainer` saves: tensors, numbers, texts, lists and dicts of them."""
        trainer: Any = self
        return {
            "tr_loss": trainer._tr_loss.clone(),
            "total_loss_scalar": trainer._total_loss_scalar,
            "globalstep_last_logged": trainer._globalstep_last_logged,
            "seconds_to_save": self.seconds_to_save,
        }

    def restore_own_state(self, state: dict[str, Any] | None) -> None:
        """Take `own_state` back; None where the checkpoint has none, as those of a stock trainer."""
        trainer: Any = self
        if state is not None:
            trainer._tr_loss = state["tr_loss"].to(trainer._tr_loss.device)
            trainer._total_loss_scalar = state["total_loss_scalar"]
            trainer._globalstep_last_logged = state["globalstep_last_logged"]
            self.seconds_to_save = max(self.seconds_to_save, state.get("seconds_to_save", 0.0))

    def _get_output_dir(self, trial: Any) -> str:
        if self._saving is not None:
            return str(self._saving)
        parent: Any = super()
        return str(parent._get_output_dir(trial))

    def save_checkpoint_now(self) -> None:
        """Outside of a step, such as before the first one."""
        self._save_checkpoint(self.model, None)

    def restore_weights(self, checkpoint: Path) -> None:
        """Take the model's weights from a checkpoint of this run, as `Trainer` does at the end of a training."""
        trainer: Any = self
        self.state.best_model_checkpoint = str(checkpoint)
        trainer._load_best_model()
        self.forget_engine_weights()

    def forget_engine_weights(self) -> None:
        """Have the engine that samples, if there is one, take the weights again though no step was done."""
        raise NotImplementedError

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        began = time.monotonic()
        self._save_whole(model, trial)
        self.seconds_to_save = max(self.seconds_to_save, time.monotonic() - began)

    def _save_whole(self, model: Any, trial: Any) -> None:
        run = Path(self.args.output_dir)
        room = self._lack_of_room(run)
        if room is not None:
            self._say_not_saved(room)
            return
        scratch = run / SCRATCH / f"checkpoint-{self.state.global_step}"
        if self.accelerator.is_main_process:
            shutil.rmtree(run / SCRATCH, ignore_errors=True)
            scratch.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        try:
            with self._writing_to(run / SCRATCH):
                parent: Any = super()
                parent._save_checkpoint(model, trial)
            best = self._name_best(run, scratch)
            torch.save(self.own_state(), scratch / _state_file(self.accelerator.process_index))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                if self.run_record is not None:
                    (scratch / RUN_RECORD).write_text(json.dumps(self.run_record()) + "\n", encoding="utf-8")
                seal(scratch)
                publish(scratch, run)
        except Exception as error:  # of whatever library was writing
            if self.accelerator.num_processes > 1 or not is_disk_fault(error):
                raise  # the other ranks wait in a collective; another fault will not pass by itself
            shutil.rmtree(run / SCRATCH, ignore_errors=True)
            self._say_not_saved(str(error))
            return
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run / scratch.name))
        if self.accelerator.is_main_process:
            keep = [run / f"checkpoint-{step}" for step in (self.best_step, best)]
            prune(run, self.args.save_total_limit, [*keep, *self._being_pushed])
        self.accelerator.wait_for_everyone()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Begin to upload a checkpoint in the background: not where it is written, but from its place when it is there.

        It is not removed before it has arrived.
        """
        if self._saving is not None:
            return
        progress = getattr(self, "push_in_progress", None)  # which the first rank alone has
        if progress is None or progress.is_done():
            self._being_pushed = []
        before = self._jobs()
        parent: Any = super()
        parent._push_from_checkpoint(checkpoint_folder)
        if self._jobs() != before:
            self._being_pushed = [*self._being_pushed, Path(checkpoint_folder)]

    def _jobs(self) -> list[Any]:
        progress = getattr(self, "push_in_progress", None)
        return list(progress.jobs) if progress is not None else []

    def save_final_model(self) -> None:
        """Put model and tokenizer into the run's folder, each file whole or as it was.

        Raises:
            NotSavedError: they cannot be written; with what to do.
        """
        run = Path(self.args.output_dir)
        scratch = run / SCRATCH / "model"
        trainer: Any = self
        if self.accelerator.is_main_process:
            shutil.rmtree(run / SCRATCH, ignore_errors=True)
            scratch.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        try:
            trainer.save_model(str(scratch), _internal_call=True)  # else it would push as well
            self.accelerator.wait_for_everyone()
            for path in sorted(scratch.iterdir()) if self.accelerator.is_main_process else ():
                path.replace(run / path.name)
        except Exception as error:  # of whatever library was writing
            last = next(iter(checkpoints(run)), "none")
            raise NotSavedError(
                f"the trained model could not be written into {run}: {error}. The last checkpoint is {last}; make room "
                "and run the same command with --resume auto"
            ) from error
        finally:
            if self.accelerator.is_main_process:
                shutil.rmtree(run / SCRATCH, ignore_errors=True)

    def _name_best(self, run: Path, scratch: Path) -> int | None:
        """Step of the best checkpoint by `Trainer`'s own evaluation, which it looked for where this one is written."""
        best: int | None = self.state.best_global_step
        place = run / f"checkpoint-{best}"
        if best and (place.exists() or place.name == scratch.name):
            self.state.best_model_checkpoint = str(place)
            if self.args.should_save:
                self.state.save_to_json(str(scratch / TRAINER_STATE_NAME))
        return best

    @contextlib.contextmanager
    def _writing_to(self, folder: Path) -> Iterator[None]:
        """`Trainer` writes its checkpoint there and removes none."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._saving = folder
        try:
            yield
        finally:
            self.args.save_total_limit, self._saving = limit, None

    def _lack_of_room(self, run: Path) -> str | None:
        """Why the disk has no room for another checkpoint; the same on every rank."""
        found = None
        last = checkpoints(run)[:1]
        if last and self.accelerator.is_main_process:
            needed, free = int(_SPARE * size(last[0])), shutil.disk_usage(run).free
            if free < needed:
                found = f"it needs about {needed / 1e9:.3g} GB and the disk of {run} has {free / 1e9:.3g} GB free"
        is_full = torch.tensor([found is not None], device=self.accelerator.device)
        return (found or "the disk is full") if self.accelerator.gather(is_full).any() else None

    def _say_not_saved(self, why: str) -> None:
        self.failed_saves += 1
        if self.accelerator.is_main_process:
            last = next(iter(checkpoints(Path(self.args.output_dir))), None)
            log.warning(
                "no checkpoint at step %d: %s. Training goes on, the last checkpoint is %s. Make room, or lower "
                "--save_total_limit next time.", self.state.global_step, why, last or "none",
            )  # fmt: skip

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """What `Trainer` calls last when it resumes, just before the first step."""
        parent: Any = super()
        parent._load_rng_state(checkpoint)
        self._to_restore = None
        if checkpoint is not None:
            path = Path(checkpoint) / _state_file(self.accelerator.process_index)
            state = torch.load(path, weights_only=True, map_location="cpu") if path.exists() else None
            self.restore_own_state(state)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._to_restore = resume_from_checkpoint
        parent: Any = super()
        return parent._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._to_restore is not None:  # there was no step left
            self._load_rng_state(self._to_restore)
            self.model.train()  # which TRL's log of what is pending goes by
        parent: Any = super()
        return parent._finalize_training(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        self._sampler = parent._get_train_sampler(*args, **kwargs)
        return self._sampler

    def _run_epoch(self, *, epoch: int, epochs_trained: int, resume_from_checkpoint: Any, **kwargs: Any) -> Any:
        """What `Trainer` forgets: that a callback ended it before the first step; orders of earlier epochs in a resumed
        run, and that of one nothing may be left.
        """
        trainer: Any = self
        if trainer.control.should_training_stop:
            return None
        if resume_from_checkpoint is not None and epoch == epochs_trained:
            if self.state.global_step >= self.state.max_steps:
                trainer.control.should_training_stop = True
                return None
            for _ in range(epoch if hasattr(self._sampler, "generator") else 0):
                torch.randperm(len(self._sampler.data_source), generator=self._sampler.generator)
        parent: Any = super()
        return parent._run_epoch(
            epoch=epoch, epochs_trained=epochs_trained, resume_from_checkpoint=resume_from_checkpoint, **kwargs
        )


def _state_file(rank: int) -> str:
    return f"trl_ext_{rank}.pt"
