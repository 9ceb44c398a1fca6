"""The stub of libnvidia-ml, against nvidia-ml-py: layouts, versions, exported functions and refusals."""

from __future__ import annotations

import ast
import ctypes
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest

import clustertrain.telemetry.readers
from tests.fakes.nvml import build, header
from tests.fakes.nvml.build import Stub
from tests.paths import ROOT

SOURCES = "".join(path.read_text() for path in (*build.SOURCES, build.FOLDER / "nvml_stub.h"))
READERS = Path(clustertrain.telemetry.readers.__file__).parent
# Run before NVML's initialization, and after it with a null handle: each function's code for null pointers.
PROGRAM = """
import ctypes, json, sys
lib = ctypes.CDLL("libnvidia-ml.so.1")
names, nulls = json.loads(sys.argv[1]), [ctypes.c_void_p()] * 6
before = {n: getattr(lib, n)(*nulls) for n in names}
lib.nvmlInit_v2()
after = {n: getattr(lib, n)(*nulls) for n in names}
lib.nvmlShutdown()
print(json.dumps([before, after]))
"""


def functions_used() -> set[str]:
    """Return the C functions that our readers and the GPU check call, by themselves and through nvidia-ml-py."""
    names = {
        node.value
        for path in (*READERS.glob("*.py"), ROOT / "benchmarks/gpu_check/machine.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"nvml[A-Z]\w+", node.value)
    }
    used = set()
    for name in names:
        wrapper = getattr(pynvml, name, None)
        source = inspect.getsource(wrapper) if callable(wrapper) else ""
        used |= set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source)) or {name}
    return used | {"nvmlErrorString"}


def structures_used() -> list[Any]:
    names = dict.fromkeys(re.findall(r"\bnvml\w+_t\b", SOURCES))
    found = [getattr(pynvml, f"c_{name}", None) or getattr(pynvml, name, None) for name in names]
    return [s for s in found if isinstance(s, type) and hasattr(s, "_fields_")]


def test_every_function_that_readers_use_is_exported(nvml_library: Path) -> None:
    library = ctypes.CDLL(str(nvml_library))
    assert {name for name in functions_used() if not hasattr(library, name)} == set()
    assert len(functions_used()) > 40


@pytest.mark.parametrize("structure", structures_used(), ids=lambda s: s.__name__)
def test_header_has_the_layout_of_nvidia_ml_py(structure: Any) -> None:
    text = header.write_header(pynvml, SOURCES)
    name = structure.__name__.removeprefix("c_")
    for field, (offset, size) in header.struct_layout(structure).items():
        check = f"offsetof({name}, {field}) == {offset}" if field else f"sizeof({name}) == {size}"
        assert f"_Static_assert({check}," in text
    version = re.fullmatch(r"nvml(\w+)_v(\d)_t", name)
    if version and structure._fields_[0][0] == "version":
        assert getattr(pynvml, name.removesuffix("_t")) == ctypes.sizeof(structure) | int(version[2]) << 24


@pytest.mark.long
def test_header_does_not_compile_with_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that laid a structure out otherwise than ctypes would be noticed."""
    text = header.write_header(pynvml, SOURCES).replace("    int temperature;\n", "    double temperature;\n")
    monkeypatch.setattr(build, "write_header", lambda *_: text)
    with pytest.raises(RuntimeError, match="nvmlTemperature_v1_t"):
        build.build(tmp_path)


def test_functions_refuse_null_pointers_and_calls_before_init(nvml_stub: Stub) -> None:
    nvml_stub.drive("device 0 uuid GPU-a\n")
    names = sorted(functions_used() - {"nvmlInitWithFlags", "nvmlErrorString", "nvmlShutdown"})
    argv = [sys.executable, "-c", PROGRAM, json.dumps(names)]
    result = subprocess.run(argv, env=nvml_stub.environ(), capture_output=True, text=True, check=True, timeout=60)
    before, after = json.loads(result.stdout)
    assert set(before.values()) == {pynvml.NVML_ERROR_UNINITIALIZED}, before
    refused = {name for name, code in after.items() if code == pynvml.NVML_ERROR_INVALID_ARGUMENT}
    assert refused == set(names)


VERSIONED = """
import ctypes, json
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
structures = {
    "nvmlDeviceGetMemoryInfo_v2": pynvml.c_nvmlMemory_v2_t(),
    "nvmlDeviceGetTemperatureV": pynvml.c_nvmlTemperature_v1_t(),
    "nvmlDeviceGetGpuFabricInfoV": pynvml.c_nvmlGpuFabricInfo_v3_t(),
    "nvmlGpmQueryDeviceSupport": pynvml.c_nvmlGpmSupport_t(),
}
codes = {}
for name, structure in structures.items():
    structure.version = 0x7F000000 | ctypes.sizeof(structure)
    codes[name] = getattr(pynvml.nvmlLib, name)(handle, ctypes.byref(structure))
request = pynvml.c_nvmlGpmMetricsGet_t()
request.version = 7
codes["nvmlGpmMetricsGet"] = pynvml.nvmlLib.nvmlGpmMetricsGet(ctypes.byref(request))
none = ctypes.c_uint(0)
size = pynvml.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(none), None)
processes = [(p.pid, p.usedGpuMemory, p.gpuInstanceId) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
aggregate = pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, 1), pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0)
power = [v.value.uiVal for v in pynvml.nvmlDeviceGetFieldValues(handle, [(185, 0), (186, 0), (186, 1)])]
memory = [pynvml.nvmlDeviceGetMemoryInfo(handle, version) for version in (None, pynvml.nvmlMemory_v2)]
print(json.dumps({
    "codes": codes, "size": [size, none.value], "processes": processes, "aggregate": aggregate, "power": power,
    "v1": [memory[0].used, memory[0].free], "v2": [memory[1].used, memory[1].free, memory[1].reserved],
}))
"""


def run_with(stub: Stub, program: str) -> Any:
    argv = [sys.executable, "-c", program]
    result = subprocess.run(argv, env=stub.environ(), capture_output=True, text=True, check=True, timeout=60)
    return json.loads(result.stdout)


def test_versions_sizes_and_arithmetic_of_nvml(nvml_stub: Stub) -> None:
    nvml_stub.drive("""
        device 0 uuid GPU-a
        device 0 memory_total 1000
        device 0 memory_used 100
        device 0 memory_reserved 20
        device 0 processes 2
        device 0 ecc_uncorrected_aggregate 5
        device 0 power 400000
        device 0 module_power 900000
    """)
    answer = run_with(nvml_stub, VERSIONED)
    assert set(answer["codes"].values()) == {pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH}
    assert answer["size"] == [pynvml.NVML_ERROR_INSUFFICIENT_SIZE, 2]
    assert answer["processes"] == [[1000, None, 0xFFFFFFFF], [1001, None, 0xFFFFFFFF]]
    assert answer["aggregate"] == [5, 0]
    assert answer["power"] == [400000, 400000, 900000]
    assert (answer["v1"], answer["v2"]) == ([120, 880], [100, 880, 20])


def test_old_driver_lacks_functions(nvml_stub: Stub) -> None:
    nvml_stub.install_driver("470.103.01")
    old = ctypes.CDLL(str(nvml_stub.folder / build.LIBRARY))
    assert [name for name in build.ADDED_IN if hasattr(old, name)] == []
    assert hasattr(old, "nvmlDeviceGetMemoryInfo")
