"""XID and ECC events, from the stub through the real nvidia-ml-py."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.telemetry import xids
from clustertrain.telemetry.readers.nvml_events import EventRateLimiter, GpuError, GpuEventType
from tests.fakes.nvml.build import Stub
from tests.unit.telemetry.nvml_steps import run_steps

TWO = "device 0 uuid GPU-a\ndevice 1 uuid GPU-b\n"


def short(poll: list[Any]) -> list[tuple[str, str, int | None, int]]:
    return [(e["uuid"], e["kind"], e["xid"], e["count"]) for e in poll[:-1]]


def test_every_occurrence_counts(nvml_stub: Stub) -> None:
    """dcgm-exporter#500, #190: a gauge with the last XID hides repetitions."""
    nvml_stub.drive(TWO)
    with_events = TWO + "event 1 0 xid 79\n" + "event 0 0 xid 31\n" * 3 + "event 0 0 sbe\nevent 1 0 dbe\n"
    listening, quiet, _, events, after, _, repeated = run_steps(
        nvml_stub.environ(),
        ["listen"],
        ["poll"],
        ["drive", with_events],
        ["poll"],
        ["poll"],
        ["drive", with_events],
        ["poll"],
    )
    assert listening == {}
    assert quiet == [{}]
    assert short(events) == [
        ("GPU-b", "xid", 79, 1),
        ("GPU-a", "xid", 31, 3),
        ("GPU-a", "ecc_corrected", None, 1),
        ("GPU-b", "ecc_uncorrected", None, 1),
    ]
    assert after == [{}]
    assert short(repeated) == short(events)


@pytest.mark.long
def test_driver_without_events_gives_reason(nvml_stub: Stub) -> None:
    nvml_stub.drive(TWO + "device 0 events 0\nfail 1 nvmlDeviceRegisterEvents 4\n")
    listening, events = run_steps(nvml_stub.environ(), ["listen"], ["poll"])
    assert listening["GPU-a"].startswith("NOT_SUPPORTED: the driver reports no error events")
    assert listening["GPU-b"].startswith("NO_PERMISSION")
    assert events == [listening]
    nvml_stub.drive(TWO + "fail * nvmlEventSetCreate 13\n")
    listening, events = run_steps(nvml_stub.environ(), ["listen"], ["poll"])
    assert listening == dict.fromkeys(["GPU-a", "GPU-b"], "FUNCTION_NOT_FOUND: the driver is too old")
    assert events == [listening]


@pytest.mark.long
def test_driver_with_only_xids(nvml_stub: Stub) -> None:
    nvml_stub.drive("device 0 uuid GPU-a\ndevice 0 events 8\n")
    with_events = "device 0 uuid GPU-a\ndevice 0 events 8\nevent 0 0 xid 48\nevent 0 0 dbe\n"
    *_, events = run_steps(nvml_stub.environ(), ["listen"], ["drive", with_events], ["poll"])
    assert short(events) == [("GPU-a", "xid", 48, 1)]


def test_lost_gpu_does_not_silence_others(nvml_stub: Stub) -> None:
    nvml_stub.drive(TWO)
    lost = TWO + "fail 0 * 15\n"
    *_, after_loss, _, events = run_steps(
        nvml_stub.environ(),
        ["listen"],
        ["drive", lost],
        ["poll"],
        ["drive", lost + "event 1 0 xid 63\n"],
        ["poll"],
    )
    assert after_loss == [{"GPU-a": "GPU_IS_LOST: the GPU has fallen off the bus or cannot be reached"}]
    assert short(events) == [("GPU-b", "xid", 63, 1)]


def test_mig_events_reach_affected_slices(nvml_stub: Stub) -> None:
    board = "device 0 uuid GPU-a\n"
    board += "".join(f"device {i} uuid MIG-{i}\ndevice {i} parent 0\ndevice {i} gpu_instance {i}\n" for i in (1, 2, 3))
    nvml_stub.drive(board)
    env = nvml_stub.environ(CUDA_VISIBLE_DEVICES="MIG-1,MIG-2")
    with_events = board + "event 2 0 xid 94\nevent 3 0 xid 31\nevent 0 0 xid 79\n"
    *_, events = run_steps(env, ["listen"], ["drive", with_events], ["poll"])
    # MIG-3 belongs to another job; an event of the board affects all slices.
    assert short(events) == [("MIG-2", "xid", 94, 1), ("MIG-1", "xid", 79, 1), ("MIG-2", "xid", 79, 1)]


@pytest.mark.parametrize("number", [13, 31, 43, 45, 48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 154])
def test_xid_meaning(number: int) -> None:
    xid = xids.lookup_xid(number)
    assert xid.number == number
    assert xid.meaning and xid.name
    assert "{" not in xids.format_fix(number, "node07")


def test_program_and_hardware_xids_differ() -> None:
    assert xids.lookup_xid(31).cause == "program"
    assert (xids.lookup_xid(79).cause, xids.lookup_xid(79).severity) == ("hardware", "critical")
    assert "--exclude node07" in xids.format_fix(79, "node07")
    assert "--exclude" not in xids.format_fix(31, "node07")


def test_unknown_xid() -> None:
    unknown = xids.lookup_xid(4711)
    assert (unknown.name, unknown.severity) == ("XID 4711", "warning")


def test_event_storm_is_reported_once_per_minute() -> None:
    def error_at(t: float, kind: GpuEventType = "xid", count: int = 1) -> GpuError:
        return GpuError(t, "GPU-a", kind, 74 if kind == "xid" else None, count)

    limiter = EventRateLimiter()
    assert limiter.take_due([error_at(0.0)], 0.0) == [error_at(0.0)]
    assert [limiter.take_due([error_at(float(s))], float(s)) for s in range(1, 60)] == [[]] * 59
    assert limiter.take_due([], 60.0) == [error_at(59.0, count=59)]
    assert limiter.take_due([error_at(61.0, "ecc_corrected")], 61.0) == []
    assert limiter.take_due([error_at(61.0, "ecc_uncorrected")], 61.0) == [error_at(61.0, "ecc_uncorrected")]
    assert limiter.take_due([error_at(62.0)], 62.0) == []
    assert limiter.drain() == [error_at(62.0)]
    assert limiter.drain() == []
