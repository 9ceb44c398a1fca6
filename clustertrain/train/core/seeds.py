"""Seeds, and the state of this rank's random generators."""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *scope: object) -> int:
    """Return a 63-bit seed derived from ``seed`` and its purpose ``scope``; the same on every machine."""
    text = "/".join(map(str, (seed, *scope)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, and torch on the CPU and on every GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def enable_determinism() -> None:
    """Make torch, cuDNN and cuBLAS use bit-reproducible algorithms in this process.

    An operation without one raises RuntimeError with its name. Uninitialized memory is filled, which takes time. An
    exact resume on the layouts of the parity table does not need this; use it to find a source of nondeterminism.
    """
    # cuBLAS reads this when it creates its first handle (CUDA toolkit, "cuBLAS: Results Reproducibility").
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def capture_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this rank's random generators as tensors, arrays and plain data."""
    version, mt_state, gauss = random.getstate()
    state = {
        "python": [version, np.array(mt_state, dtype=np.uint32), gauss],
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state that :func:`capture_rng_state` returned."""
    version, mt_state, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in mt_state), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
