"""Rollouts in which the policy calls tools: what TRL's tool loop returns, by our own loop over token ids.

TRL's calls the tools of a rollout one after the other, and needs a chat template with tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_ext.generation.floats import widest_float
from trl_ext.training.policy_tools import PolicyTools
from trl_ext.turns.responses import Logps, Response
from trl_ext.turns.tools import environment_of

if TYPE_CHECKING:
    from trl_ext.grpo.rollout import Rollout


class RolloutTools(PolicyTools):
    """Those of GRPO, in TRL's loop of tools, in the log's rows and in the metrics."""

    def loop(self, prompts: Sequence[list[int]], first: Sequence[list[int]], logps: Logps) -> tuple[Any, ...]:
        """What TRL's `_tool_call_loop` returns; its completions are here what the model itself wrote.

        Args:
            logps: an engine's of the first turns, or None.
        """
        self.continued(prompts, first)
        own = [response.own for response in self.last]
        sampled = [[p if own else 0.0 for p, own in _by_token(response)] for response in self.last]  # 0.0 is TRL's
        calls = sum(len(response.kinds) + response.unanswered for response in self.last)
        failed = sum(kind != "ok" for response in self.last for kind in response.kinds)
        ids = [response.ids for response in self.last]
        return own, self.texts(), ids, None if logps is None else sampled, calls, failed, [[] for _ in ids]

    def complete(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add turns and calls to the responses' rows of the log."""
        for row, response, told in zip(rows, self.last, self.told(), strict=True):
            row["turns"] = told
            row["calls"] = len(response.kinds) + response.unanswered

    def metrics(self, rollout: Rollout, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Of all ranks' responses, next to TRL's `tools/call_frequency` and `tools/failure_frequency`."""
        device = rollout.finished.device
        late = [sum(kind == "timeout" for kind in response.kinds) for response in self.last]
        with_call = [bool(response.kinds or response.unanswered) for response in self.last]
        calls = [len(response.kinds) + response.unanswered for response in self.last]
        columns = [calls, late, [r.seconds for r in self.last], [r.unanswered for r in self.last], with_call]
        table = torch.tensor(columns, dtype=widest_float(device), device=device).T
        table = torch.cat([table, rollout.correct.to(table.dtype)[:, None]], dim=1)  # (M, 6)
        calls_, late_, seconds, unanswered, called, correct = gather(table).T
        known = ~correct.isnan()
        metrics = {
            "tools/timeout_frequency": _ratio(late_.sum(), calls_.sum()),
            "tools/unanswered_frequency": _ratio(unanswered.sum(), calls_.sum()),
            "tools/seconds": seconds.sum().item(),
            "tools/rollouts_with_call": called.mean().item(),
        }
        for name, chosen in {"with": known & (called == 1), "without": known & (called == 0)}.items():
            if chosen.any():
                metrics[f"tools/accuracy_{name}_call"] = correct[chosen].mean().item()
        return metrics


def with_environments_reward(functions: Any, tools: str | None, trainer: Any) -> Any:
    """TRL's `reward_funcs`, and `get_reward` of the environment among the tools where it has one, as in TRL."""
    kind = environment_of(tools) if tools else None
    if kind is None or not callable(getattr(kind, "get_reward", None)):
        return functions

    def own(completions: Sequence[str], **_: object) -> list[float]:
        rewards: list[float] = trainer.policy_tools.environment_rewards()
        return rewards

    own.__name__ = kind.__name__
    return [*(functions if isinstance(functions, list) else [functions]), own]


def _by_token(response: Response) -> Iterator[tuple[float | None, int]]:
    logps: Sequence[float | None] = response.logps or [None] * len(response.ids)
    return zip(logps, response.own, strict=True)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return (part / whole).item() if whole else 0.0
