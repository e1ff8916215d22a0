"""The names by which transformers hands metrics to TensorBoard, wandb, trackio and other trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.integrations import integration_utils

VALIDATIONS = "validation/"  # what the names of their metrics begin with


def keep_validation_names() -> None:
    """Let trackers show the metrics of validations by their own names, where transformers prefixes `train/`."""
    rewrite = integration_utils.rewrite_logs

    def renamed(logs: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in logs.items() if name.startswith(VALIDATIONS)}
        return own | rewrite({name: value for name, value in logs.items() if name not in own})

    integration_utils.rewrite_logs = renamed
