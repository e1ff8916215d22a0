"""The attempts of a run, and which of them are best, overall and on islands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trl_ext.endpoint.client import Message
from trl_ext.tools.discovery.problem import Score, Verdict, extract_program


@dataclass
class Attempt:
    """One request, its response and its verdicts.

    Attributes:
        group: the conversation or the island that it belongs to.
        parents: ids of the attempts that its messages show.
        polish: whether a numeric method improves the program.
        response: None while the request is in flight, and if it got no answer.
        error: why it got no answer.
        verdict: the verdict on the program of the response.
        polished: the verdict on the program that the numeric method made; None without one.
        polish_note: why there is none, where there should be.
        second: when the answer came, in seconds of the run.
    """

    id: int
    group: int = 0
    parents: tuple[int, ...] = ()
    polish: bool = False
    messages: Sequence[Message] = ()
    response: str | None = None
    finish_reason: str = ""
    error: str = ""
    verdict: Verdict | None = None
    polished: Verdict | None = None
    polish_note: str = ""
    second: float = 0.0
    tokens: int = 0

    @property
    def program(self) -> str | None:
        """The program in the response, if there is one."""
        return None if self.response is None else extract_program(self.response)

    @property
    def is_pending(self) -> bool:
        """Whether its verdict is still to come."""
        return self.verdict is None and not self.error

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on the model's program and on the polished one, as far as there are any."""
        return [verdict for verdict in (self.verdict, self.polished) if verdict is not None]

    @property
    def best_verdict(self) -> Verdict | None:
        """The better of its verdicts."""
        return max(self.verdicts, key=lambda verdict: (verdict.score, verdict.valid), default=None)

    @property
    def score(self) -> Score:
        """The score of the better verdict; () without one."""
        verdict = self.best_verdict
        return verdict.score if verdict else ()


def ranked(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Attempts with a score, best first, one per program; among equals the earlier comes first."""
    first: dict[str, Attempt] = {}
    for attempt in attempts:
        if attempt.score and attempt.program is not None:
            first.setdefault(attempt.program, attempt)
    return sorted(first.values(), key=lambda attempt: attempt.score, reverse=True)


def best_valid(attempts: Iterable[Attempt]) -> tuple[Attempt, Verdict] | None:
    """The attempt with the best valid verdict, and that verdict; among equals the earlier."""
    pairs = [(attempt, verdict) for attempt in attempts for verdict in attempt.verdicts if verdict.valid]
    return max(pairs, key=lambda pair: pair[1].score, default=None)


def populations(attempts: Iterable[Attempt], islands: int, migrate_every: int) -> list[list[Attempt]]:
    """The attempts of each island, with those that migrated to it.

    After every `migrate_every` attempts of an island, the best of the previous island joins it. Everything follows from
    the attempts, so a resumed run has the same islands.
    """
    members: list[list[Attempt]] = [[] for _ in range(islands)]
    own = [0] * islands
    for attempt in attempts:
        if attempt.is_pending:
            continue
        island = attempt.group % islands
        members[island].append(attempt)
        own[island] += 1
        if own[island] % migrate_every == 0 and (neighbors := ranked(members[island - 1])):
            members[island].append(neighbors[0])
    return members
