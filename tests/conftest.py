"""What every test module starts from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def policy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the default base policy is made once for all tests; it takes a minute."""
    return tmp_path_factory.mktemp("policies")


@pytest.fixture(scope="module", autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """TRL sets RANK, WORLD_SIZE and MASTER_PORT for a colocated engine; a process started later must not inherit them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
