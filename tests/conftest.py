"""How pytest-xdist deals out the tests, and what keeps them from wasting the cores."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# For torch here and in all processes that tests start, before any of them imports it. The matrices are too small to
# share, and several workers on few cores have more threads than those: a thread that waits for another one spins.
os.environ["OMP_NUM_THREADS"] = "1"

# Files whose tests share a fixture that takes long: one worker runs the whole file.
WHOLE = frozenset(
    {
        "test_chaos.py",
        "test_html_in_chromium.py",
        "test_local_backend.py",
        "test_options.py",
        "test_job_script_grid.py",
        "test_reshape.py",
        "test_storage_tiers.py",
        "test_trackers.py",
    }
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """A million objects of torch and of the tests stay until the end: the collector need not look at them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class OneByOne(LoadScopeScheduling):
    """Whole files begin, since they have the most tests; every other test is a unit of its own."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if PurePath(file).name in WHOLE else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneByOne | None:
    # Not by xdist_group: pytest-xdist 3.8 adds the group to Node._nodeid, which pytest 9.2 no longer reads.
    return OneByOne(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: a third of a worker's time is waiting for processes."""
    return (os.cpu_count() or 1) + 1
