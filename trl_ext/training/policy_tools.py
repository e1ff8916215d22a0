"""What a trainer's policy does with its tools: whole responses, of which the first turns have been sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_ext.generation.tokens import completion_texts
from trl_ext.turns.responses import Logps, Response, ToolUse


class PolicyTools:
    """The tools of a trainer, and the responses that it has sampled last.

    Args:
        trainer: whose `turn_ids` samples a turn; of which `generated_logps` is set to the log-probabilities of its own
            tokens.
    """

    def __init__(self, use: ToolUse, trainer: Any) -> None:
        self.use, self.trainer = use, trainer
        self.rows: Sequence[Mapping[str, Any]] = ()  # of the prompts that are sampled next, for environments
        self.last: list[Response] = []

    def continued(self, prompts: Sequence[list[int]], first: Sequence[list[int]]) -> list[list[int]]:
        """The ids of whole responses, of which the first turns have been sampled."""
        trainer = self.trainer
        self.last = self.use.continued(
            prompts,
            first,
            trainer.generated_logps,
            self._turn,
            trainer.most_tokens,
            trainer.largest_of_ranks,
            self.rows,
        )
        trainer.generated_logps = self.own_logps()
        return [response.ids for response in self.last]

    def _turn(self, prompts: list[list[int]], most_tokens: int, places: Sequence[int]) -> tuple[list[list[int]], Logps]:
        with self.trainer._sampling(None, most_tokens):
            ids = self.trainer.turn_ids(prompts)
        return ids, self.trainer.generated_logps

    def texts(self) -> list[str]:
        """What the model itself wrote, which is what rewards see."""
        return completion_texts(self.use.tokenizer, self.own_ids(), self.trainer.eos_token_ids)

    def own_ids(self) -> list[list[int]]:
        """The model's tokens in each response."""
        return [response.own_ids for response in self.last]

    def own_logps(self) -> Logps:
        """Of the model's tokens; None if they are not known."""
        logps = [response.own_logps for response in self.last]
        return None if any(row is None for row in logps) else [row or [] for row in logps]

    def told(self) -> list[list[dict[str, Any]]]:
        """The turns of each response as a log has them."""
        return [response.told(self.use.tokenizer.decode) for response in self.last]

    def turns(self, device: torch.device) -> Tensor:
        """(N, S, 2): tokens and reward of each of the model's turns, of S at most; 0 where there is none."""
        table = torch.zeros(len(self.last), self.use.max_turns, 2, device=device)
        for row, response in zip(table, self.last, strict=True):
            row[: len(response.turns)] = torch.tensor(response.turns)
        return table

    def environment_rewards(self) -> list[float]:
        """By `get_reward` of each response's environment."""
        (environments,) = self.use.box.environments
        return environments.rewards(len(self.last))
