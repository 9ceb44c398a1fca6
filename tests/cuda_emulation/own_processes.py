"""The emulated device in the processes that tests start: the command line, agents, and ranks of the local backend."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
from pathlib import Path

from tests.cuda_emulation import build
from tests.fakes.nvml import build as nvml
from tests.paths import ROOT

DEVICES = 8


def environment() -> dict[str, str]:
    """Return environment variables with which ``cuda`` is the emulated device, and NVML lists 8 GPUs.

    Raises:
        CannotEmulate: as :func:`tests.cuda_emulation.build.build`.
    """
    root = build.build().parent.parent
    return {
        "PYTHONPATH": _prepend("PYTHONPATH", Path(__file__).with_name("startup"), ROOT),
        "LD_LIBRARY_PATH": _prepend("LD_LIBRARY_PATH", _build_nvml(root)),
        "NVML_STUB_DEVICES": str(DEVICES),
    }


def _prepend(variable: str, *folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get(variable)])])


def _build_nvml(root: Path) -> Path:
    """Return a folder below ``root`` with the stub of NVML; compile it if its sources or nvidia-ml-py have changed."""
    contents = b"".join(path.read_bytes() for path in (*nvml.SOURCES, nvml.FOLDER / "nvml_stub.h"))
    version = importlib.metadata.version("nvidia-ml-py")
    folder = root / f"nvml-{hashlib.sha256(version.encode() + contents).hexdigest()[:16]}"
    with (root / "nvml.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers may start at the same time
        if not folder.exists():
            unfinished = folder.with_suffix(".new")
            try:
                nvml.build(unfinished)
            except RuntimeError as e:
                raise build.CannotEmulate(str(e)) from None
            unfinished.replace(folder)
    return folder
