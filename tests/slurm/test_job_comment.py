"""The line of figures in the comment of a real job: in the queue while it runs, in accounting afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clustertrain.scheduler.job_comment import CommentMetrics, JobComment, format_comment

pytestmark = pytest.mark.slurm
FIRST = format_comment(CommentMetrics(run="gpt-abc123", step=1, total_steps=10, gpu_utilization=0.5, insights=0))
LAST = format_comment(
    CommentMetrics(run="gpt-abc123", step=10, total_steps=10, gpu_utilization=0.875, power_w=480.0, insights=1)
)


def test_squeue_and_sacct_show_it_behind_the_users_own(
    cluster: Any, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    mine, plain = submit("sleep 300", "--comment=for the paper"), submit("sleep 300")
    for job in (mine, plain):
        cluster.wait_for(lambda job=job: cluster.job_states(job) == ["RUNNING"], 60, f"the start of job {job}")
    told: list[str] = []
    for line in (FIRST, LAST):
        for job in (mine, plain):
            comment = JobComment(job, lambda name, **fields: told.append(fields["reason"]))
            comment.update(line)
        shown = cluster.run("squeue", "-h", "-j", f"{mine},{plain}", "-S", "i", "-o", "%k").stdout.splitlines()
        assert (shown, told) == ([f"for the paper | {line}", line], [])
    cluster.run("scancel", mine, plain)
    for job, said in ((mine, f"for the paper | {LAST}"), (plain, LAST)):
        query = ("sacct", "-X", "-n", "-P", "-j", job, "-o", "comment")
        cluster.wait_for(lambda q=query, s=said: cluster.run(*q).stdout.strip() == s, 60, f"{said} in accounting")
    JobComment(mine, lambda name, **fields: told.append(fields["reason"])).update(LAST)
    assert told == []  # a job that has ended refuses nothing
