"""Structures read as plain numbers have the layout of nvidia-ml-py, which follows nvml.h."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml
import pytest


@pytest.mark.parametrize(
    ("structure", "size", "offsets"),
    [
        (pynvml.c_nvmlMemory_v2_t, 5 * 8, {"version": 0, "total": 1 * 8, "used": 4 * 8}),
        (pynvml.c_nvmlFieldValue_t, 5 * 8, {"scopeId": 4, "valueType": 3 * 8, "nvmlReturn": 3 * 8 + 4, "value": 4 * 8}),
        (pynvml.c_nvmlGpmMetric_t, 5 * 8, {"metricId": 0, "nvmlReturn": 1 * 4, "value": 1 * 8}),
        (pynvml.c_nvmlTemperature_v1_t, 3 * 4, {"version": 0, "sensorType": 1 * 4, "temperature": 2 * 4}),
        (pynvml.c_nvmlProcessInfo_v2_t, 24, {}),
    ],
    ids=["memory", "field-value", "gpm-metric", "temperature", "process-info"],
)
def test_structure_layout(structure: Any, size: int, offsets: dict[str, int]) -> None:
    assert ctypes.sizeof(structure) == size
    assert {name: getattr(structure, name).offset for name in offsets} == offsets


def test_two_samples_are_adjacent() -> None:
    request = pynvml.c_nvmlGpmMetricsGet_t
    assert request.sample2.offset == request.sample1.offset + ctypes.sizeof(ctypes.c_void_p)
