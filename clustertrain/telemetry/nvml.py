"""The one door to NVML. Nothing else imports pynvml, and nothing here imports torch.

Errors come out as :class:`NvmlError` under NVML's own names (``NOT_SUPPORTED``, ``GPU_IS_LOST`` …), so a caller can
store why a figure is missing. Not thread-safe: one thread opens, reads and closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

# The figures of one device, in the order in which samples store them. Units: ratio 0-1, bytes, W, °C, MHz, J. energy_j
# counts from the driver's load; only differences mean something.
FIELDS = (
    "utilization",
    "memory_used_bytes",
    "power_w",
    "temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "energy_j",
)

_WORDS = {
    "UNINITIALIZED": "NVML was shut down",
    "INVALID_ARGUMENT": "NVML does not know this device any more",
    "NOT_SUPPORTED": "this GPU or its driver does not offer it",
    "NO_PERMISSION": "the driver does not let this user read it",
    "NOT_FOUND": "NVML does not list it",
    "DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded",
    "TIMEOUT": "the driver gave no answer in time",
    "LIBRARY_NOT_FOUND": "libnvidia-ml.so.1 not found: no NVIDIA driver on this machine",
    "FUNCTION_NOT_FOUND": "the driver is too old for it",
    "GPU_IS_LOST": "the GPU has fallen off the bus or cannot be reached",
    "RESET_REQUIRED": "the GPU needs a reset",
    "LIB_RM_VERSION_MISMATCH": "libnvidia-ml and the kernel driver differ in version; the node needs a reboot",
    "NO_DATA": "the driver has no value yet",
    "IMPLAUSIBLE": "the driver returned a value that cannot be",
    "UNKNOWN": "the driver reported an unknown error",
}


class NvmlError(Exception):
    """A call that NVML refused. ``name`` is NVML's, without ``NVML_ERROR_``; ``reason`` adds plain words."""

    def __init__(self, name: str, words: str | None = None) -> None:
        self.name = name
        self.reason = f"{name}: {words or _WORDS.get(name, 'see nvmlReturn_t in the NVML reference')}"
        super().__init__(self.reason)


class Device(msgspec.Struct, frozen=True):
    """What does not change about a GPU, or a MIG slice of one (``parent`` is then the GPU's UUID).

    ``minor`` is the N of /dev/nvidiaN and ``index`` NVML's ordinal among the devices it shows to this process; the two
    differ on some machines and inside cgroups. ``reason`` says why a device could not be opened.
    """

    uuid: str
    index: int | None = None
    minor: int | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_includes_reserved: bool = False  # only NVML's first memory call works: "used" is some 100 MB too high
    parent: str | None = None
    reason: str | None = None


class NvLinks(NamedTuple):
    """``nvswitch``: whether an active one leads to a switch; None where NVML does not say."""

    active: int
    total: int
    nvswitch: bool | None


