"""The sampler in a separate process, with the real nvidia-ml-py and the stub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustertrain import clock
from clustertrain.run import heartbeat
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.sampler import Sampler, next_tick
from clustertrain.telemetry.snapshot import Snapshot
from clustertrain.telemetry.store import jsonl_blocks
from clustertrain.telemetry.store.reader import RecordedSegment, find_overlapping, open_node
from tests.fakes.nvml.build import Stub

CHILD = Path(__file__).with_name("sampler_child.py")
TWO_GPUS = """
    device 0 uuid GPU-a
    device 0 utilization 80
    device 1 uuid GPU-b
    device 1 utilization 0
"""


class Child:
    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.ready = self.event()

    def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child ended early"
        event: dict[str, Any] = json.loads(line)
        return event

    def segment(self) -> RecordedSegment:
        return open_node(self.folder)[-1]

    def until(self, condition: Callable[[RecordedSegment], bool]) -> None:
        assert clock.wait_until(lambda: bool(open_node(self.folder)) and condition(self.segment()), 60, 0.02)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.event() == {"event": "stopped", "clean": True}
        assert self.process.wait(60) == 0


@contextmanager
def sampling(folder: Path, env: dict[str, str], *arguments: Path) -> Iterator[Child]:
    argv = [sys.executable, "-W", "error", str(CHILD), str(folder), *map(str, arguments)]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Child(process, folder)
        finally:
            process.kill()


@pytest.mark.long
def test_every_allocated_gpu_is_sampled(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS + "\n device 2 uuid GPU-of-another-job")
    with sampling(tmp_path / "t", nvml_stub.environ(SLURM_STEP_GPUS="0,1")) as child:
        assert [(g["uuid"], g["ranks"]) for g in child.ready["gpus"]] == [("GPU-a", [4]), ("GPU-b", [5])]
        child.until(lambda s: s.sample_count >= 5 and len(s.samples(SLOW).t) >= 2)
        child.stop()
    (segment,) = open_node(tmp_path / "t")
    assert segment.header.nvml_error is None
    assert segment.header.allocation_source == "SLURM_STEP_GPUS, by minor"
    assert segment.header.ranks == [4, 5]
    fast, slow = segment.samples(FAST), segment.samples(SLOW)
    assert set(fast.values["gpu0.utilization"]) == {0.8}
    assert set(fast.values["gpu1.utilization"]) == {0.0}
    assert np.all(np.diff(fast.values["gpu0.energy_j"]) >= 0)
    assert np.all(slow.values["host.memory_used_bytes"] > 0)
    assert np.all(slow.values["host.job_processes"] == 0)
    assert (segment.end is not None, segment.failure) == (True, None)
    assert np.all(np.diff(fast.t) > 0)
    assert not {"host.memory_used_bytes", "host.load1", "host.job_memory_bytes"} & segment.reasons().keys()


@pytest.mark.parametrize(
    ("tick", "sampled", "now", "following"),
    [
        (3, 3.0, 3.1, 4),
        (3, 3.0, 3.99, 4),
        (3, 3.89, 3.9, 4),
        (3, 3.95, 3.96, 5),  # tick 4 would have the same time stamp
        (3, 3.0, 7.4, 7),  # a slow driver: at once
        (3, 7.95, 7.96, 9),
    ],
)
def test_two_samples_are_never_at_the_same_time(tick: int, sampled: float, now: float, following: int) -> None:
    assert next_tick(tick, sampled, now) == following


@pytest.mark.long
def test_heartbeats_are_recorded(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    (tmp_path / "beats").mkdir()
    writer = heartbeat.HeartbeatWriter(tmp_path / "beats", 5)
    writer.beat.step, writer.beat.phase, writer.beat.tokens = 7, heartbeat.TRAIN, 4096.0
    with sampling(tmp_path / "t", nvml_stub.environ(), tmp_path / "beats") as child:
        child.until(lambda s: s.sample_count >= 2)
        writer.write()
        child.until(lambda s: s.newest().get("rank5.step") == 7)
        child.stop()
    writer.close()
    (segment,) = open_node(tmp_path / "t")
    newest = segment.newest()
    assert (newest["rank5.phase"], newest["rank5.tokens"]) == (heartbeat.TRAIN, 4096.0)
    assert newest["rank5.memory_bytes"] != newest["rank5.memory_bytes"]  # this process is not a descendant of the child
    assert np.isnan(newest["rank4.step"])
    assert heartbeat.TRAIN in segment.totals()["gpu1.utilization"].by_phase


@pytest.mark.long
def test_lost_gpu_is_event(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        child.until(lambda s: s.sample_count >= 2)
        nvml_stub.drive(TWO_GPUS + "\n fail 1 * 15")
        event = child.event()
        assert (event["event"], event["uuid"], event["index"]) == ("gpu_lost", "GPU-b", 1)
        assert event["reason"].startswith("GPU_IS_LOST")
        after = child.segment().sample_count + 5
        child.until(lambda s: s.sample_count >= after)
        child.stop()
    (segment,) = open_node(tmp_path / "t")
    values = segment.samples(FAST).values
    assert np.all(np.isfinite(values["gpu0.utilization"]))
    assert np.isnan(values["gpu1.power_w"][-1])
    assert segment.reasons()["gpu1.power_w"].startswith("GPU_IS_LOST")


@pytest.mark.long
def test_driver_error_is_event(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        child.until(lambda s: s.sample_count >= 2)
        nvml_stub.drive(TWO_GPUS + "\n event 1 0.2 xid 79")
        event = child.event()
        child.stop()
    assert (event["event"], event["uuid"], event["kind"], event["xid"]) == ("gpu_event", "GPU-b", "xid", 79)


@pytest.mark.long
def test_reason_is_written_only_on_change(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS + "\n fail 0 nvmlDeviceGetPowerUsage 3")
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        child.until(lambda s: s.sample_count >= 20)
        child.stop()
    records = jsonl_blocks.read(tmp_path / "t" / "0")
    reasons = [r for r in records if isinstance(r, jsonl_blocks.MissingReason) and r.column.endswith(".power_w")]
    assert [(r.column, str(r.reason).partition(":")[0]) for r in reasons] == [("gpu0.power_w", "NOT_SUPPORTED")]


@pytest.mark.long
def test_lost_nvml_is_reopened(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        child.until(lambda s: s.sample_count >= 2)
        nvml_stub.drive(TWO_GPUS + "\n fail 0 nvmlDeviceGetClockInfo 1")
        child.until(lambda s: "gpu0.sm_clock_mhz" in s.reasons())
        nvml_stub.drive(TWO_GPUS)
        assert np.isnan(child.segment().samples(FAST).values["gpu0.sm_clock_mhz"]).any()
        child.until(lambda s: bool(np.isfinite(s.newest()["gpu0.sm_clock_mhz"])))
        child.stop()
    assert len(open_node(tmp_path / "t")) == 1


def test_host_is_sampled_without_nvml(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive("fail * nvmlInitWithFlags 9")
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        assert child.ready["gpus"] == []
        assert child.ready["nvml"] == "DRIVER_NOT_LOADED: the NVIDIA driver is not loaded"
        child.until(lambda s: s.sample_count >= 3)
        child.stop()
    (segment,) = open_node(tmp_path / "t")
    assert segment.header.nvml_error == child.ready["nvml"]
    assert np.isfinite(segment.samples(SLOW).values["host.load1"]).all()


@pytest.mark.long
def test_failing_driver_leaves_reasons(nvml_stub: Stub, tmp_path: Path) -> None:
    """Every call about a device returns NOT_SUPPORTED, but devices are listed."""
    names = (
        "UtilizationRates",
        "MemoryInfo",
        "MemoryInfo_v2",
        "PowerUsage",
        "Temperature",
        "TemperatureV",
        "ClockInfo",
    )
    names += ("FieldValues", "TotalEnergyConsumption", "CurrentClocksEventReasons", "CurrentClocksThrottleReasons")
    failures = "\n".join(f"fail * nvmlDeviceGet{name} 3" for name in names)
    nvml_stub.drive(f"{TWO_GPUS}\n{failures}")
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        assert [g["uuid"] for g in child.ready["gpus"]] == ["GPU-a", "GPU-b"]
        child.until(lambda s: s.sample_count >= 3)
        child.stop()
    (segment,) = open_node(tmp_path / "t")
    values = segment.samples(FAST).values
    for field in ("utilization", "memory_used_bytes", "power_w", "energy_j", "pcie_tx_bytes", "throttle_thermal"):
        assert np.isnan(values[f"gpu0.{field}"]).all(), field
        assert segment.reasons()[f"gpu0.{field}"].startswith("NOT_SUPPORTED"), field


@pytest.mark.long
def test_killed_sampler_leaves_readable_file(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        child.until(lambda s: s.sample_count >= 3)
        child.process.kill()
        child.process.wait(60)
    (segment,) = open_node(tmp_path / "t")
    assert segment.sample_count >= 3
    assert segment.end is None


@pytest.mark.long
def test_two_agents_have_separate_segments(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    with sampling(tmp_path / "t", nvml_stub.environ()) as one, sampling(tmp_path / "t", nvml_stub.environ()) as other:
        assert clock.wait_until(
            lambda: [s.sample_count >= 3 for s in open_node(tmp_path / "t")] == [True, True], 60, 0.02
        )
        one.stop()
        other.stop()
    segments = open_node(tmp_path / "t")
    assert [s.folder.name for s in segments] == ["0", "1"]
    assert len(find_overlapping(segments)) == 1


@pytest.mark.long
def test_unwritable_folder_is_event(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    (tmp_path / "file").write_text("a file in place of a folder")
    with sampling(tmp_path / "file" / "t", nvml_stub.environ()) as child:
        events = [child.ready, child.event()]
        (failed,) = (e for e in events if e["event"] == "telemetry_failed")
        (ready,) = (e for e in events if e["event"] == "ready")
        assert "cannot write the samples, kept in memory" in failed["reason"]
        assert len(ready["gpus"]) == 2


EventLog = list[tuple[str, dict[str, Any]]]


def test_exception_in_thread_is_event_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Sampler, beats: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Sampler, "_fast", broken)
    events: EventLog = []
    sampler = Sampler(tmp_path, "n", {}, on_event=lambda name, **fields: events.append((name, fields)))
    sampler.start()
    assert clock.wait_until(lambda: bool(events), 60, 0.01)
    assert sampler.stop(60)
    ((name, fields),) = events
    assert name == "telemetry_failed"
    assert fields["reason"].startswith("ZeroDivisionError: a bug (test_sampler.py:")
    assert open_node(tmp_path)[-1].failure == fields["reason"]


class FailingObserver:
    """An observer that always fails."""

    def watch_errors(self, uuids: object) -> None:
        raise ValueError("in watch_errors")

    def observe(self, snapshot: Snapshot) -> None:
        raise ValueError("in observe")

    def record_error(self, kind: str, uuid: str, *, xid: int | None = None, count: int = 1) -> None:
        raise ValueError("in record_error")


class RecordingObserver(FailingObserver):
    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def watch_errors(self, uuids: object) -> None: ...

    def observe(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)


def test_failing_observer_is_removed(tmp_path: Path) -> None:
    events: EventLog = []
    recorder = RecordingObserver()
    sampler = Sampler(
        tmp_path,
        "n",
        {},
        0.02,
        lambda name, **fields: events.append((name, fields)),
        observers=[FailingObserver(), recorder],
    )
    sampler.start()
    assert clock.wait_until(lambda: len(recorder.snapshots) >= 3, 60, 0.01)
    assert sampler.stop(60)
    assert events == [("telemetry_failed", {"node": "n", "reason": "FailingObserver disabled: ValueError: in observe"})]
    assert recorder.snapshots[0].values is not recorder.snapshots[1].values
    assert recorder.snapshots[-1].values["host.memory_used_bytes"] > 0


def test_stop_without_start(tmp_path: Path) -> None:
    assert Sampler(tmp_path, "n", {}).stop()


@pytest.mark.long
def test_node_with_fewer_ranks_than_gpus(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    result = subprocess.run(
        [sys.executable, "-c", _ONE_RANK, str(tmp_path)],
        env=nvml_stub.environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == [[2], []]


_ONE_RANK = """
import json, os, pathlib, sys
from clustertrain.telemetry.sampler import Sampler, next_tick
sampler = Sampler(pathlib.Path(sys.argv[1]), "n", os.environ, first_rank=2, rank_count=1)
sampler.start()
sampler.stop()
print(json.dumps([g.get("ranks", []) for g in sampler.gpus]))
"""
