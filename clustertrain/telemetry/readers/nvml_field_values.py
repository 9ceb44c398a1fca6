"""Fields that NVML returns by id, several per call (``nvmlDeviceGetFieldValues``).

The id of a field depends on the GPU generation. The first answer shows which id a device supports; later calls request
only that id, so a counter never changes its meaning.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping
from itertools import islice
from operator import mul
from typing import Any, NamedTuple

from clustertrain.telemetry.readers.nvml import Nvml, NvmlError

_DEVICE_SCOPE = 0
_ALL_LINKS_SCOPE = 0xFFFFFFFF  # scope of an NVLink field: the sum over all links
_MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS
# nvmlFieldValue_t: id, scope, two unused times, nvmlValueType_t, nvmlReturn_t, 8 bytes of value
_FIELD_VALUE = struct.Struct("=II16xiI8s")
_VALUE_FORMATS = [struct.Struct(s) for s in ("=d", "=I4x", "=Q", "=Q", "=q", "=i4x", "=H6x")]  # by nvmlValueType_t
_UNSIGNED_INT = 1
# Fourth 64-bit word of a successful nvmlFieldValue_t with a 64-bit integer value: nvmlValueType_t unsigned long or
# unsigned long long in the lower half, nvmlReturn_t success (0) in the upper half.
_U64_TYPES = frozenset({2, 3})


class FieldSource(NamedTuple):
    """NVML fields whose values, summed and scaled, give a field of ours."""

    keys: tuple[tuple[int, int], ...]  # NVML_FI_DEV_* and scope
    scale: float = 1.0
    needs_64_bit: bool = False  # a 32-bit counter would overflow within a second


def _fields(*numbers: int, scopes: Iterable[int] = (_DEVICE_SCOPE,)) -> tuple[tuple[int, int], ...]:
    return tuple((number, scope) for scope in scopes for number in numbers)


_ALL_LINKS = (_ALL_LINKS_SCOPE,)

# In order of preference. The COUNT fields of NVLink 5 support only the scope of all links.
SOURCES: Mapping[str, tuple[FieldSource, ...]] = {
    "energy_j": (FieldSource(_fields(83), 1e-3),),  # TOTAL_ENERGY_CONSUMPTION, mJ
    "pcie_tx_bytes": (FieldSource(_fields(197), needs_64_bit=True),),  # PCIE_COUNT_TX_BYTES, since driver 555
    "pcie_rx_bytes": (FieldSource(_fields(198), needs_64_bit=True),),
    # NVLINK_THROUGHPUT_DATA_TX, KiB; NVLINK_COUNT_XMIT_BYTES from Blackwell on
    "nvlink_tx_bytes": (
        FieldSource(_fields(138, scopes=_ALL_LINKS), 1024.0, needs_64_bit=True),
        FieldSource(_fields(202, scopes=_ALL_LINKS), needs_64_bit=True),
    ),
    "nvlink_rx_bytes": (
        FieldSource(_fields(139, scopes=_ALL_LINKS), 1024.0, needs_64_bit=True),
        FieldSource(_fields(204, scopes=_ALL_LINKS), needs_64_bit=True),
    ),
    "memory_temperature_c": (FieldSource(_fields(82)),),
    "nvlink_errors": (
        # NVLINK_ERROR_DL_REPLAY, _RECOVERY, _CRC of Hopper, which has no sum over all links.
        FieldSource(_fields(161, 162, 163, scopes=range(_MAX_LINKS))),
        FieldSource(_fields(38, 45, 52, 59)),  # totals of flit CRC, data CRC, replay and recovery: before
        # Receive errors, link integrity errors, recoveries: from Blackwell on.
        FieldSource(_fields(208, 211, 215, scopes=_ALL_LINKS)),
    ),
    # RETIRED_SBE, RETIRED_DBE, RETIRED_PENDING: GPUs before Ampere retire pages, later ones remap rows.
    "remapped_rows": (FieldSource(_fields(29, 30)),),
    "remap_pending": (FieldSource(_fields(31)),),
}


class FieldRequest(NamedTuple):
    """Request for several fields at once, and the buffer for NVML's answer."""

    sources: tuple[tuple[FieldSource, ...], ...]  # candidates per name
    scales: tuple[float, ...]  # scale per name once each has a single known id, else empty
    field_count: int
    buffer: ctypes.Array[ctypes.c_char]
    u64_view: ctypes.Array[ctypes.c_uint64]  # the same memory, 5 words per id


