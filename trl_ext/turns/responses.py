"""Responses of several turns: the loop in which a model calls tools and reads their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl_ext.generation.progress import advance
from trl_ext.turns.calls import Answer, Call, Kind
from trl_ext.turns.protocols import Fences, Template, ToolProtocol, shortened
from trl_ext.turns.tools import Toolbox

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Logps = Sequence[Sequence[float | None]] | None
Generate = Callable[[list[list[int]], int, Sequence[int]], tuple[list[list[int]], Logps]]


@dataclass(frozen=True)
class Part:
    """A turn of the model, or the answers to it.

    Attributes:
        calls: names and kinds of what was answered; empty for the model's.
        reward: of the turn that was answered, by an environment.
    """

    tokens: int
    calls: tuple[tuple[str, Kind], ...] = ()
    seconds: float = 0.0
    reward: float = 0.0


@dataclass
class Response:
    """One response: the model's own tokens and those of tools between them."""

    ids: list[int]
    own: list[int]  # 1 for a token of the model, 0 for one of a tool
    logps: list[float | None] | None  # of the tokens, None for those of tools; None if they are not known
    parts: list[Part] = field(default_factory=list)
    unanswered: int = 0  # calls whose answers had no room, or came after the last turn
    called: list[Call] = field(default_factory=list)

    @classmethod
    def begun(cls, ids: Sequence[int], logps: Sequence[float | None] | None) -> Response:
        """With the model's first turn."""
        response = cls([], [], None if logps is None else [])
        response.say(ids, logps)
        return response

    def say(self, ids: Sequence[int], logps: Sequence[float | None] | None) -> None:
        """Add a turn of the model."""
        self.ids += ids
        self.own += [1] * len(ids)
        self.parts.append(Part(len(ids)))
        self.logps = None if self.logps is None or logps is None else [*self.logps, *logps]

    def hear(self, ids: Sequence[int], calls: Sequence[Call], answers: Sequence[Answer], reward: float = 0.0) -> None:
        """Add the answers to its calls, and the reward of the turn that called."""
        self.ids += ids
        self.own += [0] * len(ids)
        self.called += calls
        told = tuple((call.name, answer.kind) for call, answer in zip(calls, answers, strict=True))
        self.parts.append(Part(len(ids), told, sum(answer.seconds for answer in answers), reward))
        if self.logps is not None:
            self.logps = [*self.logps, *[None] * len(ids)]

    @property
    def own_ids(self) -> list[int]:
        """The model's tokens."""
        return [token for token, is_own in zip(self.ids, self.own, strict=True) if is_own]

    @property
    def own_logps(self) -> list[float | None] | None:
        """Of the model's tokens."""
        return None if self.logps is None else [p for p, own in zip(self.logps, self.own, strict=True) if own]

    @property
    def turns(self) -> list[tuple[int, float]]:
        """Tokens and reward of each turn of the model."""
        own = [n for n, part in enumerate(self.parts) if not part.calls]
        answered = [*self.parts, Part(0)]  # behind a turn comes the answer to it, if there is one
        return [(self.parts[n].tokens, answered[n + 1].reward) for n in own]

    @property
    def kinds(self) -> list[Kind]:
        """Of its answers, one per call."""
        return [kind for part in self.parts for _, kind in part.calls]

    @property
    def seconds(self) -> float:
        """In tools."""
        return sum(part.seconds for part in self.parts)

    def told(self, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
        """Its turns as a log has them."""
        turns, start = list[dict[str, Any]](), 0
        for part in self.parts:
            text = decode(self.ids[start : start + part.tokens])
            start += part.tokens
            if not part.calls:
                turns.append({"role": "assistant", "text": text, "tokens": part.tokens})
                continue
            tools = {"tool": [name for name, _ in part.calls], "outcome": [kind for _, kind in part.calls]}
            turns.append({"role": "tool", "text": text, "tokens": part.tokens, **tools})
        return turns


@dataclass(frozen=True)
class ToolUse:
    """How a run's model uses its tools.

    Attributes:
        max_turns: of the model, in a response.
        output_tokens: the most that an answer has.
    """

    tokenizer: PreTrainedTokenizerBase
    box: Toolbox
    protocol: ToolProtocol
    max_turns: int
    output_tokens: int

    @classmethod
    def of(cls, config: Any, tokenizer: PreTrainedTokenizerBase) -> ToolUse:
        """As settings with `ToolSettings` say, whose protocol is settled, for the model of this tokenizer."""
        box = Toolbox.of(config.tools, config.tool_timeout, config.tool_state)
        protocol: ToolProtocol = Fences(tokenizer, box.functions)
        if config.tool_protocol == "template":
            protocol = Template(tokenizer, box.functions, config.chat_template_kwargs)
        return cls(tokenizer, box, protocol, config.max_turns, config.tool_output_tokens)

    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        first: Sequence[Sequence[int]],
        logps: Logps,
        generate: Generate,
        limit: int,
        agreed: Callable[[int], int] = lambda room: room,
        rows: Sequence[Mapping[str, Any]] = (),
    ) -> list[Response]:
        """N responses, of which the first turns have been sampled.

        Args:
            prompts: N, as token ids.
            first: the N first turns, as token ids.
            logps: of their tokens, or None.
            generate: prompts, the most tokens of a turn, and which of the N responses they continue, to turns and
                their log-probabilities.
            limit: of a response's tokens, those of tools included.
            agreed: the largest room of all processes that generate together; 0 where nobody has a call.
            rows: the N problems, which environments are reset with.
        """
        self.box.begin(rows)
        responses = [Response.begun(ids, logps[n] if logps else None) for n, ids in enumerate(first)]
        speaking = list(range(len(responses)))
        for turn in range(1, self.max_turns + 1):
            calls = {n: self._calls(n, prompts[n], responses[n], limit) for n in speaking}
            calls = {n: called for n, called in calls.items() if called}
            if turn == self.max_turns:
                for n, called in calls.items():
                    responses[n].unanswered += len(called)
                break
            speaking = self._answer(responses, calls, limit)
            room = agreed(max((limit - len(responses[n].ids) for n in speaking), default=0))
            if not room:
                break
            advance(0, finished=-len(speaking))  # they were counted after their last turn
            asked = [[*prompts[n], *responses[n].ids] for n in speaking]
            # Who has nothing to ask still takes part where processes generate together.
            said, known = generate(asked or [list(prompts[0])], room, speaking or [0])
            for place, n in enumerate(speaking):
                left = limit - len(responses[n].ids)
                responses[n].say(said[place][:left], known[place][:left] if known else None)
        return responses

    def _calls(self, place: int, prompt: Sequence[int], response: Response, limit: int) -> list[Call]:
        last = response.parts[-1].tokens
        if not last or len(response.ids) >= limit:
            return []
        before = [*prompt, *response.ids[:-last]]
        earlier = response.called
        return [
            Call(
                call.name,
                call.arguments,
                call.fault,
                tuple(old.arguments for old in earlier if old.name == call.name and old.arguments is not None),
                place,
            )
            for call in self.protocol.calls(before, response.ids[-last:])
        ]

    def _answer(self, responses: Sequence[Response], calls: dict[int, list[Call]], limit: int) -> list[int]:
        """Answer all calls at once; the numbers of the responses whose answers have room, and a token after them."""
        before = {n: self.box.turn_rewards(n) for n in calls}
        told = iter(self.box.answers([call for called in calls.values() for call in called]))
        speaking = []
        for n, called in calls.items():
            answers, response = [next(told) for _ in called], responses[n]
            texts = [shortened(self.tokenizer, answer.text, self.output_tokens) for answer in answers]
            ids = self.protocol.answer_ids(response.ids[-response.parts[-1].tokens :], called, texts)
            if len(response.ids) + len(ids) >= limit:
                response.unanswered += len(called)
                continue
            response.hear(ids, called, answers, self.box.turn_rewards(n) - before[n])
            speaking.append(n)
        return speaking
