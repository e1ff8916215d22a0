"""What to ask the model next, as pure functions of the problem and of the attempts so far.

A strategy returns the next request, or None while it has nothing to ask; a run ends when there is nothing to ask and no
request in flight. Strategies have no state, so a resumed run continues exactly as the interrupted one would have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from trl_ext.endpoint.client import Message
from trl_ext.registry import Registry
from trl_ext.tools.discovery.archive import Attempt, populations, ranked
from trl_ext.tools.discovery.problem import Problem, no_program_message, without_thought

STRATEGIES = Registry("strategy")


@dataclass(frozen=True)
class Proposal:
    """A request: its messages, its conversation or island, the attempts it shows, and whether to polish."""

    messages: tuple[Message, ...]
    group: int = 0
    parents: tuple[int, ...] = ()
    polish: bool = False


@STRATEGIES.register
def single(problem: Problem, attempts: Sequence[Attempt], rng: Random) -> Proposal | None:
    """One request."""
    return best_of_n(problem, attempts, rng, n=1)


@STRATEGIES.register
def best_of_n(problem: Problem, attempts: Sequence[Attempt], rng: Random, *, n: int = 16) -> Proposal | None:
    """The same request n times; the verifier selects the best."""
    del rng
    if n < 1:
        raise ValueError(f"best_of_n needs n of at least 1, got {n}")
    return Proposal(_first(problem)) if len(attempts) < n else None


@STRATEGIES.register
def refine(
    problem: Problem, attempts: Sequence[Attempt], rng: Random, *, chains: int = 1, turns: int = 3
) -> Proposal | None:
    """Conversations in which the verifier's message answers each program. Ends with the budget.

    Args:
        chains: the number of parallel conversations.
        turns: how many of a conversation's latest turns the model sees.
    """
    del rng
    if min(chains, turns) < 1:
        raise ValueError(f"refine needs chains and turns of at least 1, got {chains} and {turns}")
    counts = [sum(a.group == chain for a in attempts) for chain in range(chains)]
    waiting = {attempt.group for attempt in attempts if attempt.is_pending}
    free = [chain for chain in range(chains) if chain not in waiting]
    if not free:
        return None
    chain = min(free, key=lambda chain: counts[chain])
    answered = [attempt for attempt in attempts if attempt.group == chain and attempt.response is not None]
    messages = [*_first(problem)]
    for attempt in answered[-turns:]:
        answer = without_thought(attempt.response or "") or "(no answer)"  # a message must not be empty
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": feedback(problem, attempt)})
    return Proposal(tuple(messages), chain, tuple(attempt.id for attempt in answered[-turns:]))


@STRATEGIES.register
def islands(
    problem: Problem,
    attempts: Sequence[Attempt],
    rng: Random,
    *,
    islands: int = 4,
    migrate_every: int = 10,
    parents: int = 2,
    explore: float = 0.2,
) -> Proposal | None:
    """An archive in separate islands; from time to time the best of one migrates to the next. Ends with the budget.

    Args:
        migrate_every: attempts of an island between two migrations.
        parents: the number of earlier programs that a request shows with their verdicts, better ones more often.
        explore: the fraction of requests that show none.
    """
    if min(islands, migrate_every, parents) < 1 or not 0 <= explore <= 1:
        raise ValueError("islands, migrate_every and parents must be at least 1, and explore from 0 to 1")
    counts = [sum(attempt.group == island for attempt in attempts) for island in range(islands)]
    island = counts.index(min(counts))
    known = ranked(populations(attempts, islands, migrate_every)[island])
    if not known or rng.random() < explore:
        return Proposal(_first(problem), island)
    shown = _draw(known, parents, rng)
    text = "\n".join([problem.task, "Earlier programs, and what the verifier says of them:\n", *map(_shown, shown)])
    text += "\nWrite a program that does better than all of these. Keep what is good in them, or try another idea."
    return Proposal(({"role": "user", "content": text},), island, tuple(attempt.id for attempt in shown))


@STRATEGIES.register
def hybrid(
    problem: Problem,
    attempts: Sequence[Attempt],
    rng: Random,
    *,
    islands: int = 2,
    migrate_every: int = 10,
    parents: int = 1,
    explore: float = 0.2,
) -> Proposal | None:
    """Like `islands`, and the problem's numeric method polishes each program. Ends with the budget."""
    if problem.polish is None:
        raise ValueError(f"strategy 'hybrid': the problem {problem.name!r} has no numeric method to polish a program")
    task = dataclasses.replace(problem, task=problem.hybrid_task)
    options = {"islands": islands, "migrate_every": migrate_every, "parents": parents, "explore": explore}
    proposal = STRATEGIES["islands"](task, attempts, rng, **options)
    return dataclasses.replace(proposal, polish=True)


def feedback(problem: Problem, attempt: Attempt) -> str:
    """The reply to an answer: the verifier's message, and what to do."""
    verdict = attempt.best_verdict
    if attempt.program is None or verdict is None:
        return no_program_message(attempt.finish_reason)
    if verdict.valid:
        return (
            f"The verifier says: {verdict.message}\nThat is valid, with {verdict.score[0]:g} {problem.score_name}. "
            "Find a better one. Answer with the complete program."
        )
    return f"The verifier says: {verdict.message}\nCorrect this. Answer with the complete program."


def _first(problem: Problem) -> tuple[Message, ...]:
    return ({"role": "user", "content": problem.task},)


def _draw(known: Sequence[Attempt], count: int, rng: Random) -> list[Attempt]:
    """Some of the attempts, worst first; each is half as likely to be drawn as the one ranked above it."""
    left, drawn = list(known), list[Attempt]()
    while left and len(drawn) < count:
        (chosen,) = rng.choices(left, [2.0**-i for i in range(len(left))])
        left.remove(chosen)
        drawn.append(chosen)
    return sorted(drawn, key=lambda attempt: attempt.score)


def _shown(attempt: Attempt) -> str:
    notes = [f"The verifier says: {attempt.verdict.message if attempt.verdict else ''}"]
    if attempt.polished is not None or attempt.polish_note:
        notes.append(f"After polishing: {attempt.polished.message if attempt.polished else attempt.polish_note}")
    return "\n".join([f"```python\n{(attempt.program or '').strip()}\n```", *notes, ""])
