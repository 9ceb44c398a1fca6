"""The fixtures of the NVML stub, for conftest files to import."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.fakes.nvml.build import LIBRARY, Stub, build


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stub. Without a compiler the test fails and is not skipped."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "nvml"  # one for all workers
    library = folder / LIBRARY
    with base.parent.joinpath("nvml.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return library if library.exists() else build(folder)
        except RuntimeError as e:
            pytest.fail(str(e), pytrace=False)


@pytest.fixture
def nvml_stub(nvml_library: Path, tmp_path: Path) -> Stub:
    """The compiled stub with a driving file for the test, empty at first."""
    folder = tmp_path / "nvml"
    folder.mkdir()
    (folder / LIBRARY).symlink_to(nvml_library)
    return Stub(folder)
