"""Tests in this folder need a CUDA GPU: without one they are skipped, or fail if CLUSTERTRAIN_REQUIRE_GPU=1."""

from __future__ import annotations

import os
import warnings

import pytest


def _missing() -> str | None:
    """Return why there is no GPU to test on, or None."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # torch warns if the driver is too old for it
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    reason = "torch sees no GPU" if torch.version.cuda else "this torch was built without CUDA"
    return "; ".join([f"no CUDA GPU: {reason} (torch {torch.__version__})", *(str(w.message) for w in caught)])


@pytest.fixture(scope="session", autouse=True)
def cuda() -> None:
    reason = _missing()
    if reason is None:
        return
    if os.environ.get("CLUSTERTRAIN_REQUIRE_GPU") == "1":
        pytest.fail(f"{reason}, and CLUSTERTRAIN_REQUIRE_GPU=1")
    pytest.skip(reason)
