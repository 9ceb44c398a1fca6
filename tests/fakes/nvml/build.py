"""Builds the stub of libnvidia-ml and writes the file that drives it (format: nvml_stub.h)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.fakes.nvml.header import write_header

LIBRARY = "libnvidia-ml.so.1"
FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.c"))

# Major version of the driver that added a function, by the change log of the NVML API reference. nvidia-ml-py's
# wrappers report an older library's missing symbol as NVML_ERROR_FUNCTION_NOT_FOUND.
ADDED_IN = {
    "nvmlDeviceGetMemoryInfo_v2": 510,
    "nvmlGpmMetricsGet": 520,
    "nvmlGpmMigSampleGet": 520,
    "nvmlGpmQueryDeviceSupport": 520,
    "nvmlGpmSampleAlloc": 520,
    "nvmlGpmSampleFree": 520,
    "nvmlGpmSampleGet": 520,
    "nvmlDeviceGetGpuFabricInfo": 525,
    "nvmlDeviceGetComputeRunningProcesses_v3": 535,
    "nvmlDeviceGetCurrentClocksEventReasons": 535,
    "nvmlDeviceGetGpuFabricInfoV": 550,
    "nvmlDeviceGetTemperatureV": 570,
}


def build(folder: Path) -> Path:
    """Compile the stub into ``folder``, for use on LD_LIBRARY_PATH.

    Raises:
        RuntimeError: there is no C compiler, or compilation failed.
    """
    import pynvml

    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(path.read_text() for path in (*SOURCES, FOLDER / "nvml_stub.h"))
    (folder / "nvml_py.h").write_text(write_header(pynvml, text))
    _compile(folder, "-c", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{folder}", *map(str, SOURCES))
    return link(folder, folder)


def link(objects: Path, folder: Path, without: Iterable[str] = ()) -> Path:
    """Link the objects of :func:`build` into a library in ``folder`` that lacks the functions ``without``."""
    library, exports = folder / LIBRARY, folder / "exports.map"
    library.unlink(missing_ok=True)  # a symbolic link to the complete one
    exports.write_text("{ local: nothing; " + "".join(f"{name}; " for name in without) + "};\n")
    files = [str(objects / path.with_suffix(".o").name) for path in SOURCES]
    _compile(folder, "-shared", f"-Wl,--version-script={exports}", "-o", str(library), *files, "-lm")
    return library


def _compile(folder: Path, *args: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("the telemetry tests need a C compiler for their stub of libnvidia-ml: install gcc")
    result = subprocess.run([compiler, *args], cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"the stub of libnvidia-ml did not compile: {result.stderr}")


class Stub:
    """A built stub and its driving file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "gpus.txt"
        if not (folder / LIBRARY).exists():
            build(folder)
        self._objects = (folder / LIBRARY).resolve().parent

    def drive(self, text: str) -> None:
        """Replace the driving file; the next NVML call reads the new one."""
        temporary = self.file.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.file)

    def install_driver(self, version: str) -> None:
        """Remove the functions that a driver of this version (``510.47.03``) does not have yet."""
        major = int(version.partition(".")[0])
        self.remove_functions(name for name, added in ADDED_IN.items() if added > major)

    def remove_functions(self, names: Iterable[str]) -> None:
        """Replace the library by one that lacks these functions."""
        link(self._objects, self.folder, names)

    def environ(self, **extra: str) -> dict[str, str]:
        """Return the environment of a child that loads the stub, without the allocation of an enclosing job."""
        hide = ("SLURM_", "CUDA_", "NVML_STUB_")
        base = {k: v for k, v in os.environ.items() if not k.startswith(hide)}
        return {**base, "LD_LIBRARY_PATH": str(self.folder), "NVML_STUB_FILE": str(self.file), **extra}
