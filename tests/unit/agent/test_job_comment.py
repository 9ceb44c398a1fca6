"""Who keeps the job's comment new."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.agent.job_comment import CommentUpdater, collect_metrics
from clustertrain.run import run_dir
from clustertrain.run.usage.goodput import Goodput
from clustertrain.scheduler.job_comment import CommentMetrics, JobComment, format_comment
from clustertrain.telemetry.report_schema import GpuSummary, Insight, Stats, Summary, Timeline, TimeWindow

WAIT_S = 30.0


class Comment(JobComment):
    """Keeps what it is given."""

    def __init__(self, refuse: bool = False) -> None:
        super().__init__("1")
        self.texts: list[str] = []
        self.came = threading.Semaphore(0)
        self._refuse = refuse

    def update(self, text: str) -> None:
        self.texts.append(text)
        self.refused = self._refuse
        self.came.release()


def test_it_is_updated_again_and_again_and_at_the_end() -> None:
    comment = Comment()
    lines = iter(range(1000))
    commenter = CommentUpdater(comment, lambda: str(next(lines)), first_s=0.0, every_s=0.001)
    commenter.start()
    for _ in range(3):
        assert comment.came.acquire(timeout=WAIT_S)
    commenter.finish(WAIT_S)
    count = len(comment.texts)
    assert comment.texts[:3] == ["0", "1", "2"] and count >= 4
    assert int(comment.texts[-1]) == count - 1


def test_an_attempt_that_ends_before_the_first_has_one() -> None:
    comment = Comment()
    commenter = CommentUpdater(comment, lambda: "line", first_s=1e6)
    commenter.start()
    commenter.finish(WAIT_S)
    assert comment.texts == ["line"]
    CommentUpdater(comment, lambda: "never started").finish(WAIT_S)
    assert comment.texts == ["line"]


def test_a_report_that_cannot_be_read_costs_one_update(capfd: pytest.CaptureFixture[str]) -> None:
    comment = Comment()
    asked = threading.Semaphore(0)
    answers = iter([ValueError("half a file"), "line"])

    def text() -> str:
        asked.release()
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    commenter = CommentUpdater(comment, text, first_s=0.0, every_s=1e6)
    commenter.start()
    assert asked.acquire(timeout=WAIT_S)
    commenter.finish(WAIT_S)
    assert comment.texts == ["line"]
    assert "the job's comment: ValueError: half a file" in capfd.readouterr().err


def test_after_a_refusal_no_report_is_read() -> None:
    comment = Comment(refuse=True)
    read: list[int] = []

    def text() -> str:
        read.append(1)
        return "line"

    commenter = CommentUpdater(comment, text, first_s=0.0, every_s=0.001)
    commenter.start()
    assert comment.came.acquire(timeout=WAIT_S)
    commenter.finish(WAIT_S)
    assert read == [1]


def _stats(mean: float, high: float) -> Stats:
    return Stats(mean, mean, mean, high, high)


def _gpu(uuid: str, **figures: Any) -> GpuSummary:
    missing = ("utilization", "memory_used_gib", "power_w", "energy_j", "energy_source", "temperature_c")
    missing += ("sm_clock_mhz", "memory_clock_mhz")
    known = {"memory_total_gib": 80.0, **dict.fromkeys(missing), **figures}
    return GpuSummary(node="n", uuid=uuid, index=0, name="H100", ranks=[], attempts=[1], samples=1, samples_expected=1,
                      timeline=Timeline(1.0, []), missing={}, **known)  # fmt: skip


def test_the_figures_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    run = run_dir.create_run("gpt")
    run.spec.write_text("version = 1\n")
    attempt = run.attempt(1)
    attempt.events.mkdir(parents=True)
    appender = fsio.JsonlAppender(attempt.events_path("rank-0"))
    appender.append({"t": 1.0, "event": "first_step", "step": 1, "total": 500})
    appender.close()
    run.metrics_path(1).write_text('{"step": 120, "t": 5.0}\n')
    gpus = [
        _gpu("a", utilization=_stats(0.9, 1.0), memory_used_gib=_stats(30.0, 70.0), power_w=_stats(500.0, 700.0)),
        _gpu("b", utilization=_stats(0.1, 1.0), memory_used_gib=_stats(35.0, 40.0)),
        _gpu("c"),
    ]
    insights = [Insight(severity=s, code="x", text="") for s in ("critical", "warning", "info")]
    summary = Summary(run=run.id, job_id="1", window=TimeWindow(None, None), coverage=None, attempts=[], gpus=gpus,
                      hosts=[], insights=insights, goodput=Goodput(ratio=0.75))  # fmt: skip
    figures = collect_metrics(run, summary)
    assert figures == CommentMetrics(run=run.id, step=120, total_steps=500, gpu_utilization=0.5, memory_used_gib=70.0,
                              memory_total_gib=80.0, power_w=500.0, goodput=0.75, insights=2)  # fmt: skip
    assert format_comment(figures).endswith("step=120/500 gpu_util=50% mem=70/80GiB power=500W goodput=75% insights=2")