class Nvml:
    """NVML, opened and closed."""

    def __init__(self) -> None:
        self._lib: Any = None
        self._names: dict[int, str] = {}
        self._handles: dict[str, Any] = {}
        self._without_memory_v2: set[str] = set()
        self._temperature_v = True

    def open(self) -> str | None:
        """Initialise NVML; returns the driver's version, None where it cannot be read.

        Raises:
            NvmlError: there is no driver, or it does not start.
        """
        try:
            lib = importlib.import_module("pynvml")
        except ImportError as e:
            raise NvmlError("LIBRARY_NOT_FOUND", f"the Python package nvidia-ml-py cannot be imported: {e}") from e
        self._lib = lib
        prefix = "NVML_ERROR_"
        self._names = {getattr(lib, n): n.removeprefix(prefix) for n in dir(lib) if n.startswith(prefix)}
        self._handles.clear()
        self._call("nvmlInitWithFlags", 0)
        try:
            return str(self._call("nvmlSystemGetDriverVersion"))
        except NvmlError:
            return None

    def close(self) -> None:
        if self._lib is None:
            return
        self._handles.clear()
        with contextlib.suppress(NvmlError):  # already shut down, or never up: nothing is held
            self._call("nvmlShutdown")
        self._lib = None

    def devices(self) -> list[Device]:
        """All GPUs that this process may see, and their MIG slices. One that does not open is listed with its reason.

        Raises:
            NvmlError: the devices cannot even be counted.
        """
        found = []
        for index in range(int(self._call("nvmlDeviceGetCount"))):
            try:
                handle = self._call("nvmlDeviceGetHandleByIndex", index)
                device = self._describe(handle, index, None)
            except NvmlError as e:
                found.append(Device(uuid=f"unreadable-{index}", index=index, reason=e.reason))
                continue
            found.append(device)
            found.extend(self._slices(handle, device))
        return found

    def find(self, uuid: str) -> None:
        """Look the device up anew; its old handle is dead after a loss or a reopening.

        Raises:
            NvmlError: it cannot be reached.
        """
        self._handles.pop(uuid, None)
        self._handles[uuid] = self._call("nvmlDeviceGetHandleByUUID", uuid.encode())

    def holds(self, uuid: str) -> bool:
        """Whether there is a handle for the device."""
        return uuid in self._handles

    def read(self, uuid: str, field: str) -> float:
        """One of :data:`FIELDS`, in its unit.

        Raises:
            NvmlError: NVML has no value; never a 0 in place of one.
        """
        if uuid not in self._handles:
            self.find(uuid)
        value, ceiling = _READ[field](self, uuid, self._handles[uuid])
        if not 0 <= value <= ceiling:
            raise NvmlError("IMPLAUSIBLE", f"the driver returned {value:g} for {field}")
        return value

    def pci_address(self, uuid: str) -> str:
        """As sysfs writes it: ``0000:1b:00.0``.

        Raises:
            NvmlError: NVML does not tell.
        """
        pci = self._call("nvmlDeviceGetPciInfo_v3", self._handles[uuid])
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"

    def nvlinks(self, uuid: str) -> NvLinks:
        """All NVLinks of a GPU; (0, 0, None) where it has none.

        Raises:
            NvmlError: NVML does not tell, which is so in MIG mode.
        """
        handle, states = self._handles[uuid], []
        for link in range(self._lib.NVML_NVLINK_MAX_LINKS):
            try:
                states.append(bool(self._call("nvmlDeviceGetNvLinkState", handle, link)))
            except NvmlError as e:
                if e.name not in ("NOT_SUPPORTED", "INVALID_ARGUMENT"):  # past the last link of this GPU
                    raise
                break
        kinds = [
            self._optional(self._call, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            for link, up in enumerate(states)
            if up
        ]
        told = [kind for kind in kinds if kind is not None]
        switch = any(kind == self._lib.NVML_NVLINK_DEVICE_TYPE_SWITCH for kind in told) if told else None
        return NvLinks(sum(states), len(states), switch)

    def nvlink_domain(self, uuid: str) -> str:
        """What all GPUs share that reach each other over NVLink across nodes: ``<cluster UUID>.<clique>``. Empty where
        the fabric is not up, or is a single node's (its cluster UUID is zero).

        Raises:
            NvmlError: the driver does not know of such fabrics.
        """
        info = self._lib.c_nvmlGpuFabricInfo_t()
        self._call("nvmlDeviceGetGpuFabricInfo", self._handles[uuid], ctypes.byref(info))
        cluster = bytes(info.clusterUuid)
        if info.state != self._lib.NVML_GPU_FABRIC_STATE_COMPLETED or info.status or not any(cluster):
            return ""
        return f"{cluster.hex()}.{info.cliqueId}"

    def _describe(self, handle: Any, index: int, parent: str | None) -> Device:
        uuid = str(self._call("nvmlDeviceGetUUID", handle))
        self._handles[uuid] = handle
        memory = self._optional(self._memory, uuid, handle)
        return Device(
            uuid=uuid,
            index=index,
            minor=None if parent else self._optional(self._call, "nvmlDeviceGetMinorNumber", handle),
            name=self._optional(self._call, "nvmlDeviceGetName", handle),
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_includes_reserved=uuid in self._without_memory_v2,
            parent=parent,
        )

    def _slices(self, handle: Any, device: Device) -> list[Device]:
        mode = self._optional(self._call, "nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0] or device.index is None:
            return []
        found = []
        for i in range(self._optional(self._call, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            inner = self._optional(self._call, "nvmlDeviceGetMigDeviceHandleByIndex", handle, i)
            if inner is not None:
                found.append(self._describe(inner, device.index, device.uuid))
        return found

    def _memory(self, uuid: str, handle: Any) -> Any:
        if uuid not in self._without_memory_v2:
            try:
                return self._call("nvmlDeviceGetMemoryInfo", handle, self._lib.nvmlMemory_v2)
            except NvmlError as e:
                if e.name not in ("FUNCTION_NOT_FOUND", "NOT_SUPPORTED", "ARGUMENT_VERSION_MISMATCH"):
                    raise
        # The first version counts memory that the driver reserves as used.
        memory = self._call("nvmlDeviceGetMemoryInfo", handle)
        self._without_memory_v2.add(uuid)
        return memory

    def _temperature(self, handle: Any) -> float:
        sensor = self._lib.NVML_TEMPERATURE_GPU
        if self._temperature_v:
            try:
                return float(self._call("nvmlDeviceGetTemperatureV", handle, sensor))
            except NvmlError as e:
                if e.name not in ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"):
                    raise
                self._temperature_v = False
        # Gone with CUDA 14, but all that drivers before 570 have.
        return float(self._call("nvmlDeviceGetTemperature", handle, sensor))

    def _clock(self, handle: Any, kind: str) -> float:
        return float(self._call("nvmlDeviceGetClockInfo", handle, getattr(self._lib, kind)))

    def _optional(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except NvmlError:
            return None

    def _call(self, name: str, *args: Any) -> Any:
        if self._lib is None:
            raise NvmlError("UNINITIALIZED")
        function = getattr(self._lib, name, None)
        if function is None:
            raise NvmlError("FUNCTION_NOT_FOUND", "the installed nvidia-ml-py is too old for it")
        try:
            return function(*args)
        except self._lib.NVMLError as e:
            raise NvmlError(self._names.get(e.value, f"code {e.value}")) from e


# Each returns the value and the highest that can be: blanks of broken drivers arrive as enormous numbers.
_READ: dict[str, Callable[[Nvml, str, Any], tuple[float, float]]] = {
    "utilization": lambda n, _, h: (n._call("nvmlDeviceGetUtilizationRates", h).gpu / 100, 1.0),
    "memory_used_bytes": lambda n, u, h: (float(n._memory(u, h).used), 1e14),
    "power_w": lambda n, _, h: (n._call("nvmlDeviceGetPowerUsage", h) / 1000, 1e5),
    "temperature_c": lambda n, _, h: (n._temperature(h), 1e3),
    "sm_clock_mhz": lambda n, _, h: (n._clock(h, "NVML_CLOCK_SM"), 1e5),
    "memory_clock_mhz": lambda n, _, h: (n._clock(h, "NVML_CLOCK_MEM"), 1e5),
    "energy_j": lambda n, _, h: (n._call("nvmlDeviceGetTotalEnergyConsumption", h) / 1000, 1e15),
}
