"""GPU performance monitoring (GPM), which Hopper and later GPUs have: how busy the parts of the chip were.

NVML gives means between two samples. The newer one of a pair is kept as the older of the next, so that the figures
cover the whole time, and not a slice of it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from clustertrain import clock
from clustertrain.telemetry.readers.nvml import Nvml, NvmlError

MIN_INTERVAL_S = 0.1  # below it the counters have nothing new, and the means are wrong (NVIDIA/DCGM#310)
_MAX_ROUNDING = 1.02  # how far above the whole a share may come out

# nvmlGpmMetricId_t; NVML's are per cent.
METRICS: Mapping[str, int] = {"sm_activity": 2, "tensor_activity": 5, "dram_activity": 10}
GRAPHICS_UTIL = 1  # of a MIG slice, what nvmlDeviceGetUtilizationRates is of a whole GPU


class _Sample(NamedTuple):
    handle: Any  # nvmlGpmSample_t
    address: int


class _MetricsRequest(NamedTuple):
    """nvmlGpmMetricsGet_t, and parts of its memory."""

    pointer: Any
    samples: ctypes.Array[ctypes.c_void_p]  # the older sample and the newer
    codes: ctypes.Array[ctypes.c_uint]  # of nvmlGpmMetric_t, which has 40 bytes: the second of 10 is the nvmlReturn_t
    values: ctypes.Array[ctypes.c_double]  # and the second of 5 the value


class GpmSampler:
    """The activities of one device.

    Args:
        nvml: the door, open.
        metrics: the figures' names and NVML's numbers.
        take: fills a sample of NVML's for a handle, and returns NVML's code.
        device: gives the handle that is asked whether it supports GPM, where it is not that which is read.
    """

    def __init__(
        self,
        nvml: Nvml,
        metrics: Mapping[str, int] = METRICS,
        sample_get: Callable[[Any, Any], int] | None = None,
        support_handle: Callable[[], Any] | None = None,
        now: Callable[[], float] = clock.monotonic,
    ) -> None:
        self._nvml = nvml
        self._support_handle = support_handle
        self._sample_get = sample_get or nvml.function("nvmlGpmSampleGet")
        self._metrics_get = nvml.function("nvmlGpmMetricsGet")
        self._metrics = metrics
        self._now = now
        self._supported = False
        self._samples: list[_Sample] = []  # the older one, and the one to be filled
        self._request: _MetricsRequest | None = None
        self._last_sample_at: float | None = None
        self._values: list[float | NvmlError] = []

    def read(self, handle: Any) -> list[float | NvmlError]:
        """Means since the last call that was at least :data:`MIN_INTERVAL_S` ago, in the order of the metrics; the last
        ones again where it was not.

        Raises:
            NvmlError: NOT_SUPPORTED; NO_DATA at the first call, which begins the first pair; or any other.
        """
        now = self._now()
        if self._last_sample_at is not None and now - self._last_sample_at < MIN_INTERVAL_S:
            if self._values:
                return self._values
            raise NvmlError("NO_DATA", "a mean needs two samples")
        if not self._supported or len(self._samples) < 2:
            self._prepare(handle)
        older, newer = self._samples
        code = self._sample_get(handle, newer.handle)
        if code:
            raise self._nvml.error(code)
        is_first, self._last_sample_at = self._last_sample_at is None, now
        self._samples = [newer, older]
        if is_first:
            raise NvmlError("NO_DATA", "a mean needs two samples")
        self._values = []  # what follows may raise
        self._values = self._compute_metrics(older, newer)
        return self._values

    def reset(self) -> None:
        """The device has been away: the next sample begins a new pair."""
        self._last_sample_at = None
        self._values = []
        self._supported = False

    def close(self) -> None:
        """Free the samples; NVML must still be open."""
        for sample in self._samples:
            with contextlib.suppress(NvmlError):
                self._nvml.call("nvmlGpmSampleFree", sample.handle)
        self._samples = []
        self.reset()

    def _prepare(self, handle: Any) -> None:
        if not self._supported:
            support = self._nvml.call(
                "nvmlGpmQueryDeviceSupport", self._support_handle() if self._support_handle else handle
            )
            if not support.isSupportedDevice:
                raise NvmlError("NOT_SUPPORTED", "this GPU has no performance monitoring (GPM); Hopper and later do")
            self._supported = True
        if not self._samples:
            self._nvml.before_close(self.close)
        while len(self._samples) < 2:
            sample = self._nvml.call("nvmlGpmSampleAlloc")
            self._samples.append(_Sample(sample, ctypes.cast(sample, ctypes.c_void_p).value or 0))

    def _compute_metrics(self, older: _Sample, newer: _Sample) -> list[float | NvmlError]:
        if self._request is None:
            self._request = self._build_request()
        request = self._request
        request.samples[0], request.samples[1] = older.address, newer.address
        code = self._metrics_get(request.pointer)
        if code:
            raise self._nvml.error(code)
        codes, values = request.codes[1::10], request.values[1::5]
        return [
            self._nvml.error(code) if code else _to_ratio(percent) for code, percent in zip(codes, values, strict=True)
        ]

    def _build_request(self) -> _MetricsRequest:
        struct_type, n = self._nvml.lib.c_nvmlGpmMetricsGet_t, len(self._metrics)
        metrics_get = struct_type()
        metrics_get.version = self._nvml.lib.NVML_GPM_METRICS_GET_VERSION
        metrics_get.numMetrics = n
        for i, number in enumerate(self._metrics.values()):
            metrics_get.metrics[i].metricId = number
        return _MetricsRequest(
            ctypes.byref(metrics_get),
            (ctypes.c_void_p * 2).from_buffer(metrics_get, struct_type.sample1.offset),
            (ctypes.c_uint * (10 * n)).from_buffer(metrics_get, struct_type.metrics.offset),
            (ctypes.c_double * (5 * n)).from_buffer(metrics_get, struct_type.metrics.offset),
        )


def _to_ratio(percent: float) -> float:
    share = percent / 100
    return 1.0 if 1.0 < share <= _MAX_ROUNDING else share
