"""The sampler in a process of its own, over the real nvidia-ml-py and the stub."""

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
from clustertrain.telemetry import store
from clustertrain.telemetry.sampler import Sampler
from clustertrain.telemetry.series import Series, load
from tests.nvml_stub.build import Stub

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
        found: dict[str, Any] = json.loads(line)
        return found

    def series(self) -> Series:
        return load(self.folder)[-1]

    def until(self, condition: Callable[[Series], bool]) -> None:
        assert clock.wait_until(lambda: bool(load(self.folder)) and condition(self.series()), 60, 0.02)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.event() == {"event": "stopped", "clean": True}
        assert self.process.wait(60) == 0


@contextmanager
def sampling(folder: Path, env: dict[str, str]) -> Iterator[Child]:
    argv = [sys.executable, "-W", "error", str(CHILD), str(folder)]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Child(process, folder)
        finally:
            process.kill()


def test_every_allocated_gpu_is_sampled_used_or_not(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS + "\n device 2 uuid GPU-of-another-job")
    with sampling(tmp_path / "t", nvml_stub.environ(SLURM_STEP_GPUS="0,1")) as child:
        assert [(g["uuid"], g["ranks"]) for g in child.ready["gpus"]] == [("GPU-a", [4]), ("GPU-b", [5])]
        child.until(lambda s: len(s.t) >= 5 and bool(s.processes))
        child.stop()
    (found,) = load(tmp_path / "t")
    assert found.header.nvml is None
    assert found.header.allocation == "SLURM_STEP_GPUS, by minor"
    assert set(found.gpus[0]["utilization"]) == {0.8}
    assert set(found.gpus[1]["utilization"]) == {0.0}
    assert np.all(np.diff(found.gpus[0]["energy_j"]) >= 0)
    assert np.all(found.host["memory_used_bytes"] > 0)
    assert (found.end is not None, found.failure, found.host_reasons) == (True, None, {})
    assert np.all(np.diff(found.t) > 0)


def test_a_gpu_that_is_lost_while_running_is_an_event_and_not_the_end(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        child.until(lambda s: len(s.t) >= 2)
        nvml_stub.drive(TWO_GPUS + "\n fail 1 * 15")
        event = child.event()
        assert (event["event"], event["uuid"], event["index"]) == ("gpu_lost", "GPU-b", 1)
        assert event["reason"].startswith("GPU_IS_LOST")
        after = len(child.series().t) + 5
        child.until(lambda s: len(s.t) >= after)
        child.stop()
    (found,) = load(tmp_path / "t")
    assert np.all(np.isfinite(found.gpus[0]["utilization"]))
    assert np.isnan(found.gpus[1]["power_w"][-1])
    assert found.reasons[1]["power_w"].startswith("GPU_IS_LOST")


def test_a_reason_is_written_when_it_changes_and_not_with_every_row(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS + "\n fail 0 nvmlDeviceGetPowerUsage 3")
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        child.until(lambda s: len(s.t) >= 20)
        child.stop()
    reasons = [r for r in store.read(tmp_path / "t") if isinstance(r, store.Reason)]
    assert [(r.gpu, r.field, str(r.reason).partition(":")[0]) for r in reasons] == [(0, "power_w", "NOT_SUPPORTED")]


def test_nvml_that_goes_away_is_opened_again(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        child.until(lambda s: len(s.t) >= 2)
        nvml_stub.drive(TWO_GPUS + "\n fail 0 nvmlDeviceGetClockInfo 1")
        child.until(lambda s: "sm_clock_mhz" in s.reasons[0])
        nvml_stub.drive(TWO_GPUS)
        missing = int(np.isnan(child.series().gpus[0]["sm_clock_mhz"]).sum())
        assert missing
        child.until(lambda s: bool(np.isfinite(s.gpus[0]["sm_clock_mhz"][-1])))
        child.stop()


def test_without_nvml_the_host_is_still_sampled(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive("fail * nvmlInitWithFlags 9")
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        assert child.ready["gpus"] == []
        assert child.ready["nvml"] == "DRIVER_NOT_LOADED: the NVIDIA driver is not loaded"
        child.until(lambda s: len(s.t) >= 3)
        child.stop()
    (found,) = load(tmp_path / "t")
    assert found.header.nvml == child.ready["nvml"]
    assert np.isfinite(found.host["load1"]).all()


def test_a_kill_leaves_a_file_that_can_be_read(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    with sampling(tmp_path / "t", nvml_stub.environ()) as child:
        child.until(lambda s: len(s.t) >= 3)
        child.process.kill()
        child.process.wait(60)
    (found,) = load(tmp_path / "t")
    assert len(found.t) >= 3
    assert found.end is None


def test_a_folder_that_cannot_be_written_is_an_event(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive(TWO_GPUS)
    (tmp_path / "file").write_text("in the way")
    with sampling(tmp_path / "file" / "t", nvml_stub.environ()) as child:
        first = child.ready
        events = [first, child.event()]
        (failed,) = (e for e in events if e["event"] == "telemetry_failed")
        (ready,) = (e for e in events if e["event"] == "ready")
        assert "could not be written, and are kept" in failed["reason"]
        assert len(ready["gpus"]) == 2


def test_a_bug_in_the_thread_ends_in_an_event_and_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Sampler, host: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Sampler, "_sample", broken)
    told: list[tuple[str, dict[str, Any]]] = []
    sampler = Sampler(tmp_path, "n", {}, on_event=lambda name, **fields: told.append((name, fields)))
    sampler.start()
    assert clock.wait_until(lambda: bool(told), 60, 0.01)
    assert sampler.stop(60)
    ((name, fields),) = told
    assert name == "telemetry_failed"
    assert fields["reason"].startswith("ZeroDivisionError: a bug (test_telemetry_sampler.py:")
    assert load(tmp_path)[-1].failure == fields["reason"]


def test_stopping_one_that_never_started(tmp_path: Path) -> None:
    assert Sampler(tmp_path, "n", {}).stop()


def test_ranks_stop_where_the_node_has_fewer_than_gpus(tmp_path: Path) -> None:
    from clustertrain.telemetry.nvml import Device

    sampler = Sampler(tmp_path, "n", {}, first_rank=2, rank_count=1)
    assert [sampler._facts(i, Device(f"GPU-{i}")).ranks for i in range(2)] == [[2], []]
