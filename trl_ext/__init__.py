"""Reinforcement learning on math with a language model: a plug-in for TRL's `GRPOTrainer`.

Importing the package loads neither trl nor vllm; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_ext.advantages import ADVANTAGES
    from trl_ext.aggregation import AGGREGATIONS
    from trl_ext.config import ExtGRPOConfig
    from trl_ext.kl import KL_ESTIMATORS
    from trl_ext.losses import POLICY_LOSSES
    from trl_ext.presets import PRESETS
    from trl_ext.rewards import REWARDS
    from trl_ext.trainer import ExtGRPOTrainer
    from trl_ext.types import LossInputs, StepTotals, TokenLoss

__version__ = "0.1.0"

_WHERE = {
    "ADVANTAGES": "advantages",
    "AGGREGATIONS": "aggregation",
    "ExtGRPOConfig": "config",
    "ExtGRPOTrainer": "trainer",
    "KL_ESTIMATORS": "kl",
    "LossInputs": "types",
    "POLICY_LOSSES": "losses",
    "PRESETS": "presets",
    "REWARDS": "rewards",
    "StepTotals": "types",
    "TokenLoss": "types",
}

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "PRESETS",
    "REWARDS",
    "ExtGRPOConfig",
    "ExtGRPOTrainer",
    "LossInputs",
    "StepTotals",
    "TokenLoss",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"trl_ext.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'trl_ext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
