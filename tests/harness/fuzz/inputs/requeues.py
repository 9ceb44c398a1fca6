"""`requeue` of runs in any state, with hostile options, files and job ids, next to a run that must not change."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from clustertrain import fsio
from clustertrain.run.run_dir import RunDir
from clustertrain.submit import continue_run
from tests.harness.fuzz.inputs.commands import RUN
from tests.harness.fuzz.inputs.run_files import NEIGHBOR, Change, changes, damage
from tests.harness.fuzz.inputs.text import arguments
from tests.harness.fuzz.judge import Fault, FaultFound
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import CallResult, Sandbox
from tests.unit.report.live_runs import begin, new_run

OPTIONS = ("time", "exclude", "nodelist", "partition", "qos", "account")
STATES = ("silent", "failed", "cancelled", "completed", "running", "asked", "pending")
NEIGHBOR_JOB_ID = "4713"
JOB_IDS = (
    NEIGHBOR_JOB_ID,
    f"{NEIGHBOR_JOB_ID}_1",
    "--wrap=true",
    "4711 --all",
    "../x",
    "",
    "0",
    "9" * 30,
    "local-1",
    "4711;",
)
CLAIMS = ("1.json", "01.json", "-5.json", "٣.json", f"{'9' * 30}.json", "x", ".json", "7.json.tmp")
CLAIM = '{"user": "x", "host": "far", "pid": 1, "created": 1.0, "t": 1.0, "job_id": "4711"}'
OUTCOMES = (
    "echo 4720",
    "echo 4720",
    "echo 4720",
    "echo sbatch: error: Invalid qos >&2; exit 1",
    "echo '--x'",
    "exit 1",
)
# Logs its arguments, each terminated by NUL.
LOGGING_COMMAND = """#!/bin/sh
[ "$1" = --version ] && echo slurm-wlm 22.05.8 && exit 0
printf '%s\\0' {name} "$@" >> {log}
{outcome}
"""
Drawn = tuple[str, dict[str, str], str, list[str], list[tuple[int, Change]], str]


def requests() -> SearchStrategy[Drawn]:
    value = arguments() | st.sampled_from(("1:00", "n[1-4]", "gpu", "--wrap=true", "a --wrap=true", "UNLIMITED"))
    options = st.dictionaries(st.sampled_from(OPTIONS), value, max_size=2)
    job_id = st.just("4711") | st.sampled_from(JOB_IDS)
    claims = st.lists(st.sampled_from(CLAIMS), max_size=2, unique=True)
    damages = st.lists(st.tuples(st.integers(0, 500), changes()), max_size=2)
    return st.tuples(st.sampled_from(STATES), options, job_id, claims, damages, st.sampled_from(OUTCOMES))


def play(box: Sandbox, drawn: Drawn) -> None:
    state, options, job_id, claims, damages, outcome = drawn
    log = _slurm(box, state, outcome)
    neighbor = _run(box, NEIGHBOR, NEIGHBOR_JOB_ID, "silent")
    before = contents(neighbor.path)
    run = _run(box, RUN, job_id, state)
    if claims:
        (run.path / "continued").mkdir()
    for name in claims:
        (run.path / "continued" / name).write_text(CLAIM)
    files = sorted(p for p in run.path.rglob("*") if p.is_file())
    for file_number, change_drawn in damages:
        path = files[file_number % len(files)]
        if path.is_file() and not path.is_symlink():
            damage(box, path, change_drawn)
    readable = box.call(("status", RUN)).code == 0
    log.unlink(missing_ok=True)
    with (
        mock.patch.object(continue_run, "ANSWER_TIMEOUT_S", 0.0),
        mock.patch.object(continue_run, "WRITE_TIMEOUT_S", 0.0),
    ):
        result = box.call(("requeue", RUN, *(f"--{name}={value}" for name, value in options.items())))
    argv = log.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1] if log.exists() else []
    _judge(run, result, argv, {name: box.arm(value) for name, value in options.items()}, accepted="4720" in outcome)
    if contents(neighbor.path) != before:
        raise FaultFound(Fault("neighbor", "requeue", "changed the files of another run"))
    if readable and box.call(("status", RUN)).code != 0:
        raise FaultFound(Fault("hidden", "requeue", "status could read the run only before the requeue"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _judge(run: RunDir, result: CallResult, argv: list[str], options: dict[str, str], *, accepted: bool) -> None:
    if any(word.partition("_")[0] == NEIGHBOR_JOB_ID for word in argv if "sbatch" not in argv):
        raise FaultFound(Fault("neighbor", "requeue", f"names the job of another run: {argv}"))
    if "sbatch" not in argv:
        return
    allowed = tuple(f"--{name}=" for name in OPTIONS)
    unexpected = [w for w in argv[3:-1] if not w.startswith(allowed)]
    head = ["sbatch", "--parsable", f"--chdir={run.path}"]
    if argv[:3] != head or unexpected or not argv[-1].startswith(str(run.path)):
        raise FaultFound(Fault("argv", "sbatch", f"{argv}"))
    for name, value in options.items():
        passed = [w.partition("=")[2] for w in argv if w.startswith(f"--{name}=")]
        matches = [v for v in passed if v == value or (name == "exclude" and value in v)]
        if value and len(matches) != 1:
            raise FaultFound(Fault("argv", f"--{name}", f"the user typed {value!r}, sbatch got {passed}"))
    if accepted and result.code != 0:
        raise FaultFound(Fault("argv", "refused", f"the command failed but submitted a job: {result.err}"))


def _slurm(box: Sandbox, state: str, outcome: str) -> Path:
    job = {"running": "RUNNING", "asked": "RUNNING", "pending": "PENDING"}.get(state)
    line = f"4711|{job}|1|10|20|N/A|a|None|\n" if job else ""
    box.answer({"squeue": line.encode()}, b"", 0)
    log = box.root / "called"
    for name in ("sbatch", "scancel", "scontrol"):
        text = LOGGING_COMMAND.format(name=name, log=log, outcome=outcome if name == "sbatch" else "exit 1")
        (box.root / "bin" / name).write_text(text)
    return log


def _run(box: Sandbox, name: str, job_id: str, state: str) -> RunDir:
    shutil.rmtree(box.home / "runs" / name, ignore_errors=True)
    now = time.time()
    run = new_run(box.home, now, name=name, spec='[job]\nbackend = "slurm"\n')
    begin(run, now - 60, ["a"], steps=20)
    attempt = run.attempt(1)
    fsio.write_json(attempt.record, {"job_id": job_id, "restart": 0, "nodes": ["a"], "host": "a", "t": now - 120})
    submitted = fsio.JsonlAppender(run.events / "submit.jsonl")
    submitted.append({"t": now - 4000, "event": "submitted", "job_id": job_id, "backend": "slurm"})
    submitted.close()
    (run.path / "job.sh").write_text("#!/bin/bash\n#SBATCH --time=1:00\n")
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    if state in ("failed", "completed"):
        log.append({"t": now - 50, "event": "ended", "ending": "failed" if state == "failed" else "completed"})
        log.append({"t": now - 50, "event": "stopped", "reason": "it broke"})
    elif state == "cancelled":
        fsio.write_json(run.cancel_marker, {"t": now - 50, "user": "x"})
    elif state == "asked":
        fsio.write_json(
            attempt.requeue_request, {"options": {"time": "1:00"}, "user": "x", "host": "far", "pid": 1, "t": now}
        )
        log.append({"t": now, "event": "requeue_answered", "accepted": True})
    log.close()
    return run


CLASSES = (InputClass("requeues", requests, play, 300),)
