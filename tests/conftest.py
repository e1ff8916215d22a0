"""What every test module starts from."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """TRL sets RANK, WORLD_SIZE and MASTER_PORT for a colocated engine; a process started later must not inherit them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
