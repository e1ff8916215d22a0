"""A seed for every request to an engine, derived from the run's seed and the request's place in the run.

vLLM draws the seeds of requests that have none from a generator of the process: its GPU runner from numpy's, its CPU
runner from torch's. Nothing that a run depends on may: ranks can be in the same state, and a resumed run is in another.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

Place = tuple[str | int, ...]


def request_seed(*place: str | int) -> int:
    """A non-negative 63-bit number, the same for the same place and on every machine."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RequestSeeds:
    """The seeds of an engine's requests, in a run of one seed.

    Args:
        seed: of the run.
        engine: number of the engine among those of the run; ranks that share one by tensor parallelism are equal in it.
        place: where in the run the next call is, such as ("train", optimizer steps done). It has to say no more than a
            resumed run knows as well: the calls at one place are counted from 0.
    """

    def __init__(self, seed: int, engine: int, place: Callable[[], Place]) -> None:
        self.seed, self.engine, self.place = seed, engine, place
        self._calls: dict[str | int, tuple[Place, int]] = {}  # per kind of place: the last one, and its calls so far

    @contextlib.contextmanager
    def fixed(self, seed: int) -> Iterator[None]:
        """In the block the seeds follow from `seed` alone, and the calls count as none of the run's."""
        before = self.place, self._calls
        self.place, self._calls = (lambda: ("fixed", seed)), {}
        try:
            yield
        finally:
            self.place, self._calls = before

    def take(self, requests: int, given: int | None = None) -> list[int]:
        """The seeds of a call's requests, from the run's seed or the one `given` in `generation_kwargs`."""
        place = self.place()
        last, calls = self._calls.get(place[0], (place, 0))
        calls = calls if last == place else 0
        self._calls[place[0]] = place, calls + 1
        return self.at(place, requests, given, calls)

    def at(self, place: Place, requests: int, given: int | None = None, calls: int = 0) -> list[int]:
        """The seeds of the requests of a call at a place, by default of the first one there."""
        seed = self.seed if given is None else given
        return [request_seed(seed, *place, calls, self.engine, i) for i in range(requests)]

    def applied(self, params: Any, requests: int) -> list[Any]:
        """`params` (vLLM's `SamplingParams`) for each of a call's requests, with their seeds."""
        copies = [copy.copy(params) for _ in range(requests)]  # as vLLM's `ParentRequest._get_child_sampling_params`
        for own, seed in zip(copies, self.take(requests, params.seed), strict=True):
            own.seed = seed
        return copies
