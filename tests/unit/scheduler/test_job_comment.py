"""The line in the job's comment, against stand-ins of Slurm's commands. tests/slurm asks Slurm itself."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.errors import CommandFailed, SchedulerError
from clustertrain.scheduler import slurm
from clustertrain.scheduler.job_comment import (
    MAX_COMMENT_CHARS,
    CommentMetrics,
    JobComment,
    append_to_comment,
    format_comment,
)
from tests.fakes.slurm.fixture import FakeSlurm

ALL = CommentMetrics(
    run="gpt-abc123",
    step=1200,
    total_steps=10000,
    gpu_utilization=0.874,
    memory_used_gib=61.2,
    memory_total_gib=79.6,
    power_w=480.4,
    goodput=0.93,
    insights=1,
)
LINE = "clustertrain run=gpt-abc123 step=1200/10000 gpu_util=87% mem=61/80GiB power=480W goodput=93% insights=1"


def test_the_line() -> None:
    assert format_comment(ALL) == LINE
    assert format_comment(CommentMetrics(run="r-abcdef")) == "clustertrain run=r-abcdef"
    assert format_comment(CommentMetrics(run="r", step=3, memory_used_gib=1.0)) == "clustertrain run=r step=3 mem=1GiB"


def test_a_zero_is_said() -> None:
    line = format_comment(CommentMetrics(run="r", step=0, gpu_utilization=0.0, power_w=0.0, goodput=0.0, insights=0))
    assert line == "clustertrain run=r step=0 gpu_util=0% power=0W goodput=0% insights=0"


def test_it_is_short_and_plain() -> None:
    huge = CommentMetrics(run="r" * 47, step=10**12, total_steps=10**12, gpu_utilization=1.0, memory_used_gib=1e4,
                   memory_total_gib=1e4, power_w=1e5, goodput=1.0, insights=1000)  # fmt: skip
    assert format_comment(huge).endswith("insights=1000")  # nothing is cut
    assert len(format_comment(CommentMetrics(run="r" * 300))) == MAX_COMMENT_CHARS < 200
    assert not set("\"'`$\\\n|") & set(format_comment(huge))


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("", LINE),
        ("clustertrain run=gpt-abc123 step=1", LINE),
        ("for the paper", f"for the paper | {LINE}"),
        ("for the paper | clustertrain run=gpt-abc123 step=1", f"for the paper | {LINE}"),
        ("a | b", f"a | b | {LINE}"),
        ("clustertrain is great", f"clustertrain is great | {LINE}"),
    ],
)
def test_what_the_user_wrote_stays(now: str, then: str) -> None:
    assert append_to_comment(now, LINE) == then
    assert append_to_comment(then, LINE) == then  # again, and again


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))


def test_it_is_put_behind_the_users_own(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")
    fake_slurm.answers("squeue", stdout="it's $(mine)\n")
    JobComment("12_3").update(LINE)
    (asked,), (call,) = fake_slurm.calls("squeue"), fake_slurm.calls("scontrol")
    assert asked.argv == ["--noheader", "--jobs=12_3", "--format=%k"] and "SQUEUE_FORMAT" not in asked.env
    assert call.argv == ["update", "JobId=12_3", f"Comment=it's $(mine) | {LINE}"]


def test_a_job_without_a_comment(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answers("squeue", stdout="(null)\n")
    JobComment("12").update(LINE)
    assert fake_slurm.calls("scontrol")[0].argv[-1] == f"Comment={LINE}"


def test_a_site_that_forbids_it_is_asked_once(fake_slurm: FakeSlurm) -> None:
    told = Told()
    comment = JobComment("12", told)
    fake_slurm.answers("squeue", stdout="(null)\n")
    fake_slurm.answers("scontrol", stderr="Access/permission denied for job 12\nslurm_update error: …\n", rc=1)
    for _ in range(3):
        comment.update(LINE)
    assert len(fake_slurm.calls("scontrol")) == 1 and comment.refused
    ((name, fields),) = told.events
    assert name == "comment_refused" and "Access/permission denied" in fields["reason"]


@pytest.mark.parametrize(
    "said",
    [
        "slurm_update error: Unable to contact slurm controller (connect failure)",
        "slurm_update error: Job/step already completing or completed",
        "slurm_update error: Invalid job id specified",
    ],
)
def test_no_answer_and_a_job_that_has_ended_are_no_refusal(said: str, fake_slurm: FakeSlurm) -> None:
    told = Told()
    comment = JobComment("12", told)
    fake_slurm.answers("squeue", stdout="(null)\n")
    fake_slurm.answers("scontrol", stderr=f"{said}\n", rc=1)
    for _ in range(2):
        comment.update(LINE)
    assert len(fake_slurm.calls("scontrol")) == 2 and not comment.refused and told.events == []


@pytest.mark.parametrize(("stdout", "rc"), [("", 1), ("", 0)])
def test_a_comment_that_was_not_read_is_not_replaced(stdout: str, rc: int, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answers("squeue", stdout=stdout, stderr="slurm_load_jobs error: Socket timed out\n", rc=rc)
    JobComment("12").update(LINE)
    assert fake_slurm.calls("scontrol") == []
    with pytest.raises(CommandFailed, match="squeue does not list job 12"):
        slurm.get_comment("12")


def test_not_every_text_is_a_job_id(fake_slurm: FakeSlurm) -> None:
    for bad in ("", "12;rm", "all"):
        with pytest.raises(SchedulerError, match="not a Slurm job id"):
            slurm.set_comment(bad, LINE)
    assert fake_slurm.calls("scontrol") == []
