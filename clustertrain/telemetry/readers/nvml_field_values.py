"""Figures that NVML hands out by number, several in one call (``nvmlDeviceGetFieldValues``).

A figure has several numbers over the generations of GPUs. Which of them a device knows is found out at the first
answer; from then on only that one is asked for, so that a counter never changes its meaning.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from itertools import islice
from operator import mul
from typing import Any, NamedTuple

from clustertrain.telemetry.readers.nvml import Nvml, NvmlError

_DEVICE = 0
_ALL_LINKS = 0xFFFFFFFF  # as the scope of a figure of NVLinks: the sum over all of them
# nvmlFieldValue_t: the number, its scope, two times that are not used, nvmlValueType_t, nvmlReturn_t, 8 bytes of value
_FIELD = struct.Struct("=II16xiI8s")
_VALUES = [struct.Struct(s) for s in ("=d", "=I4x", "=Q", "=Q", "=q", "=i4x", "=H6x")]  # by nvmlValueType_t
_U32 = 1
# The fourth word of a nvmlFieldValue_t whose fifth is a whole number of 64 bits: nvmlValueType_t unsigned long or long
# long, and above it the nvmlReturn_t of success.
_U64 = frozenset({2, 3})


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
    "nvlink_tx_bytes": (Source((138,), 1024.0, _ALL_LINKS, wide=True), Source((202,), 1.0, _ALL_LINKS, wide=True)),
    "nvlink_rx_bytes": (Source((139,), 1024.0, _ALL_LINKS, wide=True), Source((204,), 1.0, _ALL_LINKS, wide=True)),
    "memory_temperature_c": (Source((82,)),),
    "nvlink_errors": (
        Source((161, 162, 163), scope=_ALL_LINKS),  # NVLINK_ERROR_DL_REPLAY, _RECOVERY, _CRC: Hopper
        Source((38, 45, 52, 59)),  # totals of flit CRC, data CRC, replay and recovery: before
        Source((208, 211, 215), scope=_ALL_LINKS),  # receive errors, link integrity, recoveries: from Blackwell on
    ),
}


class Question(NamedTuple):
    """What NVML is asked for several figures at once, and the memory in which it answers."""

    sources: tuple[tuple[Source, ...], ...]  # of each name those that are tried
    scales: tuple[float, ...]  # where each is known to have one number: theirs
    length: int
    memory: ctypes.Array[ctypes.c_char]
    words: ctypes.Array[ctypes.c_uint64]  # the same memory, 5 a number


class FieldValues:
    """The figures of one device."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._values_of = nvml.function("nvmlDeviceGetFieldValues")
        self._known: dict[str, Source] = {}
        self._questions: dict[tuple[str, ...], Question] = {}

    def forget(self) -> None:
        """The device has come back, perhaps as another one."""
        self._known.clear()
        self._questions.clear()

    def read(self, handle: Any, names: tuple[str, ...]) -> list[float | NvmlError]:
        """Of each name the value, or why there is none.

        Raises:
            NvmlError: the call as a whole failed.
        """
        question = self._questions.get(names) or self._ask(names)
        code = self._values_of(handle, question.length, question.memory)
        if code:
            raise self._nvml.error(code)
        if question.scales and _U64.issuperset(question.words[3::5]):
            return list(map(mul, question.scales, question.words[4::5]))
        each = _FIELD.iter_unpack(question.memory)
        return [
            self._choose(name, [(s, list(islice(each, len(s.ids)))) for s in sources])
            for name, sources in zip(names, question.sources, strict=True)
        ]

    def _ask(self, names: tuple[str, ...]) -> Question:
        sources = tuple((self._known[n],) if n in self._known else SOURCES[n] for n in names)
        asked = [(number, s.scope) for each in sources for s in each for number in s.ids]
        memory = ctypes.create_string_buffer(_FIELD.size * len(asked))
        for i, (number, scope) in enumerate(asked):
            _FIELD.pack_into(memory, i * _FIELD.size, number, scope, 0, 0, b"")
        settled = len(asked) == len(names) and all(n in self._known for n in names)
        scales = tuple(each[0].scale for each in sources) if settled else ()
        words = (ctypes.c_uint64 * (5 * len(asked))).from_buffer(memory)
        question = self._questions[names] = Question(sources, scales, len(asked), memory, words)
        return question

    def _choose(self, name: str, tried: list[tuple[Source, list[Any]]]) -> float | NvmlError:
        why = None
        for source, answers in tried:
            failed = [code for _, _, _, code, _ in answers if code]
            if failed and (len(failed) == len(answers) or name in self._known):
                why = why or self._nvml.error(failed[0])
                continue
            good = [(number, kind, raw) for number, _, kind, code, raw in answers if not code]
            if source.wide and good[0][1] == _U32:
                return NvmlError("NOT_SUPPORTED", "the driver counts it in 32 bits, which overflow within a second")
            if name not in self._known:
                self._known[name] = source._replace(ids=tuple(number for number, _, _ in good))
                self._questions.clear()
            total: float = sum(_VALUES[kind].unpack(raw)[0] for _, kind, raw in good)
            return source.scale * total
        return why or NvmlError("NOT_SUPPORTED")
