"""Curves of `top`: utilization of the last minutes and loss of the attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import clock, fsio
from clustertrain.report import terminal
from clustertrain.report.top import dialogs, history, screen
from clustertrain.report.top.history import BINS, MAX_LOSSES, History, LossHistory
from clustertrain.report.top.screen import ViewOptions
from clustertrain.report.top.state import RunMonitor
from clustertrain.report.top.view import GpuRow, RunView
from clustertrain.run.run_dir import RunDir
from tests.unit.report import live_runs


@pytest.fixture
def now() -> float:
    return clock.now()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: float) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, ["a", "b"])
    live_runs.create_job("local-1", run)
    return run


def idle_at_first(node: str, second: int, values: dict[str, float]) -> None:
    if second < 300:
        values |= {k: 0.0 for k in values if k.endswith(".utilization")}


def test_utilization_of_the_last_minutes(run: RunDir, now: float) -> None:
    for node in ("a", "b"):
        live_runs.record(run, node, now, gpus=2, seconds=700, change=idle_at_first)
    live = RunMonitor(run, now=lambda: now)
    live.poll(wait=True)
    busy = live.history().busy
    assert BINS <= len(busy) <= BINS + 1
    assert busy[5] == 0.0 and busy[-5] == pytest.approx(0.9325)


def test_only_new_samples_are_read(run: RunDir, now: float, monkeypatch: pytest.MonkeyPatch) -> None:
    live_runs.record(run, "a", now, gpus=1, seconds=30)
    live = RunMonitor(run, now=lambda: now)
    live.poll(wait=True)
    monkeypatch.setattr(history, "open_node", lambda folder: pytest.fail(f"{folder} was read again"))
    live._attempt_files._busy.update(live._attempt_files._nodes)  # type: ignore[union-attr]


def test_run_without_gpus_shows_its_cpus(run: RunDir, now: float) -> None:
    live_runs.record(run, "a", now, gpus=0, ranks=2, seconds=100)
    live = RunMonitor(run, now=lambda: now)
    view = live.poll(wait=True)
    assert live.history().is_cpu and live.history().busy[-1] == pytest.approx(0.21)
    lines = [x.plain for x in screen.render_frame(view, 80, 24, terminal.UNICODE, ViewOptions(), live.history())]
    assert any(line.startswith("CPUs ") and "21% busy" in line and "loss " in line for line in lines)


def test_losses_of_the_whole_file_are_thinned(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    log = fsio.JsonlAppender(path)
    log.append(*({"step": i, "t": float(i), "loss": 10.0 / i} for i in range(1, 3 * MAX_LOSSES)))
    log.append({"step": 3 * MAX_LOSSES, "t": 1.0, "loss": float("nan")}, {"step": 3 * MAX_LOSSES + 1, "t": 1.0})
    log.close()
    losses = LossHistory()
    for _ in range(3):
        losses.update(path, [{"step": 4 * MAX_LOSSES, "loss": 0.5}])
    values = losses.values()
    assert values[0] == (1, 10.0) and values[-1] == (4 * MAX_LOSSES, 0.5)
    assert len(values) <= MAX_LOSSES and values == sorted(values)
    losses.update(tmp_path / "other.jsonl", [{"step": 1, "loss": 2.0}])  # after a rollback
    assert losses.values() == [(1, 2.0)]


@pytest.mark.parametrize(("width", "height"), [(40, 10), (60, 40), (80, 24), (160, 60)])
@pytest.mark.parametrize("signs", [terminal.UNICODE, terminal.ASCII])
def test_plots_fill_the_free_lines(width: int, height: int, signs: terminal.Glyphs) -> None:
    curves = History(busy=[0.5, None, 0.9, 1.0], losses=[(i, 1e9 / i) for i in range(1, 50)])
    view = RunView(t=0.0, run="r", attempt=1)
    lines = [x.plain for x in screen.render_frame(view, width, height, signs, ViewOptions(), curves)]
    assert len(lines) == height and max(map(len, lines)) <= width
    assert any("GPUs busy, %" in line and "loss" in line for line in lines) == (width >= 60)
    assert signs is terminal.UNICODE or "\n".join(lines).isascii()


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (160, 50)])
def test_details_and_help_fit_the_terminal(width: int, height: int) -> None:
    row = GpuRow(node="n1", gpu=0, uuid="GPU-0", rank=3, utilization=0.9, step=7, phase="train")
    view = RunView(t=0.0, run="r", attempt=1, rows=[row])
    log = [f"{i} {'long ' * 100}\x1b[31m" for i in range(200)]
    path = f"/{'a-long-folder/' * 10}rank-3.log"
    for lines in (
        dialogs.render_details(view, row, log, path, width, height, terminal.ASCII),
        dialogs.render_help(width, height),
    ):
        assert len(lines) == height and max(line.cell_len for line in lines) <= width
        assert lines[-1].plain.startswith("any key: back")
    text = "".join(line.plain for line in dialogs.render_details(view, row, log, path, 80, 40, terminal.ASCII))
    assert path in text and "GPU 0 of n1 (rank 3)" in text and "199 long" in text and "\x1b" not in text
