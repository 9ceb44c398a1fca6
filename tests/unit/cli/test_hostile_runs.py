"""Hostile content in a run folder: it does not reach a terminal, block a command, or hide another run."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.cli.main import main
from clustertrain.run.run_dir import RunDir
from tests.unit.report.live_runs import begin, new_run

pytestmark = pytest.mark.long

OSC_52 = "\x1b]52;c;Y2FuYXJ5\x07"
HOSTILE = f"{OSC_52}\x9b31m\x7f\u202e\ud800"
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
READERS = (
    ("list",),
    ("status", "{}"),
    ("telemetry", "{}"),
    ("top", "{}", "--once"),
    ("list", "--json"),
    ("status", "{}", "--json"),
    ("telemetry", "{}", "--json"),
    ("top", "{}", "--once", "--json"),
)


@dataclass(frozen=True)
class CliOutput:
    code: int
    out: str
    err: str


Call = Callable[..., CliOutput]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Call:
    def run(*args: str) -> CliOutput:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        code = main()
        output = capfdbinary.readouterr()
        return CliOutput(code, output.out.decode(), output.err.decode())

    return run


def make_ended_run(home: Path, name: str, job_id: str) -> RunDir:
    now = time.time()
    run = new_run(home, now, name=name)
    begin(run, now - 60, ["a"], steps=20)
    attempt = run.attempt(1)
    fsio.write_json(attempt.record, {**(fsio.read_json(attempt.record) or {}), "job_id": job_id})
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": now - 50, "event": "ended", "ending": "completed", "last_step": 20})
    log.close()
    attempt.logs.mkdir()
    attempt.rank_log(0).write_text("hello\n")
    return run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    return make_ended_run(tmp_path, "gpt-abc234", "local-1")


@pytest.fixture
def neighbor(run: RunDir, tmp_path: Path) -> RunDir:
    return make_ended_run(tmp_path, "other-zzz222", "local-2")


def deep_event(run: RunDir) -> None:
    with run.attempt(1).events_path("agent-a").open("a") as f:
        f.write('{"t": 1, "event": ' + "[" * 100_000 + "\n")


def deep_row(run: RunDir) -> None:
    with run.metrics_path(1).open("a") as f:
        f.write('{"step": 21, "loss": ' + "[" * 100_000 + "\n")


def huge_step(run: RunDir) -> None:
    with run.metrics_path(1).open("a") as f:
        f.write(f'{{"step": 1{"0" * 400}, "loss": 1{"0" * 400}}}\n')


def other_backend(run: RunDir) -> None:
    """Add a job id that only the other backend can have. It would be in one query with the ids of other runs."""
    log = fsio.JsonlAppender(run.events / "submit-again.jsonl")
    log.append({"t": time.time() - 40, "event": "submitted", "job_id": "local-1", "backend": "slurm"})
    log.close()


def make_fifo(path: Callable[[RunDir], Path]) -> Callable[[RunDir], None]:
    def place(run: RunDir) -> None:
        path(run).unlink(missing_ok=True)
        os.mkfifo(path(run))

    return place


def link_to_zeros(path: Callable[[RunDir], Path]) -> Callable[[RunDir], None]:
    def place(run: RunDir) -> None:
        path(run).unlink(missing_ok=True)
        path(run).symlink_to("/dev/zero")

    return place


DAMAGE = {
    "a deep line of events": deep_event,
    "a deep row": deep_row,
    "a step of 400 digits": huge_step,
    "a job id of the other backend": other_backend,
    "FIFO for events": make_fifo(lambda run: run.attempt(1).events_path("agent-a")),
    "FIFO for attempt.json": make_fifo(lambda run: run.attempt(1).record),
    "FIFO for spec.toml": make_fifo(lambda run: run.spec),
    "FIFO for plan.json": make_fifo(lambda run: run.plan),
    "FIFO for rows": make_fifo(lambda run: run.metrics_path(1)),
    "zeros for events": link_to_zeros(lambda run: run.attempt(1).events_path("agent-a")),
    "zeros for plan.json": link_to_zeros(lambda run: run.plan),
    "zeros for rows": link_to_zeros(lambda run: run.metrics_path(1)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_damage_blocks_no_command_and_hides_no_other_run(
    run: RunDir, neighbor: RunDir, call: Call, damage: Callable[[RunDir], None]
) -> None:
    damage(run)
    for args in READERS:
        output = call(*(arg.format(run.id) for arg in args))
        assert output.code in (0, 1, 78) and "Traceback" not in output.err, (args, output.err)
        if output.code:
            assert run.id in output.err, args
    for args in (("wait", run.id), ("logs", run.id)):
        assert "Traceback" not in call(*args).err
    listed = {row["run"]: row for row in json.loads(call("list", "--json").out)["runs"]}
    assert listed[neighbor.id]["state"] == "completed"
    for name in (neighbor.id, "local-2", "other"):
        assert json.loads(call("status", name, "--json").out)["state"] == "completed"
        assert call("wait", name).code == 0
        assert call("logs", name).out == "hello\n"
        assert "has already ended: completed" in call("cancel", name).err
        assert "has completed" in call("requeue", name).err


@pytest.mark.parametrize("where", ["events", "records", "alert", "folder"])
def test_control_characters_do_not_reach_a_terminal(run: RunDir, call: Call, where: str) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("odd"))
    t = time.time() - 55
    if where == "events":
        log.append({"t": t, "event": "ended", "ending": "failed", "reason": HOSTILE, "last_step": 20})
        log.append({"t": t + 9, "event": "stopped", "reason": HOSTILE})
    elif where == "alert":
        log.append(
            {"t": t, "event": "alert", "code": HOSTILE, "severity": "warning", "state": "raised", "text": HOSTILE,
             "node": HOSTILE, "fix": HOSTILE}
        )  # fmt: skip
    elif where == "records":
        fsio.write_json(run.attempt(1).record, {"nodes": [HOSTILE], "host": HOSTILE, HOSTILE: 1})
        fsio.write_json(run.plan, {"layout": {"strategy": HOSTILE}, HOSTILE: HOSTILE})
    else:
        run.path.rename(run.path.with_name("gpt-\x1b]52;c;Y2FuYXJ5\x07"))
    log.close()
    printed = ""
    for args in READERS:
        output = call(*(arg.format("latest") for arg in args))
        assert CONTROL_CHARACTERS.search(output.out + output.err) is None and "Traceback" not in output.err, (
            args,
            output,
        )
        if "--json" in args and output.code == 0:
            json.loads(output.out)
        printed += output.out + output.err
    assert "52;c;Y2FuYXJ5" in printed


def test_errors_escape_the_files_and_names_they_quote(run: RunDir, call: Call) -> None:
    run.spec.write_text(f'[job]\nname = "{OSC_52}\n')
    for output in (call("status", run.id), call("status", OSC_52), call(OSC_52), call("status", f"--{OSC_52}")):
        assert output.code and "52;c;Y2FuYXJ5" in output.err and CONTROL_CHARACTERS.search(output.err) is None


LOG = b"\x1b[31mred\x1b[0m \x9b\xff m\xc3\xbcde\r 1 %\r 2 %\r\n\x1b]52;c;Y2FuYXJ5\x07\ttab\xc3"
ESCAPED_LOG = "\\x1b[31mred\\x1b[0m \\x9b\\xff müde\r 1 %\r 2 %\r\n\\x1b]52;c;Y2FuYXJ5\\x07\ttab"


def test_logs_are_escaped_unless_raw_is_requested(
    run: RunDir, call: Call, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run.attempt(1).rank_log(0).write_bytes(LOG)
    monkeypatch.setattr("clustertrain.cli.logs.CHUNK", 7)  # splits a character
    assert call("logs", run.id).out == ESCAPED_LOG + "\\xc3"
    assert call("logs", run.id, "-f").out == ESCAPED_LOG + "\\xc3"
    monkeypatch.setattr(sys, "argv", ["clustertrain", "logs", run.id, "--raw"])
    assert main() == 0
    assert capfdbinary.readouterr().out == LOG


def test_raw_logs_are_refused_on_a_terminal(run: RunDir, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    out: Any = sys.stdout
    monkeypatch.setattr(type(out), "isatty", lambda self: True, raising=False)
    output = call("logs", run.id, "--raw")
    assert output.code == 2 and "terminal" in output.err and not output.out
