"""Parts of logs: the last lines, matching lines, all ranks, and how ranks failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from clustertrain import fsio
from clustertrain.cli.logs import logs
from clustertrain.errors import UsageError
from clustertrain.run import run_dir
from clustertrain.run.run_dir import RunDir

RANK_0 = "step 1  loss 3\nwarning: ümlaut\nstep 2  loss nan\nthe end"  # without a last newline


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    run = run_dir.create_run("net")
    run.spec.write_text('version = 1\n[job]\nbackend = "local"\n')
    attempt = run.attempt(1)
    attempt.logs.mkdir(parents=True)
    fsio.write_json(attempt.record, {"job_id": "local-1", "nodes": ["a", "b"]})
    attempt.rank_log(0).write_text(RANK_0)
    attempt.rank_log(1).write_text("step 1  loss 3\n")
    attempt.rank_log(10).write_text("ten\n")
    return run


def call(*argv: str) -> Result:
    return CliRunner().invoke(logs, argv, standalone_mode=False)


def test_last_lines(run: RunDir) -> None:
    assert call(run.id, "-n", "2").stdout == "step 2  loss nan\nthe end\n"
    assert call(run.id, "-n", "9").stdout == f"{RANK_0}\n"
    nothing = call(run.id, "-n", "0")
    assert (nothing.stdout, nothing.return_value) == ("", 0)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 16])
def test_lines_that_match(run: RunDir, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("clustertrain.cli.logs.CHUNK", chunk)  # lines are split
    assert call(run.id, "--grep", r"^step \d|ü").stdout == "step 1  loss 3\nwarning: ümlaut\nstep 2  loss nan\n"
    assert call(run.id, "--grep", "loss", "-n", "1").stdout == "step 2  loss nan\n"
    none = call(run.id, "--grep", "nothing like it")
    assert (none.stdout, none.return_value) == ("", 1)  # as grep
    assert isinstance(call(run.id, "--grep", "(").exception, UsageError)


def test_all_ranks_are_printed_by_rank(run: RunDir) -> None:
    lines = call(run.id, "--all-ranks", "--grep", "ten|3$").stdout.splitlines()
    assert lines == ["[rank-0] step 1  loss 3", "[rank-1] step 1  loss 3", "[rank-10] ten"]


def test_followed_log_starts_with_the_last_lines(run: RunDir) -> None:
    assert call(run.id, "-f", "-n", "1").stdout == "step 2  loss nan\nthe end\n"  # its last line is not complete yet


def test_errors_begin_with_the_rank_that_explains_the_others(run: RunDir) -> None:
    lost = {"type": "DistBackendError", "message": "peer is gone", "traceback": "Traceback\n  gone\n"}
    run.attempt(1).results.mkdir()
    cause = {"type": "ValueError", "message": "no column \x1b[31m", "traceback": "Traceback\n  line 3\nValueError\n"}
    for node, rank, kind, error in (("a", 0, "communication", lost), ("b", 1, "user_error", cause)):
        rank_result = {"rank": rank, "ending": "failed", "kind": kind, "error": error}
        result = {"node": node, "ending": "failed", "kind": kind, "ranks": [rank_result]}
        fsio.write_json(run.attempt(1).result_path(node), result)
    lines = call(run.id, "--errors").stdout.splitlines()
    assert lines[:4] == [r"rank 1 on b: ValueError: no column \x1b[31m", "  Traceback", "    line 3", "  ValueError"]
    assert lines[4] == f"  log: {run.attempt(1).rank_log(1)}"
    assert lines[5] == "rank 0 on a: DistBackendError: peer is gone" and len(lines) == 7


def test_run_without_failures_has_no_errors(run: RunDir) -> None:
    result = call(run.id, "--errors")
    assert result.return_value == 1 and "no rank of attempt 1 of" in result.stderr
    assert isinstance(call(run.id, "--errors", "--job").exception, UsageError)
