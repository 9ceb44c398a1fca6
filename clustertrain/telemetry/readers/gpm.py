"""GPU performance monitoring (GPM), which Hopper and later GPUs have: how busy the parts of the chip were.

NVML gives means between two samples. The newer one of a pair is kept as the older of the next, so that the figures
cover the whole time, and not a slice of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Mapping
from typing import Any

from clustertrain import clock
from clustertrain.telemetry.readers.nvml import Nvml, NvmlError

SHORTEST_S = 0.1  # below it the counters have nothing new, and the means are wrong (NVIDIA/DCGM#310)
_METRIC = struct.Struct("=IId")  # nvmlGpmMetric_t begins with the number, nvmlReturn_t and the value
_ROUNDING = 1.02  # how far above the whole a share may come out

# nvmlGpmMetricId_t; NVML's are per cent.
METRICS: Mapping[str, int] = {"sm_activity": 2, "tensor_activity": 5, "dram_activity": 10}
GRAPHICS_UTIL = 1  # of a MIG slice, what nvmlDeviceGetUtilizationRates is of a whole GPU


class RollingPair:
    """The activities of one device.

    Args:
        nvml: the door, open.
        device: gives the handle that is asked whether it supports GPM.
        take: fills a sample of NVML's.
        metrics: the figures' names and NVML's numbers.
    """

    def __init__(
        self,
        nvml: Nvml,
        device: Callable[[], Any],
        take: Callable[[Any], None],
        metrics: Mapping[str, int] = METRICS,
        now: Callable[[], float] = clock.monotonic,
    ) -> None:
        self._nvml = nvml
        self._device = device
        self._take = take
        self._metrics = metrics
        self._now = now
        self._supported = False
        self._samples: list[Any] = []  # the older one, and the one to be filled
        self._question: tuple[Any, int, int] | None = None
        self._first: Any = None
        self._second: Any = None
        self._at: float | None = None
        self._values: dict[str, float | NvmlError] = {}

    def read(self) -> dict[str, float | NvmlError]:
        """Means since the last call that was at least :data:`SHORTEST_S` ago; the last ones again where it was not.

        Raises:
            NvmlError: NOT_SUPPORTED; NO_DATA at the first call, which begins the first pair; or any other.
        """
        now = self._now()
        if self._at is not None and now - self._at < SHORTEST_S:
            if self._values:
                return self._values
            raise NvmlError("NO_DATA", "a mean needs two samples")
        self._prepare()
        older, newer = self._samples
        self._take(newer)
        first, self._at = self._at is None, now
        self._samples = [newer, older]
        if first:
            raise NvmlError("NO_DATA", "a mean needs two samples")
        self._values = {}
        self._values = self._between(older, newer)
        return self._values

    def restart(self) -> None:
        """The device has been away: the next sample begins a new pair."""
        self._at = None
        self._values = {}
        self._supported = False

    def close(self) -> None:
        """Free the samples; NVML must still be open."""
        for sample in self._samples:
            with contextlib.suppress(NvmlError):
                self._nvml.call("nvmlGpmSampleFree", sample)
        self._samples = []
        self.restart()

    def _prepare(self) -> None:
        if not self._supported:
            support = self._nvml.call("nvmlGpmQueryDeviceSupport", self._device())
            if not support.isSupportedDevice:
                raise NvmlError("NOT_SUPPORTED", "this GPU has no performance monitoring (GPM); Hopper and later do")
            self._supported = True
        if not self._samples:
            self._nvml.before_close(self.close)
        while len(self._samples) < 2:
            self._samples.append(self._nvml.call("nvmlGpmSampleAlloc"))

    def _between(self, older: Any, newer: Any) -> dict[str, float | NvmlError]:
        if self._question is None:
            self._question = self._ask()
        question, at, step = self._question
        # Not by assignment: nvidia-ml-py's structures look at each for strings.
        self._first.__set__(question, older)
        self._second.__set__(question, newer)
        code = self._nvml.function("nvmlGpmMetricsGet")(ctypes.byref(question))
        if code:
            raise self._nvml.error(code)
        found: dict[str, float | NvmlError] = {}
        for name in self._metrics:
            _, code, percent = _METRIC.unpack_from(question, at)
            found[name] = self._nvml.error(code) if code else _share(percent)
            at += step
        return found

    def _ask(self) -> tuple[Any, int, int]:
        """NVML's structure, with the metrics in it, where they begin and how long each is."""
        lib = self._nvml.lib
        self._first, self._second = lib.c_nvmlGpmMetricsGet_t.sample1, lib.c_nvmlGpmMetricsGet_t.sample2
        question = lib.c_nvmlGpmMetricsGet_t()
        question.version = lib.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(self._metrics)
        for i, number in enumerate(self._metrics.values()):
            question.metrics[i].metricId = number
        return question, lib.c_nvmlGpmMetricsGet_t.metrics.offset, ctypes.sizeof(lib.c_nvmlGpmMetric_t)


def _share(percent: float) -> float:
    share = percent / 100
    return 1.0 if 1.0 < share <= _ROUNDING else share
