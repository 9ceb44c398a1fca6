"""`top`: what it reads of a run, and how that fits a terminal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from clustertrain import clock, fsio
from clustertrain.report import terminal
from clustertrain.report.top import screen
from clustertrain.report.top.screen import ViewOptions
from clustertrain.report.top.state import METRICS_BYTES, EventView, GpuRow, RunMonitor, RunView
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
    """Two nodes of four GPUs: one is throttled and behind, one idle, one gone."""
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES)
    live_runs.alive("local-1", run)

    def change(node: str, _: int, v: dict[str, float]) -> None:
        if node == NODES[1]:
            v |= {"gpu1.throttle_thermal": 1.0, "gpu2.utilization": 0.0, "rank5.step": v["rank5.step"] - 7}
            v |= {k: NAN for k in v if k.startswith("gpu3.")}

    for k, node in enumerate(NODES):
        live_runs.record(run, node, now, gpus=4, first=4 * k, change=change)
    return run


def frame(view: RunView, width: int = 80, height: int | None = 24, shown: ViewOptions | None = None) -> list[str]:
    found = screen.render_frame(view, width, height, terminal.UNICODE, shown or ViewOptions())
    return [line.plain for line in found]


def test_a_running_job(run: RunDir, now: float) -> None:
    view = RunMonitor(run, now=lambda: now).poll(wait=True)
    assert (view.state, view.job_id, view.backend, view.attempt) == ("running", "local-1", "local", 1)
    assert (view.step, view.total_steps) == (1200, 10_000)
    assert view.step_s == pytest.approx(0.5)
    assert view.tokens_per_s == pytest.approx(1.05e6)
    assert view.goodput is not None and 0 < view.goodput < 1
    assert [n.node for n in view.nodes] == NODES
    assert len(view.rows) == 8
    held, idle, gone = view.rows[5], view.rows[6], view.rows[7]
    assert (held.rank, held.throttled, held.behind, held.phase) == (5, ["power", "thermal"], 7, "train")
    assert (idle.utilization, idle.behind) == (0.0, 0)
    assert (gone.utilization, gone.power_w, gone.step) == (None, None, 1200)


def test_the_time_left_counts_the_checkpoints_that_there_were(run: RunDir, now: float) -> None:
    view = RunMonitor(run, now=lambda: now).poll(wait=True)
    # 5 checkpoints of 2 s in the 599.5 s since the first step.
    assert view.overhead == pytest.approx(10 / 590, rel=0.01)
    assert view.eta_s == pytest.approx(8800 * 0.5 * (1 + 10 / 590), rel=0.01)
    assert "left (2% for saves, evals)" in "\n".join(frame(view))


def test_before_the_first_checkpoint_it_says_that_none_is_counted(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES[:1], steps=150)
    live_runs.alive("local-1", run)
    view = RunMonitor(run, now=lambda: now).poll(wait=True)
    assert view.overhead is None
    assert view.eta_s == pytest.approx(9850 * 0.5)
    assert "left (saves, evals not counted)" in "\n".join(frame(view))


def test_a_rate_of_each_rank_from_one_look_to_the_next(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES[:1])
    live_runs.alive("local-1", run)
    live_runs.record(run, NODES[0], now, gpus=1, seconds=20)
    live = RunMonitor(run, now=lambda: now)
    assert live.poll(wait=True).rows[0].step_s is None
    live_runs.record(run, NODES[0], now + 10, gpus=1, seconds=20, steps=1220)
    live._attempt_files._next_node_read = float("-inf")  # type: ignore[union-attr]
    row = live.poll(wait=True).rows[0]
    assert row.step_s == pytest.approx(0.5)
    assert row.data_wait_share == pytest.approx(0.008)


def test_only_the_end_of_a_long_run_is_read(run: RunDir, now: float, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fsio.JsonlAppender(run.metrics_path(1))
    for _ in range(20):
        log.append(*({"step": 1200 + i, "t": now, "loss": 1.0, "padding": "x" * 200} for i in range(5000)))
    log.close()
    live = RunMonitor(run, now=lambda: now)
    live._status_poller.get(wait=True)  # the goodput reads it all, rarely and in a thread
    asked: list[tuple[Path, int]] = []
    whole = fsio.read_jsonl_tail
    monkeypatch.setattr(fsio, "read_jsonl_tail", lambda path, size: asked.append((path, size)) or whole(path, size))
    monkeypatch.setattr(fsio, "read_jsonl", lambda path: pytest.fail(f"{path} was read whole"))
    view = live.poll()
    assert view.step == 6199
    assert sum(size for _, size in asked) <= 5 * METRICS_BYTES
    asked.clear()
    live.poll()
    assert asked == []  # nothing has changed


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (80, 10), (60, 8), (200, 12), (40, 6), (80, 3)])
def test_a_frame_fits_its_terminal(run: RunDir, width: int, height: int) -> None:
    found = frame(RunMonitor(run).poll(wait=True), width, height)
    assert len(found) <= height
    assert max(len(line) for line in found) <= width
    assert found[-1].startswith("q quit")
    if height >= 8:
        assert any("gpu-node-00" in line for line in found)


def test_what_does_not_fit_is_counted_and_can_be_scrolled_to(run: RunDir) -> None:
    view, shown = RunMonitor(run).poll(wait=True), ViewOptions()
    first = frame(view, 80, 10, shown)
    assert "(0 above, " in first[-1] and not any("gpu-node-01" in line for line in first)
    shown.scroll = 99
    last = frame(view, 80, 10, shown)
    assert " 0 below)" in last[-1] and any("gpu-node-01" in line for line in last)
    assert shown.scroll < 8
    rows = [line for line in last if " train " in line]
    assert rows[0].startswith("gpu-node-0"), "the first visible line names its node"


def test_sorting(run: RunDir) -> None:
    view = RunMonitor(run).poll(wait=True)
    by_step = [line for line in frame(view, 120, 40, ViewOptions("step")) if " train " in line]
    assert " 1193 " in by_step[0]
    by_use = [line for line in frame(view, 120, 40, ViewOptions("utilization")) if " train " in line]
    assert " 0% " in by_use[-2], "what is not known comes last"


def test_wide_terminals_show_more(run: RunDir) -> None:
    view = RunMonitor(run).poll(wait=True)
    narrow, wide = frame(view, 80), frame(view, 160)
    assert not any("Tens" in line for line in narrow)
    assert any("Tens" in line and "s/step" in line and "Host GiB" in line for line in wide)


def test_without_block_characters_it_is_ascii(run: RunDir) -> None:
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
    text = "\n".join(frame(view, 80, 24))
    assert "warning: GPU 3 is hot" in text
    assert "warning: full" not in text and "cleared: full" in text
    assert "checkpoint 29" in text and "checkpoint 10" not in text


def test_a_run_on_processors_alone(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES[:1])
    live_runs.alive("local-1", run)
    why = "LIBRARY_NOT_FOUND: no driver"
    live_runs.record(run, NODES[0], now, gpus=0, ranks=2, nvml=why)
    text = "\n".join(frame(RunMonitor(run).poll(wait=True)))
    assert f"! gpu-node-00: {why}" in text
    assert "Util" not in text and "Rank Phase" in text and " train " in text


def test_a_run_that_waits(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.alive("local-1", run, "PENDING", "Resources", now + 3600)
    text = "\n".join(frame(RunMonitor(run).poll(wait=True)))
    assert "pending" in text
    assert f"waits for Resources, expected to start {terminal.format_timestamp(now + 3600)}" in text
    assert "no attempt has started yet" in text


def test_a_run_whose_agents_have_written_nothing_yet(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now)
    live_runs.begin(run, now, NODES)
    live_runs.alive("local-1", run)
    text = "\n".join(frame(RunMonitor(run).poll(wait=True)))
    assert "! gpu-node-00, gpu-node-01: has recorded nothing yet" in text
    assert "nothing has been recorded yet" in text


def test_telemetry_that_is_off(tmp_path: Path, now: float) -> None:
    run = live_runs.new_run(tmp_path, now, spec='[job]\nbackend = "local"\n[recipe.telemetry]\nenabled = false\n')
    live_runs.begin(run, now, NODES)
    live_runs.alive("local-1", run)
    text = "\n".join(frame(RunMonitor(run).poll(wait=True)))
    assert "telemetry is off" in text and "step 1200/10000" in text


def test_a_run_that_has_ended(run: RunDir, now: float) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("batch"))
    log.append({"t": now, "event": "ended", "ending": "completed", "reason": "done", "last_step": 1200})
    log.close()
    live_runs.alive("local-1", run, "COMPLETED")
    view = RunMonitor(run, now=lambda: now + 1e5).poll(wait=True)
    text = "\n".join(frame(view))
    assert "the run has ended (completed); this is its last state" in text
    assert "gpu-node-00" in text
    assert view.eta_s is None and view.since_step_s is None
    assert not [n for n in view.nodes if n.trouble], "an ended run is not silent for a day"


def test_a_node_that_has_gone_silent(run: RunDir, now: float) -> None:
    text = "\n".join(frame(RunMonitor(run, now=lambda: now + 600).poll(wait=True)))
    assert "! gpu-node-00, gpu-node-01: nothing new for 600 s" in text
    assert "no step for 10m00s" in text


def test_a_scheduler_that_gives_no_answer(run: RunDir) -> None:
    fsio.write_text(run.path.parent.parent / "local" / "1" / "job.json", "{")
    text = "\n".join(frame(RunMonitor(run).poll(wait=True)))
    assert "gave no answer" in text and "gpu-node-00" in text


def test_files_that_are_damaged_do_not_end_it(run: RunDir, now: float) -> None:
    for path in run.attempt(1).telemetry.rglob("*"):
        if path.is_file() and NODES[0] in str(path):
            path.write_bytes(b"\0garbage")
    run.metrics_path(1).write_bytes(b'{"step": 7}\n{"st\xff\n[1]\n')
    (run.attempt(1).events / "rank-0.jsonl").write_bytes(b'{"event": "x", "t": 1}\nnonsense')
    run.attempt(1).deadline.write_text("{")
    text = "\n".join(frame(RunMonitor(run, now=lambda: now).poll(wait=True)))
    assert "! gpu-node-00: " in text and "gpu-node-01" in text


def test_a_long_name_of_a_node_keeps_what_differs() -> None:
    rows = [GpuRow(node=f"an-unusually-long-name-{i:04}.cluster.example.org", gpu=0, uuid="u") for i in range(2)]
    text = frame(RunView(t=0.0, run="r", attempt=1, rows=rows))
    assert any("-0001" in line for line in text) and not any("example" in line for line in text)


def test_the_keys_of_the_json(run: RunDir) -> None:
    found = msgspec.to_builtins(RunMonitor(run).poll(wait=True))
    assert {"run", "job_id", "state", "step", "total_steps", "eta_s", "goodput", "nodes", "rows", "events"} <= set(
        found
    )
    assert {"node", "gpu", "uuid", "rank", "utilization", "memory_used_gib", "phase", "step"} <= set(found["rows"][0])
    assert found["rows"][0]["phase"] in heartbeat.PHASES


ALERT = "warning: GPU 3 of gpu-node-01 (rank 7) was throttled by heat for 2.3 of the last 10 minutes, more than 2 min"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_an_alert_is_told_in_full_at_any_width(width: int) -> None:
    events = [EventView(1.0, "alert", ALERT, "warning"), EventView(2.0, "checkpoint", "checkpoint of step 3")]
    for height in (24, None):
        found = frame(RunView(t=3.0, run="r", events=events), width, height)
        assert ALERT in " ".join(" ".join(found).split())
        assert max(map(len, found)) <= width
        assert sum("checkpoint of step 3" in line for line in found) == 1


def test_alerts_that_do_not_fit_are_cut_with_a_sign() -> None:
    events = [EventView(float(i), "alert", f"warning: {i} {'words ' * 100}", "warning") for i in range(9)]
    rows = [GpuRow(node="n1", gpu=i, uuid=f"u{i}") for i in range(8)]
    found = frame(RunView(t=9.0, run="r", attempt=1, rows=rows, events=events), 60, 20)
    assert len(found) == 20 and found[-1].startswith("q quit")
    assert sum(line.endswith(" ..") for line in found) >= 1
    assert sum(line.startswith("n1") for line in found) == 1


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160])
def test_what_a_rank_does_is_seen_at_any_width_and_what_is_left_out_is_told(run: RunDir, width: int) -> None:
    found = frame(RunMonitor(run).poll(wait=True), width, 40)
    (titles,) = (line for line in found if line.startswith("Node "))
    assert titles.split()[-1] != "Ste" and "Step" in titles and "Phase" in titles and "Util" in titles
    text = " ".join(" ".join(found).split())
    for title in ("GiB", "W", "MHz", "Held", "Rank", *(["s/step", "SM", "Age"] if width >= 120 else [])):
        said = text.partition("no room for ")[2].partition(": a wider terminal")[0].split(", ")
        assert (title in titles.split()) != (title in said), title
    assert ("no room for" in text) == (width in (40, 60, 120))


def test_why_a_gpu_has_no_figures_is_told_in_full() -> None:
    why = "GPU_IS_LOST: the GPU has fallen off the bus or has otherwise become inaccessible"
    rows = [GpuRow(node="n1", gpu=i, uuid=f"u{i}", reason=why if i else None, utilization=None if i else 0.9)
            for i in range(6)]  # fmt: skip
    for width in (60, 80, 160):
        found = frame(RunView(t=0.0, run="r", attempt=1, rows=rows), width)
        assert f"! GPU 1 of n1 and 4 more GPUs: {why}" in " ".join(" ".join(found).split())
        assert not any("the GPU h" in line for line in found if line.startswith("n1"))
