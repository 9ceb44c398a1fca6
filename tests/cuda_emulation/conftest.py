"""The marker ``emulated``: such tests run with ``pytest --device cuda`` only."""

from __future__ import annotations

import pytest

from tests.cuda_emulation.build import CannotEmulate, build


@pytest.fixture(scope="session")
def emulation() -> None:
    """The compiled device; the test is skipped where it cannot be had."""
    try:
        build()
    except CannotEmulate as e:
        pytest.skip(str(e))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("emulated") is None:
            continue
        if config.getoption("--device") == "cuda":
            item.fixturenames.insert(0, "emulation")  # type: ignore[attr-defined]
        else:
            item.add_marker(pytest.mark.skip(reason="runs on the emulated CUDA device: pytest --device cuda"))
