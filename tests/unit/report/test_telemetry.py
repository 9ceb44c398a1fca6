"""The telemetry report of recorded runs."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from clustertrain.report import gpu_table, telemetry, terminal
from clustertrain.report.html.facts import build_summary
from clustertrain.telemetry.analysis.summarize import summarize
from clustertrain.telemetry.insights import build_insights
from clustertrain.telemetry.report_schema import Summary
from tests.unit.telemetry.runs import GIB, T0, Reason, busy, event, gpu, new_attempt, new_run, record
from tests.unit.telemetry.summaries import replace


def render_text(summary: Summary, width: int) -> str:
    out = io.StringIO()
    telemetry.show(summary, terminal.make_console(out, width))
    return out.getvalue()


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    """Return two attempts on two nodes: one GPU is idle, one is lost, and one node has no power readings."""
    run = new_run(tmp_path)
    for n in (1, 2):
        attempt = new_attempt(run, n, str(40 + n), ["gpu-node-01", "gpu-node-02"])
        for number, node in enumerate(attempt_nodes := ["gpu-node-01", "gpu-node-02"]):
            gpus = [(gpu(i, node=node, ranks=[2 * number + i]), busy(0.8 - 0.8 * number * i)) for i in range(2)]
            reasons = [Reason(0.0, 0, "power_w", "NOT_SUPPORTED: no")] if number else []
            record(attempt, gpus, node=node, start=T0 + 1000 * n, seconds=600, reasons=reasons)
        event(attempt, "gpu_lost", attempt_nodes[0], T0 + 1, uuid="GPU-gpu-node-01-1", index=1, reason="GPU_IS_LOST: x")
    return summarize(run)


@pytest.mark.parametrize("width", [60, 80, 120, 160, 200])
def test_report_fits_its_width(summary: Summary, width: int) -> None:
    text = render_text(summary, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text, "a cell was cut off"
    assert "\x1b" not in text
    assert "gpu-node-02" in text


@pytest.mark.parametrize("width", [80, 160])
def test_report_content(summary: Summary, width: int) -> None:
    text = render_text(summary, width)
    for expected in ("2 attempts · job 41, 42", "4 GPUs allocated", "unused", "3 of 4 used", "100.0%", "!! GPU 1 of"):
        assert expected in text
    assert ("UUID" in text) == (width == 160)


def test_long_node_names_are_folded(tmp_path: Path) -> None:
    node = "an-unusually-long-name-of-a-node.cluster.example.org"
    run = new_run(tmp_path)
    record(new_attempt(run, nodes=[node]), [(gpu(0, node=node), busy())], node=node)
    text = render_text(summarize(run), 80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


def test_report_without_nvml(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record(new_attempt(run), [], nvml="LIBRARY_NOT_FOUND: no NVIDIA driver")
    text = render_text(summarize(run), 80)
    assert "no GPU metrics" in text
    assert "LIBRARY_NOT_FOUND" in text
    assert "25%" in text


def test_report_without_records(tmp_path: Path) -> None:
    summary = summarize(new_run(tmp_path))
    assert "nothing has been recorded yet" in render_text(summary, 80)
    ended = build_insights(msgspec.structs.replace(summary, state="cancelled"), [])
    assert [n.text for n in ended if n.code == "no_telemetry"] == ["nothing has been recorded: no attempt has started"]


def test_many_similar_insights_are_counted(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record(new_attempt(run), [(gpu(i), busy(0.0)) for i in range(8)])
    verdict, _, text = render_text(summarize(run), 80).partition("\n\n")
    assert verdict.startswith("9 critical: the job did not use 8 of 8 allocated GPUs")
    assert text.count("was not used") == 3
    assert "and 5 more like these" in text


def test_critical_insights_precede_the_tables_and_mark_the_gpu(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record(new_attempt(run), [(gpu(0), busy(0.9)), (gpu(1), busy(0.0))])
    text = render_text(summarize(run), 80)
    assert text.index("Insights") < text.index("Over the job")
    rows = [line for line in text.partition("Over the job")[2].splitlines() if "▁" in line or "▇" in line]
    assert "!!1" in rows[1] and "!" not in rows[0]


def test_cells_of_a_straggler_are_red_and_of_a_hot_gpu_amber(tmp_path: Path) -> None:
    run = new_run(tmp_path)

    def hot(second: int) -> list[float | None]:
        return [0.9, 60.0 * GIB, 400.0, 84.0, 1980, 2619, 400.0 * second]

    record(new_attempt(run), [(gpu(0), hot), (gpu(1), busy(0.72)), *((gpu(i), busy(0.97)) for i in (2, 3))])
    summary = summarize(run)
    assert [i.uuid for i in summary.insights if i.code == "imbalance"] == ["GPU-n1-1"]
    table = gpu_table.render_gpus(summary, 80, terminal.UNICODE)[0]
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(table)
    rows = console.file.getvalue().splitlines()[1:]  # type: ignore[attr-defined]
    assert "\x1b[1;31m 72%" in rows[1], "above the limit for green, but the others wait for it"
    assert "\x1b[1;32m 90%" in rows[0] and "\x1b[1;33m84" in rows[0]


def test_healthy_run_has_no_problem_and_ends_with_its_notes(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record(new_attempt(run), [(gpu(0), busy(0.9))])
    text = render_text(summarize(run), 80)
    assert not any(i.severity in ("critical", "warning") for i in summarize(run).insights)
    assert text.startswith("No problem found\n")


def test_failed_run_says_why(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record(new_attempt(run), [(gpu(0), busy(0.9))])
    summary = summarize(run)
    attempts = [replace(summary.attempts[0], reason="rank 3 on n1: CUDA out of memory\x1b[31m")]
    failed = replace(summary, state="failed", attempts=attempts)
    expected = "rank 3 on n1: CUDA out of memory\\x1b[31m"
    assert f"Failed    {expected}\n" in render_text(failed, 80)
    assert ("Failed", expected) in build_summary(failed).rows
    assert "Failed" not in render_text(replace(failed, state="completed"), 80)


def test_attempt_without_a_recording_is_not_called_free_of_problems(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    new_attempt(run)
    assert render_text(summarize(run), 80).startswith("Nothing was recorded\n")
    assert build_summary(summarize(run)).verdict_tone == "warning"


def test_brief_report_has_no_tables(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record(new_attempt(run), [(gpu(i), busy(0.0)) for i in range(8)])
    out = io.StringIO()
    telemetry.show(summarize(run), terminal.make_console(out, 80), brief=True)
    assert "Insights" in out.getvalue() and "GPU utilization" in out.getvalue() and "Over the job" not in out.getvalue()


def test_watched_job_says_once_that_its_training_is_unknown(summary: Summary) -> None:
    text = " ".join(render_text(msgspec.structs.replace(summary, watched=True, training=None), 120).split())
    assert text.count("not recorded: the job was started without clustertrain") == 1
    assert "Where the time went" not in text
