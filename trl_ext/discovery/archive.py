"""Attempts of a run, and which of them are the best, in all and on islands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trl_ext.discovery.client import Message
from trl_ext.discovery.problem import Score, Verdict, extract_program


@dataclass
class Attempt:
    """One request and what became of it.

    Attributes:
        group: the chain or the island that it belongs to.
        parents: ids of the attempts that its messages show.
        response: None while the request is on its way, and if it got no answer.
        error: why it got none.
        verdict: on the program of the response.
        polished: the verdict on what a numeric method made of the program; None without one.
        polish_note: why there is none, where there should be.
        second: of the run, when the answer came.
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
        """What the response has of a program."""
        return None if self.response is None else extract_program(self.response)

    @property
    def is_pending(self) -> bool:
        """Whether its verdict is still to come."""
        return self.verdict is None and not self.error

    @property
    def best_verdict(self) -> Verdict | None:
        """The better of the verdicts on the model's program and on what was made of it."""
        both = [verdict for verdict in (self.verdict, self.polished) if verdict is not None]
        return max(both, key=lambda verdict: (verdict.score, verdict.valid), default=None)

    @property
    def score(self) -> Score:
        """Of the better verdict; () without one."""
        verdict = self.best_verdict
        return verdict.score if verdict else ()


def ranked(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Those with a score, best first, one of each program; of equals the earlier."""
    first: dict[str, Attempt] = {}
    for attempt in attempts:
        if attempt.score and attempt.program is not None:
            first.setdefault(attempt.program, attempt)
    return sorted(first.values(), key=lambda attempt: attempt.score, reverse=True)


def best_valid(attempts: Iterable[Attempt]) -> tuple[Attempt, Verdict] | None:
    """The attempt with the best valid verdict, and that verdict; of equals the earlier."""
    found: tuple[Attempt, Verdict] | None = None
    for attempt in attempts:
        for verdict in (attempt.verdict, attempt.polished):
            if verdict is not None and verdict.valid and (found is None or verdict.score > found[1].score):
                found = attempt, verdict
    return found


def populations(attempts: Iterable[Attempt], islands: int, migrate_every: int) -> list[list[Attempt]]:
    """The attempts of each island, and those that have come to it.

    After every `migrate_every` attempts of an island, the best of the island before it comes over. All of it follows
    from the attempts, so that a resumed run has the islands it had.
    """
    found: list[list[Attempt]] = [[] for _ in range(islands)]
    own = [0] * islands
    for attempt in attempts:
        if attempt.is_pending:
            continue
        island = attempt.group % islands
        found[island].append(attempt)
        own[island] += 1
        if own[island] % migrate_every == 0 and (neighbours := ranked(found[island - 1])):
            found[island].append(neighbours[0])
    return found
