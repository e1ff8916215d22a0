"""`ReliableTrainer`: what GRPO and SFT both need of a trainer that runs for days.

Atomic checkpoints from which a run resumes bit-identically, skipping of optimizer steps with a non-finite gradient, a
checkpoint on SIGTERM, and completions of the current policy. What it overrides of `Trainer`, in call order:

    Trainer
      _build_accelerator_args       layers are compiled, not the model
      train                         refuses a checkpoint that cannot be continued as it was
      _load_from_checkpoint         the policy's adapter, also next to a reference's
      _get_train_sampler            kept, to replay the data order of earlier epochs
      _load_callback_state          in place
      _prepare_for_training         notes the checkpoint to resume from
      _evaluate                     not at the start of a resumed run
      _run_epoch                    ends before the first step where a callback asked for it, and where SIGTERM came
        _load_rng_state             the last call before the first step: restores our state
        (get_batch_samples, training_step: see grpo/trainer.py and imitation/sft.py)
        compute_loss                sums up a step's losses
        _get_grad_norm              skips a step whose gradient is not finite
        _maybe_log_save_evaluate    keeps the states of generators, for a checkpoint of the step that is just over
        _save_checkpoint            in a scratch folder, renamed into place when it is complete
          _get_output_dir           the scratch folder
          _save                     with the generation config that rollouts are sampled with
          _push_from_checkpoint     after that
      _finalize_training            restores our state where there was no step left
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin, is_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from trl.models import unwrap_model_for_generation

from trl_ext.compat import install
from trl_ext.compat.compilation import check_compilation, compile_layers
from trl_ext.compat.quantized import keep_gradients
from trl_ext.compat.torch_on_cpu import loading_to_numbered_cpus
from trl_ext.errors import InputError, NotSavedError, ServerError
from trl_ext.generation.completion import Completion, entropy_estimates
from trl_ext.generation.hf import hf_generate, is_finished
from trl_ext.generation.interruption import SamplingStopped, to_the_end
from trl_ext.generation.model_source import ADAPTER
from trl_ext.generation.policy import overridden, without_dropout
from trl_ext.generation.progress import reporting
from trl_ext.generation.request_seeds import Place
from trl_ext.generation.sampling import (
    rollout_settings,
    samples_whole_distribution,
    sampling_config,
    saved_config,
    shown,
    without_adapter,
)
from trl_ext.generation.token_logprobs import TokenLogProbs
from trl_ext.generation.tokens import completion_texts, prompt_ids
from trl_ext.io import is_disk_fault
from trl_ext.ranks import gather_on_main, run_on_main_and_broadcast
from trl_ext.runs.checkpoints import (
    SCRATCH,
    checkpoints,
    commit_checkpoint,
    prune,
    refuse_missing_parts,
    state_file,
    write_manifest,
)
from trl_ext.runs.continuation import Resuming, refuse_what_does_not_continue, state_of_rank
from trl_ext.runs.layout import RUN_RECORD, checkpoint_name
from trl_ext.training.checkpoint_state import (
    ALLOCATOR,
    RngStates,
    from_plain,
    load_reference,
    load_states_of_callbacks,
    restore_exportable,
    save_reference,
    states_of_callbacks,
    to_plain,
    without_state,
)
from trl_ext.training.faults import NonFiniteError, lack_of_room, loss_scale, write_report
from trl_ext.training.policy_tools import PolicyTools
from trl_ext.training.preemption import StopOnSigterm
from trl_ext.training.trackers import send_table, trackers_last

log = logging.getLogger(__name__)


class ReliableTrainer(Trainer):
    """Mixin for TRL's trainers, inherited before one of them."""

    args: Any  # of TRL's config, with `RunSettings`
    use_vllm: bool
    _tr_loss: Tensor
    _metrics: Any
    _total_train_tokens: Any
    run_record: Callable[[], dict[str, Any]] | None = None  # the run's own record as JSON, for every checkpoint
    best_step: int | None = None  # whose checkpoint is kept regardless of `save_total_limit`
    stop_signal: int | None = None  # stopped the run early
    failed_saves: int = 0  # checkpoints that could not be written
    seconds_to_save: float = 0.0  # of the slowest checkpoint so far
    steps_of_scaler: int = 0  # optimizer steps that float16's loss scaler skipped to lower its scale
    skipped_steps: int = 0  # other optimizer steps with a non-finite gradient in the whole run
    skipped_in_a_row: int = 0  # the latest of them, without a finite one in between
    last_rollout: Sequence[dict[str, Any]] = ()  # this rank's rows of training, for the log and for a skipped step
    restored_step: int | None = None  # whose weights the run ends with, where they are not the last
    policy_tools: PolicyTools | None = None  # of the setting `tools`
    generated_logps: Sequence[Sequence[float | None]] | None = None  # of the tokens generated last; None if unknown
    resumed: Sequence[str] = ()  # other attributes that a checkpoint has, by their names
    _compiling: TorchDynamoPlugin | None = None  # how layers are, if they are
    _nonfinite: str = ""  # why a gradient may not be finite: continues a sentence that ends with "has norm nan"
    _step_loss: Tensor | None = None  # this rank's sum over the micro-batches of a step
    _being_pushed: Sequence[Path] = ()
    _to_restore: str | None = None
    _sampler: Any = None
    _listener: StopOnSigterm | None = None
    _rng_after_step: RngStates | None = None  # where a checkpoint of it would have had them
    _rng_at_epoch: Tensor | None = (
        None  # torch's, from which a sampler without a generator draws the order of the epoch
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install()
        super().__init__(*args, **kwargs)
        keep_gradients(self.model)
        if self._compiling is not None:
            for model in (self.model, getattr(self, "ref_model", None)):
                if model is not None:
                    compile_layers(self.accelerator.unwrap_model(model), self._compiling)

    # Overrides, in the order in which `Trainer` calls them.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Without what would have accelerate compile a wrapper around the model, which a step does not always call."""
        check_compilation(self.args)
        given: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        if given["dynamo_plugin"].backend != DynamoBackend.NO:
            self._compiling = given["dynamo_plugin"]
        return given | {"dynamo_plugin": TorchDynamoPlugin(backend="no")}

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Refuse a checkpoint that cannot be continued as it was, on all ranks alike, before anything is read of it."""
        asked = resume_from_checkpoint
        checkpoint = get_last_checkpoint(self.args.output_dir) if asked is True else asked or None
        if checkpoint is not None:
            who, changed = self._resuming(), self.args.resume_changed
            check = functools.partial(refuse_what_does_not_continue, Path(checkpoint), who, changed)
            lines = run_on_main_and_broadcast(check, InputError)
            for line in lines if self.accelerator.is_main_process else ():
                log.warning("%s", line)
        with loading_to_numbered_cpus():
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the policy's adapter too where another one, such as TRL's reference, lies in a folder below it."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        policy: Any = self.model if model is None else model
        below = any(Path(resume_from_checkpoint).glob("*/adapter_model.safetensors"))
        if below and is_peft_model(policy) and (Path(resume_from_checkpoint) / ADAPTER).is_file():
            policy.load_adapter(resume_from_checkpoint, policy.active_adapters[0], is_trainable=True)

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Any:
        self._sampler = super()._get_train_sampler(train_dataset)
        return self._sampler

    def _load_callback_state(self) -> None:
        if self.args.restore_callback_states_from_checkpoint:
            super()._load_callback_state()
        else:
            restore_exportable(self.callback_handler.callbacks, self.state.stateful_callbacks)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader[Any], resume_from_checkpoint: str | None
    ) -> Any:
        self._to_restore = resume_from_checkpoint
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _evaluate(
        self, trial: object, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Leave out `eval_on_start` in a resumed run."""
        if self._to_restore is not None:  # it has been evaluated at its start
            return {}
        metrics: dict[str, float] | None = None
        # A checkpoint comes after it, and has the states of the generators that it draws from.
        with to_the_end() if self.stop_signal is not None else self.stopping_early():
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if metrics is None:
            self.control.should_save = False
        return metrics or {}

    def _run_epoch(self, *, epoch: int, epochs_trained: int, resume_from_checkpoint: str | None, **kwargs: Any) -> Any:
        """Handle four cases that `Trainer` does not.

        A callback stopped the run before the first step; a resumed run needs the data orders of its earlier epochs
        drawn; a resumed run has no step left; SIGTERM ended a rollout, so that no further step is made.
        """
        if self.control.should_training_stop:
            return None
        if resume_from_checkpoint is not None and epoch == epochs_trained:
            if self.state.global_step >= self.state.max_steps:
                self.control.should_training_stop = True
                return None
            self._draw_orders_before(epoch, is_begun=kwargs["steps_trained_in_current_epoch"] > 0)
        else:
            self._rng_at_epoch = torch.get_rng_state()
        with self.stopping_early():
            super()._run_epoch(
                epoch=epoch, epochs_trained=epochs_trained, resume_from_checkpoint=resume_from_checkpoint, **kwargs
            )

    def _draw_orders_before(self, epoch: int, is_begun: bool) -> None:
        """Have the sampler draw the order of this epoch as it did: from its own generator, or from torch's."""
        self._rng_at_epoch = None
        generator = getattr(self._sampler, "generator", None)
        for _ in range(epoch if generator is not None else 0):
            torch.randperm(len(self._sampler.data_source), generator=generator)
        checkpoint = Path(self._to_restore) if self._to_restore is not None and is_begun else None
        state = state_of_rank(checkpoint, self.accelerator.process_index, mapped=True) if checkpoint else None
        if state is not None and "rng_at_epoch" in state:
            self._rng_at_epoch = state["rng_at_epoch"].clone()
            torch.set_rng_state(self._rng_at_epoch)  # `_load_rng_state` sets that of the step

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore our state too: `Trainer` calls this last when it resumes, just before the first step."""
        super()._load_rng_state(checkpoint)
        self._to_restore = None
        if self._rng_at_epoch is None:  # the epoch begins here
            self._rng_at_epoch = torch.get_rng_state()
        if checkpoint is not None:
            load_reference(self, Path(checkpoint))
            self.load_resume_state(state_of_rank(Path(checkpoint), self.accelerator.process_index))

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; the sum over a step tells whether the loss itself is finite where its gradient is not."""
        computed = super().compute_loss(*args, **kwargs)
        loss = (computed[0] if isinstance(computed, tuple) else computed).detach()
        if self.model.training:
            self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        return computed

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is None or math.isfinite(float(norm)):
            self.skipped_in_a_row = 0
        elif (scale := loss_scale(self.accelerator)) is not None and self._losses_are_finite():
            self._count_step_of_scaler(scale)
        else:
            self._skip_step(float(norm))
        self._step_loss = None
        return norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._rng_after_step = RngStates()

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        began = time.monotonic()
        self._save_atomically(model, trial)
        self.seconds_to_save = max(self.seconds_to_save, time.monotonic() - began)

    def _get_output_dir(self, trial: object) -> str:
        """The run's folder, or what `_save_atomically` passes as a trial: where a checkpoint is written."""
        return str(trial if isinstance(trial, Path) else super()._get_output_dir(trial))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save a generation config with every model, also where an adapter's has none: how it was sampled."""
        super()._save(output_dir, state_dict)
        model = without_adapter(self.accelerator.unwrap_model(self.model))
        saved_config(model.generation_config, self.args.stop).save_pretrained(output_dir or self.args.output_dir)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint in the background once it is in its place, and keep it until the upload has finished."""
        if Path(checkpoint_folder).parent.name == SCRATCH:
            return
        progress = getattr(self, "push_in_progress", None)  # set on the first rank only
        if progress is None or progress.is_done():
            self._being_pushed = []
        before = self._uploads()
        super()._push_from_checkpoint(checkpoint_folder)
        if self._uploads() != before:
            self._being_pushed = [*self._being_pushed, Path(checkpoint_folder)]

    def _finalize_training(self, *args: Any) -> Any:
        if self._to_restore is not None:  # there was no step left
            self._load_rng_state(self._to_restore)
            self.model.train()  # TRL logs its pending metrics by this mode
        with trackers_last(self.callback_handler.callbacks):
            return super()._finalize_training(*args)

    # State of a resumed run that `Trainer` does not save.

    def resume_state(self) -> dict[str, Any]:
        """This rank's additional state: tensors, numbers, texts, and lists and dicts of them."""
        return {
            "tr_loss": self._tr_loss.clone(),
            "total_loss_scalar": self._total_loss_scalar,
            "globalstep_last_logged": self._globalstep_last_logged,
            "seconds_to_save": self.seconds_to_save,
            "_metrics": to_plain(self._metrics),  # TRL's, pending for the next log
            "_total_train_tokens": self._total_train_tokens,
            "steps_of_scaler": self.steps_of_scaler,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "rng_at_epoch": self._rng_at_epoch,
            "callbacks": states_of_callbacks(self.callback_handler.callbacks),
            "without_state": without_state(self.callback_handler.callbacks, self.model),
            **{name: to_plain(getattr(self, name)) for name in self.resumed},
        }

    def load_resume_state(self, state: dict[str, Any] | None) -> None:
        """Restore `resume_state`; None where the checkpoint has none, as TRL's own."""
        if state is None:
            return
        self._tr_loss = state["tr_loss"].to(self._tr_loss.device)
        self._total_loss_scalar = state["total_loss_scalar"]
        self._initial_global_step = 0  # newer transformers: the loss of all steps is divided by all steps, as before
        self._globalstep_last_logged = state["globalstep_last_logged"]
        self.seconds_to_save = max(self.seconds_to_save, state.get("seconds_to_save", 0.0))
        self._metrics = from_plain(self._metrics, state.get("_metrics", self._metrics))
        self._total_train_tokens = state.get("_total_train_tokens", self._total_train_tokens)
        self.steps_of_scaler = state.get("steps_of_scaler", 0)  # earlier versions did not count them
        self.skipped_steps = state.get("skipped_steps", 0)
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)
        load_states_of_callbacks(self.callback_handler.callbacks, state.get("callbacks", {}))
        for name in (name for name in self.resumed if name in state):  # earlier versions kept fewer of these
            setattr(self, name, from_plain(getattr(self, name), state[name]))

    def _resuming(self) -> Resuming:
        sharded_by = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP" if self.is_fsdp_enabled else None
        names = [type(callback).__name__ for callback in self.callback_handler.callbacks]
        syncs = bool(getattr(self.args, "sync_ref_model", False))
        rows = getattr(self.args, "rows_per_optimizer_step", None)
        return Resuming(self.accelerator.num_processes, sharded_by, syncs, [*names, ALLOCATOR], rows)

    # Saving.

    def save_checkpoint_now(self) -> None:
        """Save outside of a step, such as before the first one."""
        self._save_checkpoint(self.model, None)

    @contextlib.contextmanager
    def saving_last_step(self) -> Iterator[None]:
        """Save a checkpoint of the last optimizer step if the block, which has begun the next one, is ended early.

        That is where SIGTERM came while it sampled, or where it has lost its server. Nothing else that a checkpoint has
        changes before the completions are there.
        """
        state = copy.deepcopy(self.resume_state())
        try:
            yield
        except (ServerError, SamplingStopped):
            step, run = self.state.global_step, Path(self.args.output_dir)
            wanted = step and self.args.save_strategy != "no"
            if wanted and not run_on_main_and_broadcast((run / checkpoint_name(step)).exists):
                if self._rng_after_step is not None:
                    self._rng_after_step.restore()
                self._save_atomically(self.model, None, state)
            raise

    def restore_weights(self, checkpoint: Path) -> None:
        """Load the model's weights from a checkpoint of this run, as `Trainer` does at the end of a training."""
        self.state.best_model_checkpoint = str(checkpoint)
        self._load_best_model()
        self.invalidate_engine_weights()

    def sync_engine(self) -> None:
        """Push the policy's weights, unless a step has not been made since."""
        if self._last_loaded_step != self.state.global_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step: int = self.state.global_step

    def invalidate_engine_weights(self) -> None:
        """Force a weight sync before the next generation, though no step was done."""
        self._last_loaded_step = -1

    def _save_atomically(self, model: nn.Module, trial: object, state: dict[str, Any] | None = None) -> None:
        run = Path(self.args.output_dir)
        room = lack_of_room(run, self.accelerator)
        if room is not None:
            self._warn_not_saved(room)
            return
        scratch = self._make_scratch(checkpoint_name(self.state.global_step))
        try:
            if trial is None:
                self.store_flos()
            super()._save_checkpoint(model, run / SCRATCH)  # there `Trainer` finds no earlier one to remove
            save_reference(self, scratch)
            best = self._name_best(run, scratch)
            state = state or self.resume_state()
            now = {name: value() if callable(value) else value for name, value in state.items()}  # what was on its way
            torch.save(now, scratch / state_file(self.accelerator.process_index))
            self.accelerator.wait_for_everyone()
            ranks = self.accelerator.num_processes
            run_on_main_and_broadcast(lambda: refuse_missing_parts(scratch, ranks))
            if self.accelerator.is_main_process:
                if self.run_record is not None:
                    (scratch / RUN_RECORD).write_text(json.dumps(self.run_record()) + "\n", encoding="utf-8")
                write_manifest(scratch, ranks)
                commit_checkpoint(scratch, run)
        except Exception as error:  # of whatever library was writing
            if self.accelerator.num_processes > 1 or not is_disk_fault(error):
                raise  # the other ranks wait in a collective, or the fault is not the disk's
            shutil.rmtree(run / SCRATCH, ignore_errors=True)
            self._warn_not_saved(str(error))
            return
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run / scratch.name))
        if self.accelerator.is_main_process:
            keep = [run / checkpoint_name(step) for step in (self.best_step, best) if step is not None]
            prune(run, self.args.save_total_limit, [*keep, *self._being_pushed])
        self.accelerator.wait_for_everyone()

    def _make_scratch(self, name: str) -> Path:
        """An empty folder of this name in the run's scratch folder, without anything next to it."""
        scratch = Path(self.args.output_dir) / SCRATCH
        if self.accelerator.is_main_process:
            shutil.rmtree(scratch, ignore_errors=True)
            (scratch / name).mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        return scratch / name

    def _uploads(self) -> list[Any]:
        progress = getattr(self, "push_in_progress", None)
        return list(progress.jobs) if progress is not None else []

    def save_final_model(self) -> None:
        """Write model and tokenizer into the run's folder, each file atomically, or raise `NotSavedError`."""
        run = Path(self.args.output_dir)
        scratch = self._make_scratch("model")
        try:
            self.save_model(str(scratch), _internal_call=True)  # else it would push as well
            self.accelerator.wait_for_everyone()
            for path in sorted(scratch.iterdir()) if self.accelerator.is_main_process else ():
                if (path / ADAPTER).is_file():  # the reference of an adapter that was trained further
                    continue
                if path.is_dir():
                    shutil.rmtree(run / path.name, ignore_errors=True)
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
        """Correct the path of `Trainer`'s own best checkpoint, sought in the scratch folder; return its step."""
        best: int | None = self.state.best_global_step
        place = run / checkpoint_name(best or 0)
        if best and (place.exists() or place.name == scratch.name):
            self.state.best_model_checkpoint = str(place)
            if self.args.should_save:
                self.state.save_to_json(str(scratch / TRAINER_STATE_NAME))
        return best

    def _warn_not_saved(self, why: str) -> None:
        self.failed_saves += 1
        if self.accelerator.is_main_process:
            last = next(iter(checkpoints(Path(self.args.output_dir))), None)
            log.warning(
                "no checkpoint at step %d: %s. Training continues; the last checkpoint is %s. Make room, or lower "
                "--save_total_limit next time.", self.state.global_step, why, last or "none",
            )  # fmt: skip

    @property
    def _mode_metrics(self) -> dict[str, list[float]]:
        """The values by name that TRL's next log averages, of training or of an evaluation."""
        metrics: dict[str, list[float]] = self._metrics["train" if self.model.training else "eval"]
        return metrics

    def _losses_are_finite(self) -> bool:
        """Whether all ranks' losses of the step are, which no scale of theirs would change; a collective operation."""
        loss = torch.zeros(1, device=self.accelerator.device) if self._step_loss is None else self._step_loss.view(1)
        return bool(self.accelerator.gather(loss.isfinite()).all())

    def _count_step_of_scaler(self, scale: float) -> None:
        """A step that the scaler skips by itself is no fault, and none in a row."""
        self.steps_of_scaler += 1
        self.model.zero_grad(set_to_none=True)
        self._metrics["train"]["steps_of_scaler"] = [self.steps_of_scaler]
        if self.accelerator.is_main_process:
            step = self.state.global_step + 1
            log.info("step %d is skipped by float16's loss scaler, which lowers its scale of %g", step, scale)

    def _skip_step(self, norm: float) -> None:
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        step = self.state.global_step + 1
        path = Path(self.args.output_dir) / f"nonfinite_step_{step}_rank_{self.accelerator.process_index}.json"
        write_report(path, self.model, step, norm, self.last_rollout)
        self.model.zero_grad(set_to_none=True)  # an optimizer skips parameters without a gradient
        self._metrics["train"]["skipped_steps"] = [self.skipped_steps]
        if self.skipped_in_a_row >= self.args.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} optimizer steps in a row, up to step {step}, had a gradient that is not "
                f"finite (norm {norm}{self._nonfinite}). Their rows are in {path}. Lower --learning_rate or "
                "--max_grad_norm, look at the rewards and at your own loss, and resume from the last checkpoint with "
                "--resume auto; raise --max_nonfinite_steps to tolerate more"
            )
        if self.accelerator.is_main_process:
            log.warning("step %d is skipped: its gradient has norm %s%s; see %s", step, norm, self._nonfinite, path)

    # SIGTERM.

    @contextlib.contextmanager
    def stopping_on_sigterm(self) -> Iterator[None]:
        """While the block trains, SIGTERM finishes the step, saves a checkpoint and ends the training.

        A process on its own does not wait for what it is sampling: a rollout is left out, and the checkpoint is of the
        step before it. Several have to agree, and where weights are sharded they sample together.
        """
        callback = self._listener = StopOnSigterm(self)
        self.add_callback(callback)
        ends_sampling = callback.request.ending_sampling() if self._is_alone else contextlib.nullcontext()
        try:
            with callback.request.listening(), ends_sampling, self.stopping_early():
                yield
        finally:
            self.remove_callback(callback)

    @contextlib.contextmanager
    def stopping_early(self) -> Iterator[None]:
        """Where SIGTERM ends what the block samples, the block ends, and so does the training before its next step."""
        try:
            yield
        except SamplingStopped:
            self.stop_signal = signal.SIGTERM
            self.control.should_training_stop = True

    def stop_requested(self) -> bool:
        """Whether any rank received SIGTERM outside of a step; if so the run has to end. A collective operation."""
        if self._listener is not None and self._listener.has_come():
            self.stop_signal = signal.SIGTERM
        return self.stop_signal is not None

    @property
    def _is_alone(self) -> bool:
        """Whether no other process takes part, and no library shards what a checkpoint has."""
        return self.accelerator.num_processes == 1 and not (self.is_deepspeed_enabled or self.is_fsdp_enabled)

    # Completions of the current policy, on all ranks.

    def set_sampling(self, more: dict[str, Any]) -> None:
        """Sample by this run's settings alone, whatever the model arrived with, and save it with them.

        Args:
            more: further fields of a `GenerationConfig`, which come first.
        """
        model = without_adapter(self.model)
        tokens = {"pad_token_id": self._tokenizer.pad_token_id, "eos_token_id": self.eos_token_ids or None}
        sampling = sampling_config(model.generation_config, {**rollout_settings(self.args), **tokens, **more})
        model.generation_config = saved_config(sampling)
        if not self.use_vllm:
            self.generation_config = sampling

    def sampling_parameters(self, temperature: float | None = None, max_tokens: int | None = None) -> dict[str, Any]:
        """What the engine is told about sampling; of rollouts, or with these settings of `sample`."""
        with self._sampling(temperature, max_tokens):
            return self.vllm_generation.parameters() if self.use_vllm else shown(self.generation_config, self.args.stop)

    def turn_ids(self, prompts: list[list[int]]) -> list[list[int]]:
        """One completion of the current policy per prompt, as token ids; with tools it may end with a call."""
        raise NotImplementedError

    def completion_ids(self, prompts: list[str]) -> list[list[int]]:
        """One completion of the current policy per prompt, as token ids, those of tools among them."""
        ids = prompt_ids(self._tokenizer, prompts)
        first = self.turn_ids(ids)
        return first if self.policy_tools is None else self.policy_tools.continued(ids, first)

    def own_tokens(self, ids_of_rows: list[list[int]]) -> list[list[int]]:
        """Those of the responses that `completion_ids` returned last which the policy has sampled."""
        return ids_of_rows if self.policy_tools is None else self.policy_tools.own_ids()

    @property
    def most_tokens(self) -> int:
        """Of a response that is sampled now."""
        owner: Any = self.vllm_generation if self.use_vllm else self.generation_config
        return int(owner.max_completion_length if self.use_vllm else owner.max_new_tokens)

    def largest_of_ranks(self, number: int) -> int:
        """The largest of all ranks' numbers; a collective operation."""
        return int(self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).max())

    def log_now(self, logs: dict[str, float]) -> None:
        """Log at the current step without flushing the training metrics that TRL collects for its next log."""
        due = self.control.should_log
        Trainer.log(self, logs)  # past TRL's
        self.control.should_log = due  # Trainer takes any log for the step's own and would leave that one out

    def log_table(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Show responses as a table in the trackers."""
        send_table(self.callback_handler.callbacks, name, rows, self.state.global_step)

    def sample(
        self,
        prompts: Sequence[str],
        batch_size: int,
        seed: int,
        temperature: float | None = None,
        max_tokens: int | None = None,
        purpose: str = "validation",
        rows: Sequence[Mapping[str, Any]] = (),
    ) -> list[Completion]:
        """Sample one completion per prompt from the current policy, with the prompts split across ranks.

        The training's random state stays unchanged, so validating more often changes nothing else.

        Args:
            batch_size: of HF generate; vLLM takes all prompts at once.
            temperature: None for the rollouts'; 0 means greedy decoding.
            max_tokens: None for the rollouts'.
            purpose: what the lines of progress call it.
            rows: the problems, for tools that are environments.

        Returns:
            On the main process, completions in the order of the prompts; elsewhere nothing, since nobody reads them.
        """
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        places = list(range(rank, len(prompts), ranks))
        places += [0] * (-(-len(prompts) // ranks) - len(places))  # equal on all ranks, or collectives would hang
        mine, problems = [prompts[n] for n in places], [rows[n] for n in places if rows]
        batch_size = len(mine) if self.use_vllm else batch_size
        is_greedy = (self.args.temperature if temperature is None else temperature) == 0
        seeded = self.vllm_generation.measuring(seed) if self.use_vllm else contextlib.nullcontext()
        longest = max_tokens or self.args.max_completion_length
        with (
            reporting(f"{purpose} after step {self.state.global_step}", len(mine), longest),
            torch.random.fork_rng(enabled=True),
            torch.no_grad(),
            self._sampling(temperature, max_tokens),
            seeded,
        ):
            torch.manual_seed(seed + rank)
            completions = self._sample_in_batches(mine, max(batch_size, 1), is_greedy, problems)
        gathered = gather_on_main([completions])  # one list per rank
        return [gathered[i % ranks][i // ranks] for i in range(len(prompts))] if gathered else []

    def _sample_in_batches(
        self, prompts: Sequence[str], size: int, is_greedy: bool, problems: Sequence[Mapping[str, Any]]
    ) -> list[Completion]:
        """This rank's completions, in the order of the prompts."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # similar lengths need little padding
        completions: dict[int, Completion] = {}
        for start in range(0, len(prompts), size):
            chosen = order[start : start + size]
            if self.policy_tools is not None:
                self.policy_tools.rows = [problems[i] for i in chosen if problems]
            with without_dropout(self.model):
                ids_of_rows = self.completion_ids([prompts[i] for i in chosen])
            finished, ids_of_rows = self._is_finished(ids_of_rows), self.own_tokens(ids_of_rows)
            told = [None] * len(chosen) if self.policy_tools is None else self.policy_tools.told()
            texts = completion_texts(self._tokenizer, ids_of_rows, self.eos_token_ids)
            entropies = entropy_estimates(ids_of_rows, None if is_greedy else self.generated_logps)
            rows = zip(chosen, texts, ids_of_rows, finished.tolist(), entropies, told, strict=True)
            for i, text, ids, end, entropy, turns in rows:
                completions[i] = Completion(text, len(ids), end, entropy_estimate=entropy, turns=turns)
        return [completions[i] for i in range(len(prompts))]

    def place_in_run(self) -> Place:
        """Whether the next completions are for training or an evaluation, and the optimizer steps before them."""
        return "train" if self.model.training else "eval", self.state.global_step

    def _sampling(self, temperature: float | None, max_tokens: int | None) -> contextlib.AbstractContextManager[None]:
        """Override the rollouts' sampling settings of the engine while the block runs."""
        owner: Any = self.vllm_generation if self.use_vllm else self.generation_config
        asked: dict[str, Any] = {"max_completion_length" if self.use_vllm else "max_new_tokens": max_tokens}
        if self.use_vllm:
            replaced = {"temperature": temperature, "max_tokens": max_tokens}  # TRL lets `generation_kwargs` win
            kept = {n: v for n, v in owner.generation_kwargs.items() if replaced.get(n) is None}
            asked |= {"temperature": temperature, "generation_kwargs": kept}
        elif temperature is not None:
            asked |= {"do_sample": temperature > 0, "temperature": temperature or 1.0}
        return overridden(owner, asked)

    def _hf_completion_ids(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Generate with HF generate; a collective operation where weights are sharded."""
        logps = TokenLogProbs(len(prompt_ids), self.generation_config.temperature or 1.0)
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=getattr(self.args, "ds3_gather_for_generation", True),
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            completion_ids = hf_generate(
                model, self._tokenizer, prompt_ids, self.generation_config, self.args.stop, logps
            )
        self._keep_logps(completion_ids, logps)
        return completion_ids

    def _keep_logps(self, completion_ids: list[list[int]], recorded: TokenLogProbs) -> None:
        """Keep what HF generate recorded, if tokens were drawn from what it recorded."""
        self.generated_logps = None
        if samples_whole_distribution(self.generation_config):  # beams have no row of their own
            rows = zip(recorded.rows(), completion_ids, strict=True)
            self.generated_logps = [row[: len(ids)] for row, ids in rows]

    def _is_finished(self, completion_ids: list[list[int]]) -> Tensor:
        stop, minimum = self.args.stop, self.args.sampling_min_tokens or 0
        return is_finished(completion_ids, self._tokenizer, self.eos_token_ids, stop, minimum)
