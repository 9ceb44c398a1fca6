"""Our readings of recorded GPUs, against what nvidia-smi printed for the same state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from clustertrain.telemetry import fields
from tests.fakes.nvml import recording
from tests.fakes.nvml.build import Stub
from tests.unit.telemetry.nvml_steps import run_steps

Printed = Mapping[str, str]
FAST = {f.name for f in fields.GPU if f.pace == fields.FAST}


def number(text: str) -> float:
    return float(text.partition(" ")[0])


def ratio(name: str) -> Callable[[Printed], float]:
    return lambda printed: number(printed[name]) / 100


def plain(name: str) -> Callable[[Printed], float]:
    return lambda printed: number(printed[name])


def flag(*names: str) -> Callable[[Printed], float]:
    return lambda printed: float(any(printed[name] in ("Active", "Yes") for name in names))


def rows_or_pages(printed: Printed) -> float:
    """Ampere and later GPUs remap rows; earlier ones retire pages. nvidia-smi prints N/A for the other."""
    kinds = ("remapped_rows.correctable", "remapped_rows.uncorrectable")
    if printed[kinds[0]] == "N/A":
        kinds = ("retired_pages.sbe", "retired_pages.dbe")
    return sum(number(printed[kind]) for kind in kinds)


def pending(printed: Printed) -> float:
    rows = printed["remapped_rows.pending"]
    return float((printed["retired_pages.pending"] if rows == "N/A" else rows) == "Yes")


def hardware_slowdown(printed: Printed) -> float:
    """nvidia-smi counts heat and the power brake as hardware slowdown; we count heat as thermal throttling."""
    prefix = "clocks_event_reasons.hw_"
    only_heat = printed[f"{prefix}thermal_slowdown"] == "Active"
    brake = printed[f"{prefix}power_brake_slowdown"] == "Active"
    return float(brake or (printed[f"{prefix}slowdown"] == "Active" and not only_heat))


MIB = 1 << 20
# By field: nvidia-smi's arithmetic backwards, and its rounding. Drivers round MiB down, newer ones up.
TABLE: dict[str, tuple[Callable[[Printed], float], float]] = {
    "utilization": (ratio("utilization.gpu"), 0.0),
    "memory_busy": (ratio("utilization.memory"), 0.0),
    "memory_used_bytes": (lambda printed: number(printed["memory.used"]) * MIB, MIB),
    "power_w": (plain("power.draw"), 0.005),
    "temperature_c": (plain("temperature.gpu"), 0.0),
    "memory_temperature_c": (plain("temperature.memory"), 0.0),
    "sm_clock_mhz": (plain("clocks.sm"), 0.0),
    "memory_clock_mhz": (plain("clocks.mem"), 0.0),
    "throttle_power": (flag("clocks_event_reasons.sw_power_cap"), 0.0),
    "throttle_thermal": (
        flag("clocks_event_reasons.sw_thermal_slowdown", "clocks_event_reasons.hw_thermal_slowdown"),
        0.0,
    ),
    "throttle_hardware": (hardware_slowdown, 0.0),
    "ecc_corrected": (plain("ecc.errors.corrected.volatile.total"), 0.0),
    "ecc_uncorrected": (plain("ecc.errors.uncorrected.volatile.total"), 0.0),
    "remapped_rows": (rows_or_pages, 0.0),
    "remap_pending": (pending, 0.0),
    "remap_failed": (flag("remapped_rows.failure"), 0.0),
    "pcie_replays": (plain("pcie.replays"), 0.0),
}


class Printout(dict[str, str]):
    """What nvidia-smi printed; remembers what was read, to tell N/A and what the source leaves out."""

    def __init__(self, printed: Printed) -> None:
        super().__init__(printed)
        self.read: set[str] = set()

    def __missing__(self, name: str) -> str:
        raise LeftOut(name)

    def __getitem__(self, name: str) -> str:
        self.read.add(name)
        return super().__getitem__(name)


class LeftOut(Exception):
    """The source of the recording does not print this."""


def disagreement(field: str, ours: Any, printed: Printed) -> str | None:
    """Return how a reading differs from nvidia-smi's; None if it agrees, or the source leaves it out."""
    expect, rounding = TABLE[field]
    printout = Printout(printed)
    try:
        theirs = expect(printout)
    except LeftOut:
        return None
    except ValueError:
        theirs = None
    if theirs is None or all(printed[name] == "N/A" for name in printout.read):
        return None if isinstance(ours, str) else f"{field}: {ours}, nvidia-smi N/A"
    if isinstance(ours, str) or abs(ours - theirs) > rounding:
        return f"{field}: {ours}, nvidia-smi {theirs}"
    return None


