"""Builds the stub of libnvidia-ml and writes the file that drives it (format: nvml_stub.c)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("nvml_stub.c")


def build(folder: Path) -> Path:
    """Compile the stub into ``folder``, for use on LD_LIBRARY_PATH.

    Raises:
        RuntimeError: there is no C compiler, or compilation failed.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("the telemetry tests need a C compiler for their stub of libnvidia-ml: install gcc")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / LIBRARY
    argv = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", library, SOURCE, "-lm"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{SOURCE.name} did not compile: {result.stderr}")
    return library


class Stub:
    """A built stub and its driving file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "gpus.txt"
        if not (folder / LIBRARY).exists():
            build(folder)

    def drive(self, text: str) -> None:
        """Replace the driving file; the next NVML call reads the new one."""
        temporary = self.file.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.file)

    def environ(self, **extra: str) -> dict[str, str]:
        """Return the environment of a child that loads the stub, without the allocation of an enclosing job."""
        hide = ("SLURM_", "CUDA_", "NVML_STUB_")
        base = {k: v for k, v in os.environ.items() if not k.startswith(hide)}
        return {**base, "LD_LIBRARY_PATH": str(self.folder), "NVML_STUB_FILE": str(self.file), **extra}
