"""The only interface to NVML. No other module imports pynvml, and this one does not import torch.

Errors are raised as :class:`NvmlError` with NVML's names (``NOT_SUPPORTED``, ``GPU_IS_LOST`` …), so a caller can record
why a value is missing. Not thread-safe: one thread opens, reads and closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from clustertrain.telemetry import fields

# Fields of one device per tick, in reading order.
FIELDS = tuple(f.name for f in fields.GPU if f.pace == fields.FAST)

_ERROR_TEXT = {
    "UNINITIALIZED": "NVML was shut down",
    "INVALID_ARGUMENT": "NVML no longer knows this device",
    "NOT_SUPPORTED": "this GPU or its driver does not support it",
    "NO_PERMISSION": "the driver does not let this user read it",
    "NOT_FOUND": "NVML does not list it",
    "DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded",
    "TIMEOUT": "the driver did not respond in time",
    "LIBRARY_NOT_FOUND": "libnvidia-ml.so.1 not found: no NVIDIA driver on this machine",
    "FUNCTION_NOT_FOUND": "the driver is too old",
    "GPU_IS_LOST": "the GPU has fallen off the bus or cannot be reached",
    "RESET_REQUIRED": "the GPU needs a reset",
    "LIB_RM_VERSION_MISMATCH": "libnvidia-ml and the kernel driver differ in version; the node needs a reboot",
    "NO_DATA": "the driver has no value yet",
    "IMPLAUSIBLE": "the driver returned an impossible value",
    "UNKNOWN": "the driver reported an unknown error",
}

_FUNCTION_NOT_FOUND = 13  # nvmlReturn_t
# nvmlMemory_v2_t as 64-bit words: version (in the lower half of the first word), then total, reserved, free and used
# bytes. nvidia-ml-py's structure is slower because it checks each value for strings.
_MEMORY_V2 = ctypes.c_uint64 * 5
_TOTAL_WORD, _USED_WORD = 1, 4

T = TypeVar("T")


class NvmlError(Exception):
    """Failed NVML call. ``name`` is NVML's name without ``NVML_ERROR_``; ``reason`` adds an explanation."""

    def __init__(self, name: str, text: str | None = None) -> None:
        self.name = name
        self.reason = f"{name}: {text or _ERROR_TEXT.get(name, 'see nvmlReturn_t in the NVML reference')}"
        super().__init__(self.reason)


class Device(msgspec.Struct, frozen=True):
    """Constant properties of a GPU or a MIG slice.

    ``minor`` and ``index`` differ on some machines and inside cgroups.
    """

    uuid: str
    index: int | None = None  # NVML's ordinal among the devices visible to this process
    minor: int | None = None  # the N of /dev/nvidiaN
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_includes_reserved: bool = False  # only NVML's first memory call works: "used" is about 100 MB too high
    parent: str | None = None  # for a MIG slice, the GPU's UUID
    power_limit_w: float | None = None  # enforced by the board
    reason: str | None = None  # why the device could not be opened


class MemoryInfo(NamedTuple):
    """Device memory in bytes."""

    total: int
    used: int


class NvLinks(NamedTuple):
    """NVLinks of one GPU."""

    active: int
    total: int
    nvswitch: bool | None
    """Whether an active link leads to a switch; None if NVML does not report it."""


class _HandleCache(dict[str, object]):
    """Cache of NVML handles by UUID; a missing handle is looked up on access."""

    def __init__(self, look_up: Callable[[str], object]) -> None:
        self._look_up = look_up

    def __missing__(self, uuid: str) -> object:
        handle = self[uuid] = self._look_up(uuid)
        return handle


def _function_not_found(*args: object) -> int:
    return _FUNCTION_NOT_FOUND


