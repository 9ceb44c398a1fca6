"""Everything in this folder needs a CUDA GPU: skipped without one, failed where CLUSTERTRAIN_REQUIRE_GPU=1."""

from __future__ import annotations

import os
import warnings

import pytest


def _missing() -> str | None:
    """Why there is no GPU to test on, or None."""
    import torch

    with warnings.catch_warnings(record=True) as said:  # torch warns when the driver is too old for it
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    why = "torch sees no GPU" if torch.version.cuda else "this torch was built without CUDA"
    return "; ".join([f"no CUDA GPU: {why} (torch {torch.__version__})", *(str(w.message) for w in said)])


@pytest.fixture(scope="session", autouse=True)
def cuda() -> None:
    why = _missing()
    if why is None:
        return
    if os.environ.get("CLUSTERTRAIN_REQUIRE_GPU") == "1":
        pytest.fail(f"{why}, and CLUSTERTRAIN_REQUIRE_GPU=1")
    pytest.skip(why)
