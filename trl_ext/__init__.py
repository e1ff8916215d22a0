"""Reinforcement learning on math with a language model: a plug-in for TRL's `GRPOTrainer`.

Importing the package loads neither trl nor vllm; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_ext.algorithms.advantages import ADVANTAGES as ADVANTAGES
    from trl_ext.algorithms.aggregation import AGGREGATIONS as AGGREGATIONS
    from trl_ext.algorithms.distillation import DISTILLATIONS as DISTILLATIONS
    from trl_ext.algorithms.kl import KL_ESTIMATORS as KL_ESTIMATORS
    from trl_ext.algorithms.policy_losses import POLICY_LOSSES as POLICY_LOSSES
    from trl_ext.algorithms.presets import PRESETS as PRESETS
    from trl_ext.algorithms.types import LossInputs as LossInputs
    from trl_ext.algorithms.types import StepTotals as StepTotals
    from trl_ext.algorithms.types import TokenLoss as TokenLoss
    from trl_ext.grpo.config import ExtGRPOConfig as ExtGRPOConfig
    from trl_ext.grpo.run_log import RunLog as RunLog
    from trl_ext.grpo.trainer import ExtGRPOTrainer as ExtGRPOTrainer
    from trl_ext.rewards import REWARDS as REWARDS

__version__ = "0.2.0"

_WHERE = {
    "ADVANTAGES": "algorithms.advantages",
    "AGGREGATIONS": "algorithms.aggregation",
    "DISTILLATIONS": "algorithms.distillation",
    "ExtGRPOConfig": "grpo.config",
    "ExtGRPOTrainer": "grpo.trainer",
    "KL_ESTIMATORS": "algorithms.kl",
    "LossInputs": "algorithms.types",
    "POLICY_LOSSES": "algorithms.policy_losses",
    "PRESETS": "algorithms.presets",
    "REWARDS": "rewards",
    "RunLog": "grpo.run_log",
    "StepTotals": "algorithms.types",
    "TokenLoss": "algorithms.types",
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"trl_ext.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'trl_ext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
