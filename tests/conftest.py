"""How pytest-xdist deals out the tests."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Files whose tests share what takes long to make: one worker does all of such a file.
WHOLE = frozenset({"test_reshape.py", "test_rendered_grid.py"})


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
