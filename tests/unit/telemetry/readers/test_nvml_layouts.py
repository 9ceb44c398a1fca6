"""Structures read as plain numbers have the layout of nvidia-ml-py, which follows nvml.h."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml
import pytest

from clustertrain.telemetry.readers import nvml, nvml_field_values, nvml_queries


def words(structure: Any, size: int, *fields: str) -> list[int]:
    """Return the size of a structure and the offsets of fields, in words of ``size`` bytes."""
    return [x // size for x in (ctypes.sizeof(structure), *(getattr(structure, f).offset for f in fields))]


def test_memory_is_five_words() -> None:
    layout = words(pynvml.c_nvmlMemory_v2_t, 8, "total", "used")
    assert layout == [nvml._MEMORY_V2._length_, nvml._TOTAL_WORD, nvml._USED_WORD]
    assert pynvml.c_nvmlMemory_v2_t.version.offset == 0


def test_field_value_has_the_packed_layout() -> None:
    structure, packed = pynvml.c_nvmlFieldValue_t, nvml_field_values._FIELD_VALUE
    value = structure(fieldId=1, scopeId=2, valueType=3, nvmlReturn=4)
    value.value.ullVal = 5
    assert packed.unpack(bytes(value)) == (1, 2, 3, 4, (5).to_bytes(8, "little"))
    assert words(structure, 8, "valueType", "value") == [5, 3, 4]


@pytest.mark.parametrize("kind", range(pynvml.NVML_VALUE_TYPE_COUNT))
def test_each_value_type_is_unpacked(kind: int) -> None:
    member = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[kind]
    value = pynvml.c_nvmlValue_t()
    setattr(value, member, 3)
    assert nvml_field_values._VALUE_FORMATS[kind].unpack(bytes(value)) == (3,)


def test_gpm_metric_is_ten_words_of_32_bits_and_five_of_64() -> None:
    assert words(pynvml.c_nvmlGpmMetric_t, 4, "nvmlReturn") == [10, 1]
    assert words(pynvml.c_nvmlGpmMetric_t, 8, "value") == [5, 1]
    request = pynvml.c_nvmlGpmMetricsGet_t
    assert request.sample2.offset == request.sample1.offset + ctypes.sizeof(ctypes.c_void_p)


def test_temperature_utilization_and_process() -> None:
    assert words(pynvml.c_nvmlTemperature_v1_t, 4, "version", "sensorType", "temperature") == [3, 0, 1, 2]
    assert words(pynvml.c_nvmlUtilization_t, 4, "gpu", "memory") == [2, 0, 1]
    assert ctypes.sizeof(pynvml.c_nvmlProcessInfo_v2_t) == nvml_queries._PROCESS_BYTES
    assert ctypes.sizeof(pynvml.c_nvmlProcessInfo_v3_t) == nvml_queries._PROCESS_BYTES


def test_constants() -> None:
    assert nvml_queries._INSUFFICIENT_SIZE == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert nvml._FUNCTION_NOT_FOUND == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert nvml_field_values._MAX_LINKS == pynvml.NVML_NVLINK_MAX_LINKS
    used = {number for sources in nvml_field_values.SOURCES.values() for s in sources for number, _ in s.keys}
    known = {value for name, value in vars(pynvml).items() if name.startswith("NVML_FI_DEV_")}
    assert used <= known
