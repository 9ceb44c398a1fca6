"""The heartbeat and running totals of a rank, and the time of its forward passes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from clustertrain import fsio
from clustertrain.plan.layout import Layout
from clustertrain.run import heartbeat, metrics
from clustertrain.train.profiling import forward_timer
from clustertrain.train.profiling.forward_timer import ForwardTimer, is_collective_free
from clustertrain.train.session.heartbeat import ProgressReporter


def read_heartbeat(folder: Path) -> heartbeat.Heartbeat:
    return heartbeat.HeartbeatReader(folder, [3]).read()[3]


def test_nested_phase_restores_outer_phase(tmp_path: Path) -> None:
    progress = ProgressReporter(tmp_path, 3, 4, lambda: 1.5)
    assert read_heartbeat(tmp_path).phase == heartbeat.STARTUP
    progress.begin_step(7)
    with pytest.raises(KeyError), progress.in_phase(heartbeat.EVALUATION):
        assert read_heartbeat(tmp_path).phase == heartbeat.EVALUATION
        raise KeyError
    beat = read_heartbeat(tmp_path)
    assert (beat.step, beat.phase, beat.forward_s) == (7, heartbeat.TRAIN, 1.5)
    progress.end_step(8, 0.0, 400, 0.25)
    with progress.in_phase(heartbeat.CHECKPOINT):
        beat = read_heartbeat(tmp_path)  # still of the last step, because no other has begun
        assert (beat.step, beat.tokens, beat.data_wait_s) == (8, 100.0, 0.25)
    progress.close()
    assert (read_heartbeat(tmp_path).step, read_heartbeat(tmp_path).phase) == (8, heartbeat.IDLE)


@pytest.mark.parametrize("folder", [None, Path("/nonexistent/folder")])
def test_rows_are_the_same_without_folder(folder: Path | None) -> None:
    progress = ProgressReporter(folder, 0, 2, lambda: math.nan)
    progress.begin_step(0)
    row = progress.end_step(1, 0.0, 10, None)
    assert row["step"] == 1 and row["sum_tokens"] == 10 and "data_wait_s" not in row
    progress.close()


def test_second_session_of_attempt_continues_totals(tmp_path: Path) -> None:
    path = tmp_path / "attempt-1.jsonl"
    log = fsio.JsonlAppender(path)
    for session, steps in enumerate([(1, 2, 3), (4, 5)]):
        progress = ProgressReporter(tmp_path, 0, 1, lambda: math.nan)
        progress.load_totals(path)
        for step in steps:
            progress.begin_step(step - 1)
            log.append(progress.end_step(step, 0.0, 100, 0.5))
        progress.close()
        assert heartbeat.HeartbeatReader(tmp_path, [0]).read()[0].tokens == (300, 200)[session]  # of this session only
    log.close()
    last = metrics.read_last_row(path)
    assert last is not None and last["sum_tokens"] == 500 and last["sum_data_wait_s"] == pytest.approx(2.5)


def test_step_time_excludes_other_work(tmp_path: Path) -> None:
    progress = ProgressReporter(None, 0, 1, lambda: math.nan)
    progress.begin_step(0)
    assert progress.end_step(1, 3600.0, 10, None)["step_s"] == 0.0  # never negative, and no division by it


@pytest.mark.parametrize(
    ("layout", "collective_free"),
    [
        (Layout(), True),
        (Layout(strategy="ddp", dp_replicate=2), True),
        (Layout(strategy="zero1", dp_replicate=2), True),
        (Layout(strategy="fsdp", dp_shard=2), False),
        (Layout(strategy="ddp", dp_replicate=2, tp=2), False),
        (Layout(strategy="ddp", dp_replicate=2, pp=2), False),
        (Layout(strategy="ddp", dp_replicate=2, cp=2), False),
    ],
    ids=["single", "ddp", "zero1", "fsdp", "tp", "pp", "cp"],
)
def test_forward_passes_with_collectives_are_not_timed(layout: Layout, collective_free: bool) -> None:
    assert is_collective_free(nn.Linear(2, 2), layout) == collective_free
    timer = ForwardTimer(torch.device("cpu"), collective_free)
    timer.begin()
    timer.end()
    assert math.isnan(timer.sum_s()) != collective_free


class FakeGpu:
    """GPU that completes passes on request: pass ``i`` takes ``took_s[i]`` s, later ones as long as the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *took_s: float) -> None:
        self.made: list[FakeEvent] = []
        self.launched, self.done = 0, 0
        self.took_s = took_s
        monkeypatch.setattr(forward_timer, "_timing_event", lambda: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        self.timer = ForwardTimer(torch.device("cuda", 0), True)

    def launch(self, passes: int, max_pending: int) -> None:
        """Launch ``passes`` passes; at most ``max_pending`` of them are unfinished afterwards."""
        for _ in range(passes):
            self.timer.begin()
            self.timer.end()
            self.launched += 1
            self.done = max(self.done, self.launched - max_pending)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        gpu.made.append(self)

    def record(self, stream: object) -> None:
        self.index = self._gpu.launched

    def query(self) -> bool:
        return self.index < self._gpu.done

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.index == end.index
        took_s = self._gpu.took_s
        return 1000 * took_s[min(self.index, len(took_s) - 1)]


def test_gpu_forward_timer_does_not_wait_and_bounds_events(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, 0.020)
    gpu.launch(3 * forward_timer.MAX_EVENT_PAIRS, max_pending=10**9)
    assert gpu.timer.sum_s() == 0.0 and len(gpu.made) == 2 * forward_timer.MAX_EVENT_PAIRS
    gpu.done = gpu.launched
    assert gpu.timer.sum_s() == pytest.approx(forward_timer.MAX_EVENT_PAIRS * 0.020)
    gpu.launch(1, max_pending=0)
    # Passes without an event count as long as the next timed one.
    assert gpu.timer.sum_s() == pytest.approx((3 * forward_timer.MAX_EVENT_PAIRS + 1) * 0.020)


@pytest.mark.parametrize("max_pending", [5, 10 * forward_timer.MAX_EVENT_PAIRS])
def test_forward_time_of_many_micro_batches_after_slow_pass(monkeypatch: pytest.MonkeyPatch, max_pending: int) -> None:
    gpu = FakeGpu(monkeypatch, 30.0, 0.020)
    before = 0.0
    for step in range(4):
        gpu.launch(4 * forward_timer.MAX_EVENT_PAIRS, max_pending)
        gpu.done = gpu.launched
        now = gpu.timer.sum_s()
        if step > 1:
            assert now - before == pytest.approx(4 * forward_timer.MAX_EVENT_PAIRS * 0.020)
        before = now
    gpu.launch(1, max_pending=0)
    assert gpu.timer.sum_s() == pytest.approx(30.0 + 16 * forward_timer.MAX_EVENT_PAIRS * 0.020)