class Nvml:
    """An NVML session.

    ``lib`` is nvidia-ml-py while the session is open, for its constants and structures. ``handles[uuid]`` is the NVML
    handle of a device; access raises NvmlError if the device cannot be reached.
    """

    def __init__(self) -> None:
        self.lib: Any = None
        self.handles = _HandleCache(self._lookup_handle)
        self._get_memory_v2: Callable[..., int] = _function_not_found
        self._names: dict[int, str] = {}
        self._without_memory_v2: set[str] = set()
        self._memory_buffer: ctypes.Array[ctypes.c_uint64] | None = None
        self._close_callbacks: list[Callable[[], None]] = []

    def open(self) -> str | None:
        """Initialize NVML and return the driver's version; None if the version cannot be read.

        Raises:
            NvmlError: there is no driver, or NVML does not start.
        """
        try:
            lib = importlib.import_module("pynvml")
        except ImportError as e:
            raise NvmlError("LIBRARY_NOT_FOUND", f"the Python package nvidia-ml-py cannot be imported: {e}") from e
        self.lib = lib
        prefix = "NVML_ERROR_"
        self._names = {getattr(lib, n): n.removeprefix(prefix) for n in dir(lib) if n.startswith(prefix)}
        self.handles.clear()
        self.call("nvmlInitWithFlags", 0)
        try:
            return str(self.call("nvmlSystemGetDriverVersion"))
        except NvmlError:
            return None

    def close(self) -> None:
        if self.lib is None:
            return
        while self._close_callbacks:
            self._close_callbacks.pop()()
        self.handles.clear()
        with contextlib.suppress(NvmlError):  # already shut down or never initialized
            self.call("nvmlShutdown")
        self.lib = None

    def devices(self) -> list[Device]:
        """Return all GPUs visible to this process and their MIG slices; a device that does not open has a ``reason``.

        Raises:
            NvmlError: the devices cannot be counted.
        """
        devices = []
        for index in range(int(self.call("nvmlDeviceGetCount"))):
            try:
                handle = self.call("nvmlDeviceGetHandleByIndex", index)
                device = self._describe(handle, index, None)
            except NvmlError as e:
                devices.append(Device(uuid=f"unreadable-{index}", index=index, reason=e.reason))
                continue
            devices.append(device)
            devices.extend(self._describe(h, index, device.uuid) for h in self._mig_handles(handle))
        return devices

    def refresh_handle(self, uuid: str) -> None:
        """Look up the device again; its handle is invalid after the device was lost or NVML was reopened.

        Raises:
            NvmlError: the device cannot be reached.
        """
        self.handles.pop(uuid, None)
        self.handles[uuid] = self._lookup_handle(uuid)

    def before_close(self, release: Callable[[], None]) -> None:
        """Register ``release``, which is called once before NVML closes to free NVML resources."""
        self._close_callbacks.append(release)

    def has_handle(self, uuid: str) -> bool:
        """Return whether the device's handle is cached."""
        return uuid in self.handles

    def pci_address(self, uuid: str) -> str:
        """Return the PCI address in the format of sysfs: ``0000:1b:00.0``.

        Raises:
            NvmlError: NVML does not report it.
        """
        pci = self.call("nvmlDeviceGetPciInfo_v3", self.handles[uuid])
        return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"

    def nvlinks(self, uuid: str) -> NvLinks:
        """Return the NVLinks of a GPU; (0, 0, None) without NVLink.

        Raises:
            NvmlError: NVML does not report them, as in MIG mode.
        """
        handle, states = self.handles[uuid], self.link_states(uuid)
        remote_types = [
            self._call_or_none(self.call, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            for link, up in enumerate(states)
            if up
        ]
        known_types = [kind for kind in remote_types if kind is not None]
        switch = (
            any(remote_type == self.lib.NVML_NVLINK_DEVICE_TYPE_SWITCH for remote_type in known_types)
            if known_types
            else None
        )
        return NvLinks(sum(states), len(states), switch)

    def link_states(self, uuid: str) -> list[bool]:
        """Return for each NVLink of a GPU whether it is up; empty without NVLink.

        Raises:
            NvmlError: NVML does not report them.
        """
        handle, states = self.handles[uuid], list[bool]()
        get_state, state = self.function("nvmlDeviceGetNvLinkState"), ctypes.c_uint()
        state_ref = ctypes.byref(state)
        for link in range(self.lib.NVML_NVLINK_MAX_LINKS):
            code = get_state(handle, link, state_ref)
            if not code:
                states.append(bool(state.value))
                continue
            error = self.error(code)
            if error.name not in ("NOT_SUPPORTED", "INVALID_ARGUMENT"):
                raise error
            break  # after the last link of this GPU
        return states

    def nvlink_domain(self, uuid: str) -> str:
        """Return ``<cluster UUID>.<clique>``, shared by all GPUs that reach each other over NVLink across nodes.

        The result is empty if the fabric is down or spans a single node (its cluster UUID is zero).

        Raises:
            NvmlError: the driver does not support multi-node NVLink.
        """
        info = self._fabric_info(self.handles[uuid])
        cluster_uuid = bytes(info.clusterUuid)
        if info.state != self.lib.NVML_GPU_FABRIC_STATE_COMPLETED or info.status or not any(cluster_uuid):
            return ""
        return f"{cluster_uuid.hex()}.{info.cliqueId}"

    def _fabric_info(self, handle: object) -> Any:
        info = self.lib.c_nvmlGpuFabricInfo_v2_t()
        try:
            self.call("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
        except NvmlError as e:
            if e.name not in ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"):
                raise
            # Drivers before 550 have only this call, and CUDA 14 removes it.
            info = self.lib.c_nvmlGpuFabricInfo_t()
            self.call("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info))
        return info

    def _describe(self, handle: object, index: int, parent: str | None) -> Device:
        uuid = str(self.call("nvmlDeviceGetUUID", handle))
        self.handles[uuid] = handle
        memory = self._call_or_none(self.read_memory, uuid, handle)
        limit_mw = None if parent else self._call_or_none(self.call, "nvmlDeviceGetEnforcedPowerLimit", handle)
        return Device(
            uuid=uuid,
            index=index,
            minor=None if parent else self._call_or_none(self.call, "nvmlDeviceGetMinorNumber", handle),
            name=self._call_or_none(self.call, "nvmlDeviceGetName", handle),
            memory_total_bytes=None if memory is None else memory.total,
            memory_includes_reserved=uuid in self._without_memory_v2,
            parent=parent,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
        )

    def _mig_handles(self, handle: object) -> list[object]:
        mode = self._call_or_none(self.call, "nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            return []
        count = self._call_or_none(self.call, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        found = [self._call_or_none(self.call, "nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(count)]
        return [h for h in found if h is not None]

    def read_memory(self, uuid: str, handle: object) -> MemoryInfo:
        """Return the device's memory; ``used`` excludes the driver's reserve if NVML reports it separately.

        Raises:
            NvmlError: NVML has no value.
        """
        if uuid not in self._without_memory_v2:
            try:
                return self._memory_v2(handle)
            except NvmlError as e:
                if e.name not in ("FUNCTION_NOT_FOUND", "NOT_SUPPORTED", "ARGUMENT_VERSION_MISMATCH"):
                    raise
        # The first version counts the driver's reserve as used.
        memory = self.call("nvmlDeviceGetMemoryInfo", handle)
        self._without_memory_v2.add(uuid)
        return MemoryInfo(memory.total, memory.used)

    def _memory_v2(self, handle: object) -> MemoryInfo:
        if self._memory_buffer is None:
            self._memory_buffer = _MEMORY_V2(self.lib.nvmlMemory_v2)
            self._get_memory_v2 = self.function("nvmlDeviceGetMemoryInfo_v2")
        code = self._get_memory_v2(handle, self._memory_buffer)
        if code:
            raise self.error(code)
        return MemoryInfo(self._memory_buffer[_TOTAL_WORD], self._memory_buffer[_USED_WORD])

    def _call_or_none(self, call: Callable[..., T], *args: object) -> T | None:
        try:
            return call(*args)
        except NvmlError:
            return None

    def call(self, name: str, *args: object) -> Any:
        """Call a function of nvidia-ml-py.

        Raises:
            NvmlError: the call failed, or the function does not exist.
        """
        if self.lib is None:
            raise NvmlError("UNINITIALIZED")
        function = getattr(self.lib, name, None)
        if function is None:
            raise NvmlError("FUNCTION_NOT_FOUND", "the installed nvidia-ml-py is too old")
        try:
            return function(*args)
        except self.lib.NVMLError as e:
            raise self.error(e.value) from e

    def function(self, name: str) -> Callable[..., int]:
        """Return a C function, which returns a code for :meth:`error`; a missing one returns FUNCTION_NOT_FOUND.

        The function stays valid as long as this object. Use it for calls made every second: nvidia-ml-py's wrappers
        would take most of the sampler's time.
        """
        function: Callable[..., int] | None = getattr(self.lib and self.lib.nvmlLib, name, None)
        return _function_not_found if function is None else function

    def _lookup_handle(self, uuid: str) -> object:
        try:
            return self.call("nvmlDeviceGetHandleByUUID", uuid.encode())
        except NvmlError as e:
            # Any lost GPU makes the search by UUID fail, for healthy ones too.
            handle = self._find_by_index(uuid) if e.name == "GPU_IS_LOST" else None
            if handle is None:
                raise
            return handle

    def _find_by_index(self, uuid: str) -> object | None:
        for index in range(int(self.call("nvmlDeviceGetCount"))):
            board = self._call_or_none(self.call, "nvmlDeviceGetHandleByIndex", index)
            handles: list[object] = [] if board is None else [board, *self._mig_handles(board)]
            for handle in handles:
                if self._call_or_none(self.call, "nvmlDeviceGetUUID", handle) == uuid:
                    return handle
        return None

    def error(self, code: int) -> NvmlError:
        """Return the error for an NVML return code."""
        return NvmlError(self._names.get(code, f"code {code}"))
