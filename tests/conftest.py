"""Distribution of the tests over pytest-xdist's workers, economical use of the cores, and names of cases."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from clustertrain.plan.layout import Layout
from tests.cuda_emulation import own_processes, unsupported
from tests.cuda_emulation.build import CannotEmulate
from tests.extended import is_extended
from tests.paths import DEVICE_VARIABLE

# For torch in this process and in those that tests start, so it is set before any import of torch. The matrices are too
# small to share, and with more threads than cores, waiting threads spin.
os.environ["OMP_NUM_THREADS"] = "1"

# No test asserts wall time, and these run beside others.
hypothesis.settings.register_profile("clustertrain", deadline=None)
hypothesis.settings.load_profile("clustertrain")

# Files whose tests share an expensive fixture: one worker runs the whole file.
WHOLE_FILES = frozenset(
    {
        "test_chaos.py",
        "test_fake_cluster.py",
        "test_html_in_chromium.py",
        "test_local_backend.py",
        "test_options.py",
        "test_job_script_grid.py",
        "test_layouts_on_cuda.py",
        "test_reshape.py",
        "test_storage_tiers.py",
        "test_trackers.py",
    }
)

# `make test-fast` does not collect these folders.
WITHOUT_QUICK_TESTS = ("tests/browser/", "tests/gpu/", "tests/ranks/", "tests/slurm/")
SLOW_MARKERS = ("ranks", "slurm", "gpu", "long")
MAX_ID_LENGTH = 60
NO_EMULATION = pytest.StashKey[str]()
"""Why ``--device cuda`` cannot have the emulated device on this machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu",
        help="device of the ranks that tests start; cuda is emulated (tests/cuda_emulation)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    os.environ[DEVICE_VARIABLE] = config.getoption("--device")  # for tests.ranks.rank_pool, which is imported later
    if config.getoption("--device") == "cuda":
        try:
            environment = own_processes.environment()  # compiled once, before workers start
        except CannotEmulate as e:
            if os.environ.get("CLUSTERTRAIN_REQUIRE_CUDA_EMULATION") == "1":
                raise pytest.UsageError(f"{e}, and CLUSTERTRAIN_REQUIRE_CUDA_EMULATION=1") from None
            config.stash[NO_EMULATION] = str(e)
            return
        # xdist's workers would inherit it, and the emulated device with it.
        if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
            os.environ.update(environment)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_extended(item.nodeid):
            item.add_marker("extended")
        if item.nodeid.startswith(WITHOUT_QUICK_TESTS) and not any(map(item.get_closest_marker, SLOW_MARKERS)):
            raise pytest.UsageError(f"{item.nodeid}: no target of make runs it; mark it ranks, slurm, gpu or long")
    if config.getoption("--device") == "cuda":
        for item in items:
            reason = config.stash.get(NO_EMULATION, None) or unsupported.reason(item.nodeid)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"emulated CUDA: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze the objects of torch and the tests, a million, so that the garbage collector ignores them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        _let_loggers_propagate()


def _let_loggers_propagate() -> None:
    """Spare pytest the 55 loggers of torch: it adds handlers to those that do not propagate, six times per test."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


class SingleTestScheduling(LoadScopeScheduling):
    """Scheduler that starts with whole files, which have the most tests; every other test is a separate unit."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if PurePath(file).name in WHOLE_FILES else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SingleTestScheduling | None:
    # xdist_group does not work: pytest-xdist 3.8 adds the group to Node._nodeid, which pytest 9.2 no longer reads.
    return SingleTestScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the cores: workers wait for processes in a third of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name cases by their tables and lists, such as ``optim.lr=0.1``, where pytest would number them."""
    if isinstance(val, Layout):
        return val.describe()
    if isinstance(val, (dict, list, tuple)):
        text = _format_value(val)[:MAX_ID_LENGTH] or "empty"
        return text.encode("unicode_escape").decode()  # some cases are not printable
    return None


def _format_value(value: object, prefix: str = "") -> str:
    if isinstance(value, dict):
        return " ".join(_format_value(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items())
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return f"{prefix}={text}" if prefix else text
