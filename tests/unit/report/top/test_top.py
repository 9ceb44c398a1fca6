"""`top`: the state that it reads and the screen that it draws."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from clustertrain import clock, fsio
from clustertrain.report import terminal
from clustertrain.report.top import screen
from clustertrain.report.top.screen import ViewOptions
from clustertrain.report.top.state import METRICS_BYTES, RunMonitor
from clustertrain.report.top.view import EventView, GpuRow, RunView
from clustertrain.run import heartbeat
from clustertrain.run.run_dir import RunDir
from tests.unit.report import live_runs

NODES = ["gpu-node-00", "gpu-node-01"]
NAN = float("nan")


@pytest.fixture
def now() -> float:
    return clock.now()


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))


@pytest.fixture
def run(tmp_path: Path, now: float) -> RunDir:
    """Return a run on two nodes of four GPUs: one GPU is throttled and lags, one is idle, one is lost."""
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES)
    live_runs.create_job("local-1", run)

    def change(node: str, _: int, v: dict[str, float]) -> None:
        if node == NODES[1]:
            v |= {"gpu1.throttle_thermal": 1.0, "gpu2.utilization": 0.0, "rank5.step": v["rank5.step"] - 7}
            v |= {k: NAN for k in v if k.startswith("gpu3.")}

    for k, node in enumerate(NODES):
        live_runs.record(run, node, now, gpus=4, first=4 * k, change=change)
    return run


def render_lines(
    view: RunView, width: int = 80, height: int | None = 24, options: ViewOptions | None = None
) -> list[str]:
    frame = screen.render_frame(view, width, height, terminal.UNICODE, options or ViewOptions())
    return [line.plain for line in frame]


def test_state_of_a_running_job(run: RunDir, now: float) -> None:
    view = RunMonitor(run, now=lambda: now).poll(wait=True)
    assert (view.state, view.job_id, view.backend, view.attempt) == ("running", "local-1", "local", 1)
    assert (view.step, view.total_steps) == (1200, 10_000)
    assert view.step_s == pytest.approx(0.5)
    assert view.tokens_per_s == pytest.approx(1.05e6)
    assert view.goodput is not None and 0 < view.goodput < 1
    assert [n.node for n in view.nodes] == NODES
    assert len(view.rows) == 8
    throttled, idle, lost = view.rows[5], view.rows[6], view.rows[7]
    assert (throttled.rank, throttled.throttled) == (5, ["power", "thermal"])
    assert (throttled.behind, throttled.phase) == (7, "train")
    assert (idle.utilization, idle.behind) == (0.0, 0)
    assert (lost.utilization, lost.power_w, lost.step) == (None, None, 1200)


def test_eta_includes_past_checkpoint_overhead(run: RunDir, now: float) -> None:
    view = RunMonitor(run, now=lambda: now).poll(wait=True)
    # 5 checkpoints of 2 s in the 599.5 s since the first step.
    assert view.overhead == pytest.approx(10 / 590, rel=0.01)
    assert view.eta_s == pytest.approx(8800 * 0.5 * (1 + 10 / 590), rel=0.01)
    assert "left (2% for saves, evals)" in "\n".join(render_lines(view))


def test_eta_before_the_first_checkpoint_has_no_overhead(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES[:1], steps=150)
    live_runs.create_job("local-1", run)
    view = RunMonitor(run, now=lambda: now).poll(wait=True)
    assert view.overhead is None
    assert view.eta_s == pytest.approx(9850 * 0.5)
    assert "left (saves, evals not counted)" in "\n".join(render_lines(view))


def test_rank_speed_is_measured_between_polls(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES[:1])
    live_runs.create_job("local-1", run)
    live_runs.record(run, NODES[0], now, gpus=1, seconds=20)
    live = RunMonitor(run, now=lambda: now)
    assert live.poll(wait=True).rows[0].step_s is None
    live_runs.record(run, NODES[0], now + 10, gpus=1, seconds=20, steps=1220)
    live._attempt_files._next_node_read = float("-inf")  # type: ignore[union-attr]
    row = live.poll(wait=True).rows[0]
    assert row.step_s == pytest.approx(0.5)
    assert row.data_wait_share == pytest.approx(0.008)


@pytest.mark.long
def test_poll_reads_only_the_ends_of_files(run: RunDir, now: float, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fsio.JsonlAppender(run.metrics_path(1))
    for _ in range(20):
        log.append(*({"step": 1200 + i, "t": now, "loss": 1.0, "padding": "x" * 200} for i in range(5000)))
    log.close()
    live = RunMonitor(run, now=lambda: now)
    live._status_poller.get(wait=True)  # goodput reads whole files, rarely and in a thread
    reads: list[tuple[Path, int]] = []
    read_tail = fsio.read_jsonl_tail
    monkeypatch.setattr(fsio, "read_jsonl_tail", lambda path, size: reads.append((path, size)) or read_tail(path, size))
    monkeypatch.setattr(fsio, "read_jsonl", lambda path: pytest.fail(f"{path} was read completely"))
    view = live.poll()
    assert view.step == 6199
    assert sum(size for _, size in reads) <= 5 * METRICS_BYTES
    reads.clear()
    live.poll()
    assert reads == []  # nothing has changed


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (80, 10), (60, 8), (200, 12), (40, 6), (80, 3)])
def test_frame_fits_its_terminal(run: RunDir, width: int, height: int) -> None:
    lines = render_lines(RunMonitor(run).poll(wait=True), width, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    assert lines[-1].startswith("q quit")
    if height >= 8:
        assert any(line.startswith("gpu-node-01") for line in lines), "the rows with problems come first"


def test_rows_scroll_and_hidden_ones_are_counted(run: RunDir) -> None:
    view, options = RunMonitor(run).poll(wait=True), ViewOptions("node")
    first = render_lines(view, 80, 10, options)
    assert "(0 above, " in first[-1] and not any(line.startswith("gpu-node-01") for line in first)
    options.move(99)
    last = render_lines(view, 80, 10, options)
    assert " 0 below)" in last[-1] and any(line.startswith("gpu-node-01") for line in last)
    assert options.scroll < 8
    rows = [line for line in last if " train " in line]
    assert rows[0].startswith("gpu-node-0"), "the first visible line names its node"


def test_sorting(run: RunDir) -> None:
    view = RunMonitor(run).poll(wait=True)
    by_step = [line for line in render_lines(view, 120, 40, ViewOptions("step")) if " train " in line]
    assert " 1193 " in by_step[0]
    by_utilization = [line for line in render_lines(view, 120, 40, ViewOptions("utilization")) if " train " in line]
    assert " 0% " in by_utilization[-2], "unknown values come last"
    by_problems = [line for line in render_lines(view, 120, 40) if " train " in line]
    by_node = [line for line in render_lines(view, 120, 40, ViewOptions("node")) if " train " in line]
    assert by_node[0].startswith("gpu-node-00") and by_problems[0].startswith("gpu-node-01")


def test_wide_terminal_shows_more_columns(run: RunDir) -> None:
    view = RunMonitor(run).poll(wait=True)
    narrow, wide = render_lines(view, 80), render_lines(view, 160)
    assert not any("Tens" in line for line in narrow)
    assert any("Tens" in line and "s/step" in line and "Host GiB" in line for line in wide)


def test_ascii_glyphs_give_ascii_lines(run: RunDir) -> None:
    view = RunMonitor(run).poll(wait=True)
    for width in (80, 160):
        text = "\n".join(line.plain for line in screen.render_frame(view, width, 50, terminal.ASCII, ViewOptions()))
        assert text.isascii()
        assert "#" in text


def test_alerts_stay_until_they_are_cleared() -> None:
    events = [
        EventView(1.0, "alert", "warning: GPU 3 is hot", "warning"),
        EventView(2.0, "alert", "warning: full", "warning"),
    ]
    events += [EventView(3.0 + i, "checkpoint", f"checkpoint {i}") for i in range(30)]
    view = RunView(t=100.0, run="r", events=[*events, EventView(50.0, "alert", "cleared: full", "warning")])
    text = "\n".join(render_lines(view, 80, 24))
    assert "warning: GPU 3 is hot" in text
    assert "warning: full" not in text and "cleared: full" in text
    assert "checkpoint 29" in text and "checkpoint 10" not in text


def test_cpu_run_shows_no_gpu_columns(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES[:1])
    live_runs.create_job("local-1", run)
    reason = "LIBRARY_NOT_FOUND: no driver"
    live_runs.record(run, NODES[0], now, gpus=0, ranks=2, nvml=reason)
    text = "\n".join(render_lines(RunMonitor(run).poll(wait=True)))
    assert f"! gpu-node-00: {reason}" in text
    assert "Util" not in text and "Rank Phase" in text and " train " in text


def test_pending_run(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.create_job("local-1", run, "PENDING", "Resources", now + 3600)
    text = "\n".join(render_lines(RunMonitor(run).poll(wait=True)))
    assert "pending" in text
    assert f"waiting for Resources, expected to start {terminal.format_timestamp(now + 3600)}" in text
    assert "no attempt has started yet" in text


def test_running_run_without_records(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES)
    live_runs.create_job("local-1", run)
    text = "\n".join(render_lines(RunMonitor(run).poll(wait=True)))
    assert "! gpu-node-00, gpu-node-01: has recorded nothing yet" in text
    assert "nothing has been recorded yet" in text


def test_telemetry_off(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now, spec='[job]\nbackend = "local"\n[recipe.telemetry]\nenabled = false\n')
    live_runs.begin(run, now, NODES)
    live_runs.create_job("local-1", run)
    text = "\n".join(render_lines(RunMonitor(run).poll(wait=True)))
    assert "telemetry is off" in text and "step 1200/10000" in text


def test_ended_run(run: RunDir, now: float) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("batch"))
    log.append({"t": now, "event": "ended", "ending": "completed", "reason": "done", "last_step": 1200})
    log.close()
    live_runs.create_job("local-1", run, "COMPLETED")
    view = RunMonitor(run, now=lambda: now + 1e5).poll(wait=True)
    text = "\n".join(render_lines(view))
    assert "the run has ended (completed); this is its last state" in text
    assert "gpu-node-00" in text
    assert view.eta_s is None and view.since_step_s is None
    assert not [n for n in view.nodes if n.problem], "nodes of an ended run are not silent"


def test_ended_ranks_are_at_the_step_that_they_reported(run: RunDir, now: float) -> None:
    sampled = RunMonitor(run, now=lambda: now).poll(wait=True).rows
    assert sampled[0].step == 1200 and sampled[4].rank == 4
    outcome = {"ending": "completed", "step": 1207, "finished": True}
    stopped = {"rank": 2, "ending": "failed", "step": None, "last_seen": {"step": 1204}}
    attempt = run.attempt(1)
    attempt.results.mkdir()
    ranks = [{**outcome, "rank": 0}, {**outcome, "rank": 1}, stopped, {"rank": 3, "ending": "failed"}]
    fsio.write_json(attempt.result_path(NODES[0]), {"node": NODES[0], "ending": "failed", "ranks": ranks})
    attempt.result_path(NODES[1]).write_text('{"node": ')  # damaged: what was sampled stays
    monitor = RunMonitor(run, now=lambda: now)
    assert monitor.poll(wait=True).rows == sampled, "the run has not ended"
    live_runs.create_job("local-1", run, "FAILED")
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": now, "event": "ended", "ending": "failed", "reason": "a rank failed", "last_step": 1207})
    log.close()
    view = RunMonitor(run, now=lambda: now).poll(wait=True)
    steps = {r.rank: (r.step, r.behind) for r in view.rows}
    assert view.step == 1207 and [steps[r] for r in (0, 1, 2)] == [(1207, 0), (1207, 0), (1204, 3)]
    assert steps[3][0] == sampled[3].step and steps[4][0] == sampled[4].step


def test_silent_nodes(run: RunDir, now: float) -> None:
    text = "\n".join(render_lines(RunMonitor(run, now=lambda: now + 600).poll(wait=True)))
    assert "! gpu-node-00, gpu-node-01: no new samples for 600 s" in text
    assert "no step for 10m00s" in text


def test_unanswered_scheduler_query_is_shown(run: RunDir) -> None:
    fsio.write_text(run.path.parent.parent / "local" / "1" / "job.json", "{")
    text = "\n".join(render_lines(RunMonitor(run).poll(wait=True)))
    assert "did not answer" in text and "gpu-node-00" in text


def test_damaged_files_do_not_raise(run: RunDir, now: float) -> None:
    for path in run.attempt(1).telemetry.rglob("*"):
        if path.is_file() and NODES[0] in str(path):
            path.write_bytes(b"\0garbage")
    run.metrics_path(1).write_bytes(b'{"step": 7}\n{"st\xff\n[1]\n')
    (run.attempt(1).events / "rank-0.jsonl").write_bytes(b'{"event": "x", "t": 1}\nnonsense')
    run.attempt(1).deadline.write_text("{")
    text = "\n".join(render_lines(RunMonitor(run, now=lambda: now).poll(wait=True)))
    assert "! gpu-node-00: " in text and "gpu-node-01" in text


def test_long_node_name_keeps_its_distinct_end() -> None:
    rows = [GpuRow(node=f"an-unusually-long-name-{i:04}.cluster.example.org", gpu=0, uuid="u") for i in range(2)]
    lines = render_lines(RunView(t=0.0, run="r", attempt=1, rows=rows))
    assert any("-0001" in line for line in lines) and not any("example" in line for line in lines)


def test_json_keys(run: RunDir) -> None:
    document = msgspec.to_builtins(RunMonitor(run).poll(wait=True))
    assert document.keys() >= {
        "run", "job_id", "state", "step", "total_steps", "eta_s", "goodput", "nodes", "rows", "events",
    }  # fmt: skip
    row = document["rows"][0]
    assert {"node", "gpu", "uuid", "rank", "utilization", "memory_used_gib", "phase", "step"} <= set(row)
    assert row["phase"] in heartbeat.PHASES


ALERT = "warning: GPU 3 of gpu-node-01 (rank 7) was throttled by heat for 2.3 of the last 10 minutes, more than 2 min"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_alert_is_complete_at_any_width(width: int) -> None:
    events = [EventView(1.0, "alert", ALERT, "warning"), EventView(2.0, "checkpoint", "checkpoint of step 3")]
    for height in (24, None):
        lines = render_lines(RunView(t=3.0, run="r", events=events), width, height)
        assert ALERT in " ".join(" ".join(lines).split())
        assert max(map(len, lines)) <= width
        assert sum("checkpoint of step 3" in line for line in lines) == 1


def test_truncated_alerts_are_marked() -> None:
    events = [EventView(float(i), "alert", f"warning: {i} {'words ' * 100}", "warning") for i in range(9)]
    rows = [GpuRow(node="n1", gpu=i, uuid=f"u{i}") for i in range(8)]
    lines = render_lines(RunView(t=9.0, run="r", attempt=1, rows=rows, events=events), 60, 20)
    assert len(lines) == 20 and lines[-1].startswith("q quit")
    assert sum(line.endswith(" ..") for line in lines) >= 1
    assert sum(line.startswith("n1") for line in lines) == 1


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160])
def test_phase_and_step_are_kept_and_dropped_columns_named(run: RunDir, width: int) -> None:
    lines = render_lines(RunMonitor(run).poll(wait=True), width, 40)
    (header,) = (line for line in lines if line.startswith("Node "))
    assert header.split()[-1] != "Ste" and "Step" in header and "Phase" in header and "Util" in header
    text = " ".join(" ".join(lines).split())
    for title in ("GiB", "W", "MHz", "Held", "Rank", *(["s/step", "SM", "Age"] if width >= 120 else [])):
        dropped = text.partition("no room for ")[2].partition(": widen the terminal")[0].split(", ")
        assert (title in header.split()) != (title in dropped), title
    assert ("no room for" in text) == (width in (40, 60, 120))


def test_reason_for_missing_gpu_metrics_is_complete() -> None:
    reason = "GPU_IS_LOST: the GPU has fallen off the bus or has otherwise become inaccessible"
    rows = [GpuRow(node="n1", gpu=i, uuid=f"u{i}", reason=reason if i else None, utilization=None if i else 0.9)
            for i in range(6)]  # fmt: skip
    for width in (60, 80, 160):
        lines = render_lines(RunView(t=0.0, run="r", attempt=1, rows=rows), width)
        assert f"! GPU 1 of n1 and 4 more GPUs: {reason}" in " ".join(" ".join(lines).split())
        assert not any("the GPU h" in line for line in lines if line.startswith("n1"))
