"""``watch`` as a command, and the verbs that refuse a watched run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain.cli.main import main
from clustertrain.run import lookup
from tests.unit.watch.cluster import JOB, FakeCluster
from tests.unit.watch.conftest import fake_cluster

__all__ = ["fake_cluster"]
pytestmark = pytest.mark.long


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
    code = main()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_report_as_json_and_page_and_the_verbs_after_it(
    fake_cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    code, out, err = call(monkeypatch, capsys, "watch", JOB, "--json", "--html", str(page))
    assert code == 0, err
    report = json.loads(out)
    (run,) = lookup.list_runs()
    assert (report["run"], report["watched"], len(report["gpus"])) == (run.id, True, 4)
    assert f"left job {JOB}; recorded as run {run.id}" in err
    text = page.read_text()
    assert "the job was started without clustertrain" in text and "Where the time went" not in text
    for verb, fix in (
        ("cancel", f"scancel {JOB} ends the job itself"),
        ("requeue", f"scontrol requeue {JOB} starts the job itself again"),
        ("rerun", "submit its program: clustertrain submit -- COMMAND"),
    ):
        code, _, err = call(monkeypatch, capsys, verb, JOB)
        assert code == 2 and fix in err and "was started without clustertrain" in err
    assert fake_cluster.slurm.calls("scancel") == []
    code, _, err = call(monkeypatch, capsys, "rm", JOB, "--yes")
    assert f"it is running; `scancel {JOB}` ends it" in err
    code, out, _ = call(monkeypatch, capsys, "status", JOB)
    assert code == 0 and "not recorded: the job was started without clustertrain" in out and "/home/amy/train.sh" in out
    code, out, _ = call(monkeypatch, capsys, "list")
    assert code == 0 and run.id in out and "running" in out


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_pending_job_with_once_is_an_error(
    fake_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    fake_cluster.set_job("PENDING", reason="Priority")
    code, _, err = call(monkeypatch, capsys, "watch", JOB, option)
    assert code == 1 and "job 7 is pending: Priority" in err and "without --once" in err
    assert not (fake_cluster.home / "runs").exists()


def test_bad_arguments(
    fake_cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, words in (
        (("watch", "x"), "is not the id of a Slurm job"),
        (("watch", JOB, "--html", "-"), "cannot go to standard output"),
        (("watch", JOB, "--html", str(tmp_path / "no" / "page.html")), "page.html"),
        (("watch", JOB, "--interval", "0"), "not in the range"),
    ):
        code, _, err = call(monkeypatch, capsys, *args)
        assert code != 0 and words in err, err
    assert not (fake_cluster.home / "runs").exists()


def test_closed_pipe_leaves_no_sampler(fake_cluster: FakeCluster) -> None:
    """`watch | head -1`: the command notices when it writes, and its samplers leave with it."""
    command = f"{sys.executable} -m clustertrain watch {JOB} --once | head -1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, env=os.environ, check=False
    )
    assert done.stdout and "Traceback" not in done.stderr
