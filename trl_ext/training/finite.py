"""`FiniteSteps`: what makes a `Trainer` leave out optimizer steps whose gradient is not finite."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from trl_ext.io import write_text

_NAMED = 10  # parameters that a report names

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row had a gradient that is not finite."""


class FiniteSteps:
    """To be inherited beside a `Trainer`: one NaN must not cost the run its weights.

    Such a step is left out: weights and optimizer stay as they were, the schedule goes on. DeepSpeed leaves it out
    itself. The rows go to `nonfinite_step_N_rank_R.json` in the run's folder.

    Attributes:
        skipped_steps: in the whole run.
    """

    args: Any
    state: Any
    accelerator: Any
    model: Any
    skipped_steps: int = 0
    skipped_in_a_row: int = 0

    def rows_of_step(self) -> list[dict[str, Any]]:
        """What this rank has just trained on, for the report."""
        return []

    def cause_of_step(self) -> str:
        """Why its gradient is not finite, as far as that is known, after the words "has norm nan"."""
        return ""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        parent: Any = super()
        norm = parent._get_grad_norm(model, grad_norm=grad_norm)
        if norm is None or math.isfinite(float(norm)):
            self.skipped_in_a_row = 0
        else:
            self._leave_out(float(norm))
        return norm

    def _leave_out(self, norm: float) -> None:
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        path = self._report(norm)
        self.model.zero_grad(set_to_none=True)  # an optimizer passes over parameters without a gradient
        step = self.state.global_step + 1
        metrics: Any = getattr(self, "_metrics", None)
        if metrics is not None:
            metrics["train"]["skipped_steps"] = [self.skipped_steps]
        if self.skipped_in_a_row >= self.args.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} optimizer steps in a row, up to step {step}, had a gradient that is not "
                f"finite (norm {norm}{self.cause_of_step()}). What they were computed from is in {path}. Lower "
                "--learning_rate or --max_grad_norm, look at the rewards and at your own loss, and go on from the last "
                "checkpoint with --resume auto; --max_nonfinite_steps sets how many are borne"
            )
        if self.accelerator.is_main_process:
            cause = self.cause_of_step()
            log.warning("step %d is left out: its gradient has norm %s%s; see %s", step, norm, cause, path)

    def _report(self, norm: float) -> Path:
        step, rank = self.state.global_step + 1, self.accelerator.process_index
        named = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not parameter.grad.isfinite().all()
        ]
        report = {"step": step, "grad_norm": norm, "parameters": named[:_NAMED], "rows": self.rows_of_step()}
        path = Path(self.args.output_dir) / f"nonfinite_step_{step}_rank_{rank}.json"
        write_text(path, json.dumps(report, indent=1, ensure_ascii=False, default=str) + "\n")
        return path
