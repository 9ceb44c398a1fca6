"""GPU performance monitoring (GPM) of Hopper and later GPUs: activity of the parts of the chip.

NVML computes means between two samples. The newer sample of a pair is the older one of the next pair, so the means
cover the whole time.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from clustertrain import clock
from clustertrain.telemetry.readers.nvml import Nvml, NvmlError

MIN_INTERVAL_S = 0.1  # the counters update no faster, and the means would be wrong (NVIDIA/DCGM#310)
_MAX_ROUNDING = 1.02  # rounding may push a share this far above 1

# nvmlGpmMetricId_t, in percent.
METRICS: Mapping[str, int] = {"sm_activity": 2, "tensor_activity": 5, "dram_activity": 10}
GRAPHICS_UTIL = 1  # the equivalent of nvmlDeviceGetUtilizationRates for a MIG slice


class _Sample(NamedTuple):
    handle: object  # nvmlGpmSample_t
    address: int


class _MetricsRequest(NamedTuple):
    """nvmlGpmMetricsGet_t, and views of its memory."""

    pointer: Any
    samples: ctypes.Array[ctypes.c_void_p]  # the older and the newer sample
    codes: ctypes.Array[ctypes.c_uint]  # nvmlGpmMetric_t as 10 words of 32 bits: the second is the nvmlReturn_t
    values: ctypes.Array[ctypes.c_double]  # nvmlGpmMetric_t as 5 words of 64 bits: the second is the value


class GpmSampler:
    """Reader of the GPM metrics of one device.

    Args:
        nvml: NVML, opened.
        metrics: NVML's metric number by field.
        sample_get: fills an NVML sample for a handle and returns NVML's code.
        support_handle: returns the handle to query for GPM support; by default the handle that is read.
        now: monotonic clock.
    """

    def __init__(
        self,
        nvml: Nvml,
        metrics: Mapping[str, int] = METRICS,
        sample_get: Callable[[object, object], int] | None = None,
        support_handle: Callable[[], object] | None = None,
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

    def read(self, handle: object) -> list[float | NvmlError]:
        """Return the means since the last sample, in the order of the metrics.

        Within :data:`MIN_INTERVAL_S` of the last sample, the last means are returned again.

        Raises:
            NvmlError: NOT_SUPPORTED; NO_DATA on the first call, which takes the first sample; or any other NVML error.
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
        """Start a new pair of samples, after the device was lost."""
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

    def _prepare(self, handle: object) -> None:
        if not self._supported:
            support = self._nvml.call(
                "nvmlGpmQueryDeviceSupport", self._support_handle() if self._support_handle else handle
            )
            if not support.isSupportedDevice:
                raise NvmlError("NOT_SUPPORTED", "GPU performance monitoring (GPM) needs a Hopper or later GPU")
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