class FieldValues:
    """Reader of the field values of one device."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._get_field_values = nvml.function("nvmlDeviceGetFieldValues")
        self._resolved: dict[str, FieldSource] = {}
        self._requests: dict[tuple[str, ...], FieldRequest] = {}

    def reset(self) -> None:
        """Forget the resolved ids, after the device returned, possibly as another one."""
        self._resolved.clear()
        self._requests.clear()

    def read(self, handle: object, names: tuple[str, ...]) -> list[float | NvmlError]:
        """Return for each name its value or the error that explains why it is missing.

        Raises:
            NvmlError: the whole call failed.
        """
        request = self._requests.get(names) or self._build_request(names)
        code = self._get_field_values(handle, request.field_count, request.buffer)
        if code:
            raise self._nvml.error(code)
        if request.scales and _U64_TYPES.issuperset(request.u64_view[3::5]):
            return list(map(mul, request.scales, request.u64_view[4::5]))
        answers = _FIELD_VALUE.iter_unpack(request.buffer)
        return [
            self._resolve_value(name, [(s, list(islice(answers, len(s.keys)))) for s in sources])
            for name, sources in zip(names, request.sources, strict=True)
        ]

    def _build_request(self, names: tuple[str, ...]) -> FieldRequest:
        sources = tuple((self._resolved[n],) if n in self._resolved else SOURCES[n] for n in names)
        id_scopes = [key for each in sources for s in each for key in s.keys]
        buffer = ctypes.create_string_buffer(_FIELD_VALUE.size * len(id_scopes))
        for i, (number, scope) in enumerate(id_scopes):
            _FIELD_VALUE.pack_into(buffer, i * _FIELD_VALUE.size, number, scope, 0, 0, b"")
        is_resolved = len(id_scopes) == len(names) and all(n in self._resolved for n in names)
        scales = tuple(each[0].scale for each in sources) if is_resolved else ()
        u64_view = (ctypes.c_uint64 * (5 * len(id_scopes))).from_buffer(buffer)
        request = self._requests[names] = FieldRequest(sources, scales, len(id_scopes), buffer, u64_view)
        return request

    def _resolve_value(self, name: str, candidates: list[tuple[FieldSource, list[Any]]]) -> float | NvmlError:
        error = None
        for source, answers in candidates:
            error_codes = [code for *_, code, _ in answers if code]
            if error_codes and (len(error_codes) == len(answers) or name in self._resolved):
                error = error or self._field_error(error_codes[0])
                continue
            succeeded = [((number, scope), kind, raw) for number, scope, kind, code, raw in answers if not code]
            if source.needs_64_bit and succeeded[0][1] == _UNSIGNED_INT:
                return NvmlError("NOT_SUPPORTED", "the driver's 32-bit counter overflows within a second")
            if name not in self._resolved:
                self._resolved[name] = source._replace(keys=tuple(key for key, _, _ in succeeded))
                self._requests.clear()
            total: float = sum(_VALUE_FORMATS[value_type].unpack(raw)[0] for _, value_type, raw in succeeded)
            return source.scale * total
        return error or NvmlError("NOT_SUPPORTED")

    def _field_error(self, code: int) -> NvmlError:
        error = self._nvml.error(code)
        # The handle is valid, otherwise the whole call would have failed.
        return NvmlError("NOT_SUPPORTED", "this driver does not know it") if error.name == "INVALID_ARGUMENT" else error
