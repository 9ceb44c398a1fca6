"""Path of the repository, and the device of the tests' ranks."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]

DEVICE_VARIABLE = "CLUSTERTRAIN_TEST_DEVICE"
"""Environment variable that ``pytest --device`` sets: the device of ranks that tests start."""
