"""Compilation of the emulated device, once per torch version and state of the sources."""

from __future__ import annotations

import concurrent.futures
import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# The emulation overrides virtual functions of torch's C++ classes, which are no public interface.
TORCH_VERSIONS = ("2.13.0",)
MODULE = "emulated_cuda"
SOURCES = sorted(Path(__file__).with_name("csrc").glob("*.cpp"))
HEADERS = sorted(Path(__file__).with_name("csrc").glob("*.h"))
FLAGS = ("-O1", "-Wall", "-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={MODULE}")


class CannotEmulate(RuntimeError):
    """This machine, or its torch, cannot have the emulated device."""


def torch_folder() -> Path:
    """Return the folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotEmulate("torch is not installed")
    return Path(spec.origin).parent


def build() -> Path:
    """Return the compiled extension module; compile it if the sources or torch have changed.

    Raises:
        CannotEmulate: there is no compiler, or the emulation does not support this torch.
    """
    version = importlib.metadata.version("torch")
    torch = torch_folder()
    if version.partition("+")[0] not in TORCH_VERSIONS:
        raise CannotEmulate(f"the emulated CUDA device supports torch {', '.join(TORCH_VERSIONS)}, not {version}")
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise CannotEmulate(f"torch {version} has a CUDA device of its own")
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotEmulate("the emulated CUDA device needs g++")
    contents = b"".join(path.read_bytes() for path in [*HEADERS, *SOURCES])
    key = hashlib.sha256(repr((version, FLAGS, sysconfig.get_config_var("SOABI"))).encode() + contents).hexdigest()
    folder = Path(__file__).parents[2] / "build" / "cuda_emulation" / key[:16]
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"{MODULE}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers may start at the same time
        if not module.exists():
            _compile(compiler, torch, module)
    return module


@functools.cache
def load_libraries() -> Path:
    """Load torch's libraries and the emulation, which registers its device, before torch is imported.

    Return the emulation's extension module.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the emulated CUDA device")
    module = build()
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(module), ctypes.RTLD_GLOBAL)
    return module


def _compile(compiler: str, torch: Path, module: Path) -> None:
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [*FLAGS, *(flag for folder in includes for flag in ("-isystem", str(folder)))]
    objects = [module.with_name(f"{source.stem}.o") for source in SOURCES]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(SOURCES, objects, strict=True)
        ]
        list(pool.map(_run, commands))
    libraries = ["-L", str(torch / "lib"), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    temporary = module.with_suffix(".new")
    _run([compiler, "-shared", *map(str, objects), "-o", str(temporary), *libraries])
    for path in objects:
        path.unlink()
    temporary.replace(module)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CannotEmulate(f"{command[0]} failed:\n{result.stderr[-4000:]}")
