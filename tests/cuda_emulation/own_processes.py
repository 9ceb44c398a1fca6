"""The emulated device in the processes that tests start: the command line, agents, and ranks of the local backend."""

from __future__ import annotations

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
    folder = build.build().parent / "nvml"
    if not (folder / nvml.LIBRARY).exists():
        nvml.build(folder)
    site = Path(__file__).with_name("site")
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT))),
        "LD_LIBRARY_PATH": str(folder),
        "NVML_STUB_DEVICES": str(DEVICES),
    }
