"""Reports on silent nodes, damaged files and disabled telemetry."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.telemetry.analysis.summarize import SummaryRequest, summarize
from clustertrain.telemetry.report_schema import Insight, Summary
from clustertrain.telemetry.store import jsonl_blocks, totals
from clustertrain.telemetry.store.writer import Writer
from tests.unit.telemetry.runs import T0, busy, event, gpu, new_attempt, new_run, record


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


def find_note(summary: Summary, code: str) -> Insight:
    (insight,) = (n for n in summary.insights if n.code == code)
    return insight


def warning_codes(summary: Summary) -> list[str]:
    return [n.code for n in summary.insights if n.severity != "info"]


def two_nodes(run: RunDir, monkeypatch: pytest.MonkeyPatch, *, killed: bool) -> AttemptDir:
    """Record 100 s on two nodes; the agent of n2 ends, or is killed, after 20 s."""
    attempt = new_attempt(run, nodes=("n1", "n2"))
    record(attempt, [(gpu(0), busy())], ended=100.0)
    if killed:
        monkeypatch.setattr(Writer, "end", lambda self, d, reason=None: None)
    record(attempt, [(gpu(0, node="n2"), busy())], node="n2", seconds=20 if killed else 100)
    return attempt


def test_missing_agent_lowers_coverage(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    two_nodes(run, monkeypatch, killed=True)
    summary = summarize(run)
    assert [(g.node, g.samples, g.samples_expected) for g in summary.gpus] == [("n1", 100, 101), ("n2", 20, 101)]
    assert summary.coverage == pytest.approx(0.594, abs=0.001)
    insight = find_note(summary, "agent_gone")
    assert (insight.severity, insight.node) == ("critical", "n2")
    assert "was silent for the last 81 s" in insight.text
    assert warning_codes(summary) == ["agent_gone"]


def test_ended_node_is_not_silent(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = two_nodes(run, monkeypatch, killed=False)
    event(attempt, "ended", "n1", T0 + 400, ending="completed", reason="all ranks completed")
    assert warning_codes(summarize(run)) == []


def test_disabled_telemetry_gives_no_warning(run: RunDir) -> None:
    run.spec.write_text("version = 1\n[recipe.telemetry]\nenabled = false\n")
    attempt = new_attempt(run)
    event(attempt, "agent_started", "n1", T0, gpus=[])
    event(attempt, "ranks_ended", "n1", T0 + 60, ending="completed", exit_code=0)
    summary = summarize(run)
    assert (summary.enabled, summary.coverage) == (False, None)
    assert "the recipe disables telemetry" in find_note(summary, "no_telemetry").text
    assert warning_codes(summary) == []


def record_segment(run: RunDir) -> Path:
    record(new_attempt(run), [(gpu(0), busy())], ended=99.0)
    return run.attempt(1).telemetry / "n1" / "0"


def test_truncated_samples_are_reported(run: RunDir) -> None:
    samples = record_segment(run) / jsonl_blocks.NAME
    samples.write_bytes(samples.read_bytes()[:-200])
    summary = summarize(run)
    assert summary.gpus[0].utilization is not None
    assert "truncated or damaged, only 0 of 100 readable" in find_note(summary, "unreadable").text


def test_damaged_totals_are_rebuilt(run: RunDir) -> None:
    (record_segment(run) / totals.NAME).write_bytes(b"garbage")
    summary = summarize(run)
    assert summary.gpus[0].samples == 100
    assert summary.read_errors == []


def test_garbage_segment_is_reported(run: RunDir) -> None:
    folder = record_segment(run)
    for name in (totals.NAME, jsonl_blocks.NAME):
        (folder / name).write_bytes(b"garbage" * 100)
    summary = summarize(run)
    assert summary.gpus[0].samples == 0
    insight = find_note(summary, "unreadable")
    assert "samples: damaged" in insight.text
    assert "share" not in (insight.fix or "")


def test_unreadable_node_is_not_called_empty(run: RunDir) -> None:
    folder = record_segment(run)
    event(run.attempt(1), "agent_started", "n1", T0, gpus=[])
    (folder / "header.json").write_text("{")
    assert warning_codes(summarize(run)) == ["unreadable"]


def test_zero_errors_are_not_missing(run: RunDir) -> None:
    record(new_attempt(run), [(gpu(0), busy())], seconds=5, constants={"gpu0.ecc_corrected": 0.0})
    (entry,) = summarize(run).gpus
    assert entry.errors.ecc_corrected == 0
    assert "ecc_corrected" not in entry.missing


@pytest.mark.parametrize("since_s", [5.0, 50.0, 99.0])
def test_limited_complete_record_has_full_coverage(run: RunDir, since_s: float) -> None:
    record(new_attempt(run), [(gpu(0), busy())], ended=99.0)
    assert summarize(run, SummaryRequest(since_s=since_s)).coverage == 1.0


def test_single_member_file_is_standard_gzip(run: RunDir) -> None:
    samples = record_segment(run) / jsonl_blocks.NAME
    assert b'"samples"' in gzip.decompress(samples.read_bytes())
