"""The names and the steps with which transformers hands metrics to TensorBoard, wandb, trackio and other trackers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from transformers.integrations import integration_utils

VALIDATIONS = "validation/"  # what the names of their metrics begin with
SUMMARY = "summary/"  # of the whole run

# Trackers group metrics by what stands before the first slash. Those of TRL stay under `train/`, next to stock runs.
_OURS = (
    VALIDATIONS,
    SUMMARY,
    *("sampling/", "dynamic_sampling/", "rollout_selection/", "expert_iteration/", "step/", "grader/"),
)
_TRLS = ("sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/")


def keep_names_of_ours() -> None:
    """Let trackers show our metrics in the sections of their own names, where transformers prefixes `train/`."""
    rewrite = integration_utils.rewrite_logs

    def renamed(logs: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in logs.items() if name.startswith(_OURS) and not name.startswith(_TRLS)}
        return own | rewrite({name: value for name, value in logs.items() if name not in own})

    integration_utils.rewrite_logs = renamed


class _AtStep:
    """The module trackio, with a `log` that names the optimizer step."""

    def __init__(self, trackio: Any, step: int) -> None:
        self._trackio, self.log = trackio, functools.partial(trackio.log, step=step)

    def __getattr__(self, name: str) -> object:
        return getattr(self._trackio, name)


def draw_by_step_in_trackio() -> None:
    """Have trackio's axis count optimizer steps, where it counts the calls of `log`, TRL's timers among them."""
    send = integration_utils.TrackioCallback.on_log

    @functools.wraps(send)
    def on_log(self: Any, args: object, state: Any, control: object, **kwargs: object) -> None:
        trackio = self._trackio
        self._trackio = _AtStep(trackio, state.global_step)
        try:
            send(self, args, state, control, **kwargs)
        finally:
            self._trackio = trackio

    integration_utils.TrackioCallback.on_log = on_log
