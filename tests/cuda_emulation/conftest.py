"""The marker ``emulated``: such tests run with ``pytest --device cuda`` only."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cuda":
        return
    for item in items:
        if item.get_closest_marker("emulated") is not None:
            item.add_marker(pytest.mark.skip(reason="runs on the emulated CUDA device: pytest --device cuda"))
