"""One seed for everything random, and the state of every generator of this rank."""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *scope: object) -> int:
    """A 63-bit seed from ``seed`` and what it is for; the same on every machine."""
    text = "/".join(map(str, (seed, *scope)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """Python, numpy and torch on the CPU and on every GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def enable_determinism() -> None:
    """Let torch, cuDNN and cuBLAS take algorithms that give the same bits each time, in this process. What has none
    raises RuntimeError then, with its name. Memory that nobody has written is filled, too, which takes time.

    Not needed for a resume to be exact on the layouts of the parity table: for hunting down a number that moves.
    """
    # Read when cuBLAS makes its first handle (CUDA toolkit, "cuBLAS: Results Reproducibility").
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def capture_rng_state(device: torch.device) -> dict[str, Any]:
    """The state of this rank's generators, as tensors, arrays and plain data."""
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
    """The reverse of :func:`capture_rng_state`."""
    version, mt_state, gauss = state["python"]
    random.setstate((version, tuple(int(w) for w in mt_state), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