@pytest.mark.long
@pytest.mark.parametrize("name", recording.NAMES)
def test_readings_agree_with_nvidia_smi(nvml_stub: Stub, name: str) -> None:
    recorded = recording.load(name)
    nvml_stub.install_driver(recorded.driver)
    nvml_stub.drive(recorded.text)
    steps: list[list[Any]] = [["devices"]]
    for check in recorded.checks:
        steps += [["drive", recorded.text, check.at_s], ["read", "fast"], ["read", "slow"]]
    listed, *results = run_steps(nvml_stub.environ(), *steps)
    for check, fast, slow in zip(recorded.checks, results[1::3], results[2::3], strict=True):
        reading = next(iter(fast.values())) | next(iter(slow.values()))
        differences = [disagreement(field, reading[field], check.printed) for field in TABLE]
        assert [d for d in differences if d] == [], f"{name} at {check.at_s} s"
    device = listed["devices"][-1]  # of a GPU in MIG mode, a slice
    printed = recorded.checks[0].printed
    assert (listed["driver"], device["memory_includes_reserved"]) == (recorded.driver, False)
    assert device["memory_total_bytes"] == number(printed["memory.total"]) * MIB
    assert device["power_limit_w"] == (number(printed["enforced.power.limit"]) if device["parent"] is None else None)


def test_every_field_that_nvidia_smi_prints_is_in_the_table() -> None:
    not_printed = {"energy_j", "processes", "nvlinks_active", "nvlink_errors", "nvlink_tx_bytes", "nvlink_rx_bytes"}
    not_printed |= {"pcie_tx_bytes", "pcie_rx_bytes", "sm_activity", "tensor_activity", "dram_activity"}
    assert set(TABLE) | not_printed == {f.name for f in fields.GPU}


def test_h100_from_training_to_its_loss(nvml_stub: Stub) -> None:
    """Power limit, heat, an ECC error, and off the bus: each is read, and each error is an event."""
    recorded = recording.load("h100")
    nvml_stub.drive(recorded.text)

    def play(t: float) -> list[Any]:
        return ["drive", recorded.text, t]

    read, poll = ["read", "fast"], ["poll"]
    results = run_steps(
        nvml_stub.environ(), play(0), ["listen"], play(80), read, play(200), poll, play(210), poll, play(240), poll,
        play(242), read, poll,
    )  # fmt: skip
    training, lost = results[3]["GPU-00000000-0000-0000-0000-000000000000"], results[11]
    assert training["energy_j"] == pytest.approx((10 * 68.57) + 70 * 698, rel=0.01)
    assert training["nvlink_tx_bytes"] == pytest.approx(70 * 1e11, rel=0.01)
    assert [(e["kind"], e["xid"]) for poll in results[5:10:2] for e in poll[:-1]] == [
        ("ecc_uncorrected", None),
        ("xid", 94),
        ("xid", 79),
    ]
    assert list(lost.values()) == ["lost: GPU_IS_LOST: the GPU has fallen off the bus or cannot be reached"]
    assert list(results[12][-1].values()) == ["GPU_IS_LOST: the GPU has fallen off the bus or cannot be reached"]
