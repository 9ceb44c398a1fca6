"""Figures that NVML hands out by number, several in one call (``nvmlDeviceGetFieldValues``).

A figure has several numbers over the generations of GPUs. Which of them a device knows is found out at the first
answer; from then on only that one is asked for, so that a counter never changes its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from clustertrain.telemetry.nvml import Nvml, NvmlError

_DEVICE = 0
_ALL_LINKS = 0xFFFFFFFF  # as the scope of a figure of NVLinks: the sum over all of them
_U32 = 1
# nvmlValueType_t, as the member of nvmlValue_t that holds the value.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Source(NamedTuple):
    """The sum of these numbers (NVML_FI_DEV_*), times ``scale``. ``wide``: a 32-bit counter would overflow within a
    second, and is worth nothing."""

    ids: tuple[int, ...]
    scale: float = 1.0
    scope: int = _DEVICE
    wide: bool = False


# In the order in which they are preferred. The COUNT fields of NVLink 5 answer to the sum's scope alone.
SOURCES: Mapping[str, tuple[Source, ...]] = {
    "energy_j": (Source((83,), 1e-3),),  # TOTAL_ENERGY_CONSUMPTION, mJ
    "pcie_tx_bytes": (Source((197,), wide=True),),  # PCIE_COUNT_TX_BYTES, since driver 555
    "pcie_rx_bytes": (Source((198,), wide=True),),
    # NVLINK_THROUGHPUT_DATA_TX, KiB; NVLINK_COUNT_XMIT_BYTES from Blackwell on
    "nvlink_tx_bytes": (Source((138,), 1024, _ALL_LINKS, wide=True), Source((202,), 1, _ALL_LINKS, wide=True)),
    "nvlink_rx_bytes": (Source((139,), 1024, _ALL_LINKS, wide=True), Source((204,), 1, _ALL_LINKS, wide=True)),
    "memory_temperature_c": (Source((82,)),),
    "nvlink_errors": (
        Source((161, 162, 163), scope=_ALL_LINKS),  # NVLINK_ERROR_DL_REPLAY, _RECOVERY, _CRC: Hopper
        Source((38, 45, 52, 59)),  # totals of flit CRC, data CRC, replay and recovery: before
        Source((208, 211, 215), scope=_ALL_LINKS),  # receive errors, link integrity, recoveries: from Blackwell on
    ),
}


class FieldValues:
    """The figures of one device."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._known: dict[str, Source] = {}
        self._asked: dict[tuple[str, ...], list[tuple[int, int]]] = {}

    def forget(self) -> None:
        """The device has come back, perhaps as another one."""
        self._known.clear()
        self._asked.clear()

    def read(self, handle: Any, names: tuple[str, ...]) -> dict[str, float | NvmlError]:
        """Of each name the value, or why there is none.

        Raises:
            NvmlError: the call as a whole failed.
        """
        asked = self._asked.get(names)
        if asked is None:
            asked = self._asked[names] = [(i, s.scope) for n in names for s in self._sources(n) for i in s.ids]
        values = self._nvml.call("nvmlDeviceGetFieldValues", handle, asked)
        found: dict[str, float | NvmlError] = {}
        at = 0
        for name in names:
            sources = self._sources(name)
            count = sum(len(s.ids) for s in sources)
            found[name] = self._choose(name, sources, values[at : at + count])
            at += count
        return found

    def _sources(self, name: str) -> tuple[Source, ...]:
        known = self._known.get(name)
        return SOURCES[name] if known is None else (known,)

    def _choose(self, name: str, sources: tuple[Source, ...], values: Sequence[Any]) -> float | NvmlError:
        at, why = 0, None
        for source in sources:
            answers = values[at : at + len(source.ids)]
            at += len(source.ids)
            good = [(i, v) for i, v in zip(source.ids, answers, strict=True) if v.nvmlReturn == 0]
            if len(good) < len(answers) and (not good or name in self._known):
                bad = next(v for v in answers if v.nvmlReturn)
                why = why or self._nvml.error(bad.nvmlReturn)
                continue
            if source.wide and any(v.valueType == _U32 for _, v in good):
                return NvmlError("NOT_SUPPORTED", "the driver counts it in 32 bits, which overflow within a second")
            if name not in self._known:
                self._known[name] = source._replace(ids=tuple(i for i, _ in good))
                self._asked.clear()
            return source.scale * float(sum(getattr(v.value, _MEMBERS[v.valueType]) for _, v in good))
        return why or NvmlError("NOT_SUPPORTED")
