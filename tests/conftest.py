"""What every test module starts from."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from jaxtyping import install_import_hook

from trl_ext.registry import Registry

# The shapes and dtypes in annotations hold in every call, and wherever a dataclass is made.
install_import_hook("trl_ext.step", "beartype.beartype")

# A shell's background job ignores Ctrl-C, and so would all that the tests start and send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the tests that are marked nightly too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly"):
        os.environ["TRL_EXT_NIGHTLY"] = "1"  # for the processes that tests start


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the nightly tests to scripts/test.sh --all."""
    if not config.getoption("--nightly"):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if item not in nightly]
        config.hook.pytest_deselected(items=nightly)


@pytest.fixture(scope="session")
def policy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the default base policy is made once for all tests, of both workers; it takes a minute."""
    top = tmp_path_factory.getbasetemp()
    return (top.parent if "PYTEST_XDIST_WORKER" in os.environ else top) / "policies"


@pytest.fixture(scope="module", autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """TRL sets RANK, WORLD_SIZE and MASTER_PORT for a colocated engine, which ends the process group with it.

    Neither a process started later nor Accelerate, which remembers its first environment, may see them.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def tables() -> list[Registry]:
    """Every table of the modules that the tests have imported."""
    modules = [module for name, module in sys.modules.items() if name.startswith("trl_ext.")]
    return [table for module in modules for table in vars(module).values() if isinstance(table, Registry)]


@pytest.fixture(autouse=True)
def tables_as_they_were(tables: list[Registry]) -> Iterator[None]:
    """A user's file and a page's example register what is theirs, and other tests have to find the tables without it."""
    before = [dict(table) for table in tables]
    yield
    for table, members in zip(tables, before, strict=True):
        if table.keys() != members.keys():
            table.clear()
            table.update(members)
