"""Parts of logs: the last lines, matching lines, all ranks, and how ranks failed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from clustertrain import clock, fsio
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
    assert call(run.id, "--grep", "(?i)Ü[m]").stdout == "warning: ümlaut\n"
    none = call(run.id, "--grep", "nothing like it")
    assert (none.stdout, none.return_value) == ("", 1)  # as grep
    for pattern in ("(", "x{99999999999999}"):
        assert isinstance(call(run.id, "--grep", pattern).exception, UsageError)


def test_all_ranks_are_printed_by_rank(run: RunDir) -> None:
    lines = call(run.id, "--all-ranks", "--grep", "ten|3$").stdout.splitlines()
    assert lines == ["[rank-0] step 1  loss 3", "[rank-1] step 1  loss 3", "[rank-10] ten"]


def test_last_lines_are_those_of_each_rank(run: RunDir) -> None:
    lines = call(run.id, "--all-ranks", "-n", "1").stdout.splitlines()
    assert lines == ["[rank-0] the end", "[rank-1] step 1  loss 3", "[rank-10] ten"]


def test_progress_bar_does_not_hold_back_lines(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.attempt(1).rank_log(0).write_bytes(b"start\r\n 1%\r 2%\r 3%")
    for chunk in (1, 2, 1 << 16):
        monkeypatch.setattr("clustertrain.cli.logs.CHUNK", chunk)
        assert call(run.id, "-n", "9").stdout_bytes == b"start\r\n 1%\r 2%\r 3%\n"
        assert call(run.id, "--grep", "2|start$").stdout_bytes == b"start\r\n 2%\r"


def test_endless_line_is_split(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustertrain.cli.logs.MAX_LINE_BYTES", 100)
    monkeypatch.setattr("clustertrain.cli.logs.CHUNK", 64)
    run.attempt(1).rank_log(0).write_bytes(b"x" * 1000)
    assert call(run.id, "--grep", "x").stdout.strip() == "x" * 1000


def test_missing_rank_and_attempt_are_named(run: RunDir) -> None:
    assert "rank 99 of" in str(call(run.id, "--rank", "99", "--grep", "x").exception)
    assert "has no attempt 7: it has 1" in str(call(run.id, "--errors", "--attempt", "7").exception)
    assert isinstance(call(run.id, "--errors", "-n", "5").exception, UsageError)


def test_followed_log_starts_with_the_last_lines(run: RunDir) -> None:
    assert call(run.id, "-f", "-n", "1").stdout == "the end\n"
    assert call(run.id, "-f", "-n", "1", "--grep", "loss").stdout == "step 2  loss nan\n"
    assert call(run.id, "-f", "-n", "0").stdout == ""


def test_last_lines_of_several_attempts_are_counted_together(run: RunDir) -> None:
    run.attempt(2).logs.mkdir(parents=True)
    fsio.write_json(run.attempt(2).record, {"job_id": "local-1", "nodes": ["a", "b"]})
    run.attempt(2).rank_log(0).write_text("resumed\nstep 3\n")
    assert call(run.id, "-n", "1").stdout == "step 3\n"
    assert call(run.id, "-n", "3").stdout == "the end\nresumed\nstep 3\n"
    assert call(run.id, "-n", "2", "--grep", "step").stdout == "step 2  loss nan\nstep 3\n"
    assert call(run.id, "--all-ranks", "-n", "1").stdout.splitlines() == [
        "[rank-1] step 1  loss 3",
        "[rank-10] ten",
        "[rank-0] step 3",
    ]


def test_end_of_a_long_log_is_read_without_the_rest(run: RunDir) -> None:
    with run.attempt(1).rank_log(0).open("wb") as f:
        f.truncate(1 << 34)  # 16 GiB that take no space
        f.seek(0, 2)
        f.write(b"\none\ntwo\n")
    assert call(run.id, "-n", "2").stdout == "one\ntwo\n"


def test_lines_since_a_time(run: RunDir) -> None:
    now = clock.now()
    lines = [
        f"{time.strftime('%H:%M:%S', time.localtime(now - s))}  step {i}\n" for i, s in enumerate((7300, 3000, 60))
    ]
    run.attempt(1).rank_log(0).write_text("start\n" + "  more\n".join(lines))
    assert call(run.id, "--since", "1h").stdout == f"{lines[1]}  more\n{lines[2]}"
    assert call(run.id, "--since", "10m").stdout == lines[2]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - 3001))
    assert call(run.id, "--since", at, "-n", "1").stdout == lines[2]
    assert call(run.id, "--since", "1d").stdout.startswith("start\n")
    late = call(run.id, "--since", "5s")
    assert (late.stdout, late.return_value) == ("", 0) and "no lines since 5s" in late.stderr
    untimed = call(run.id, "--rank", "1", "--since", "10m")
    assert untimed.stdout == "step 1  loss 3\n" and "rank-1.log begin with no time" in untimed.stderr


@pytest.mark.parametrize("text", ["soon", "25:99", "2026-13-01", "-5m", "0", "2999-01-01", ""])
def test_no_time_is_a_usage_error(run: RunDir, text: str) -> None:
    assert isinstance(call(run.id, "--since", text).exception, UsageError)


def test_errors_begin_with_the_rank_that_explains_the_others(run: RunDir) -> None:
    lost = {"type": "DistBackendError", "message": "peer is gone", "traceback": "Traceback\n  gone\n"}
    run.attempt(1).results.mkdir()
    cause = {"type": "ValueError", "message": "no column \x1b[31m", "traceback": "Traceback\n  line 3\nValueError\n"}
    for node, rank, kind, error in (("a", 0, "communication", lost), ("b", 1, "error", cause)):
        rank_result = {"rank": rank, "ending": "failed", "kind": kind, "error": error}
        result = {"node": node, "ending": "failed", "kind": kind, "ranks": [rank_result]}
        fsio.write_json(run.attempt(1).result_path(node), result)
    lines = call(run.id, "--errors").stdout.splitlines()
    assert lines[:4] == [r"rank 1 on b: ValueError: no column \x1b[31m", "  Traceback", "    line 3", "  ValueError"]
    assert lines[4] == f"  log: {run.attempt(1).rank_log(1)}"
    assert lines[5] == "rank 0 on a: DistBackendError: peer is gone" and len(lines) == 7


def test_failure_of_torchrun_is_that_of_the_node(run: RunDir) -> None:
    run.attempt(1).results.mkdir()
    (run.attempt(1).logs / "agent-a.log").write_text("Traceback\n 10%\r 20%\rModuleNotFoundError: no torch\n")
    rank = {"rank": 0, "ending": "failed", "kind": "killed"}
    message = "torchrun on a failed: ModuleNotFoundError: no torch\nand more"
    result = {"node": "a", "ending": "failed", "kind": "launcher", "message": message, "ranks": [rank]}
    fsio.write_json(run.attempt(1).result_path("a"), result)
    lines = call(run.id, "--errors").stdout.splitlines()
    assert lines[0] == "torchrun on a: torchrun on a failed: ModuleNotFoundError: no torch"
    assert lines[1:3] == ["  Traceback", "  ModuleNotFoundError: no torch"] and lines[3].endswith("agent-a.log")


def test_run_without_failures_has_no_errors(run: RunDir) -> None:
    result = call(run.id, "--errors")
    assert result.return_value == 1 and "no rank of attempt 1 of" in result.stderr
    assert isinstance(call(run.id, "--errors", "--job").exception, UsageError)
