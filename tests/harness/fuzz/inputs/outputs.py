"""Output streams: a reader that leaves, a full disk, an encoding without most characters, a closed stream."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from clustertrain import fsio
from clustertrain.run.run_dir import RunDir
from tests.harness.fuzz.inputs.commands import FILES, RUN
from tests.harness.fuzz.inputs.run_files import READERS, checkpointed_run, fresh_run, full_run
from tests.harness.fuzz.judge import Fault, FaultFound
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import CallResult, Sandbox

# Only UTF-8 can encode all of it.
TEXT = "müde 漢字 🙂 \u2028 \x9b31m"
FILES_READ = (
    ("plan", "recipe.toml"),
    ("submit", "--dry-run", "--backend", "local", "recipe.toml"),
    ("submit", "--dry-run", "--backend", "slurm", f"--env=TEXT={TEXT}", "recipe.toml"),
    ("cluster", "list"),
    ("cluster", "show", "generic"),
    ("checkpoint", "list", RUN),
    ("checkpoint", "diff", f"{RUN}@1", f"{RUN}@2"),
    ("telemetry", RUN, "--csv", "-"),
    ("top", RUN, "--once"),
    ("status", TEXT),
)
HELP = (("--help",), ("status", "--help"), ("submit", "--help"), ("plan", "--help"), ("checkpoint", "--help"))
CALLS = (*READERS, *FILES_READ, *((*words, "--json") for words in FILES_READ), *HELP)
FAILURES = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
ENCODINGS = ("ascii", "latin-1", "cp1252", "koi8-r")
Output = tuple[str, Any]
DEVNULL = Path(os.devnull).stat().st_rdev


class Failing(io.FileIO):
    """Stream that fails after ``room`` bytes, like a closed pipe or a full disk, unless dup2 redirects it."""

    def __init__(self, room: int, number: int) -> None:
        super().__init__(os.devnull if room < 0 else "/dev/full", "w")
        self.room, self.number = room, number
        self.written = bytearray()
        self.lost = False

    def write(self, data: Any) -> int:
        data = bytes(data)
        if self.room >= 0 and os.fstat(self.fileno()).st_rdev != DEVNULL:
            data = data[: self.room - len(self.written)]
            if not data:
                self.lost = True
                raise OSError(self.number, os.strerror(self.number))
        self.written += data
        return len(data)


def outputs() -> SearchStrategy[tuple[tuple[str, ...], Output, Output, bool, str]]:
    """Draw a call, its two streams, whether Python buffers them, and COLUMNS."""
    room = st.sampled_from((0, 0, 1, 100)) | st.integers(0, 20_000)
    failing = st.tuples(st.sampled_from(FAILURES), room).map(lambda f: ("failing", f))
    encoding = st.sampled_from(ENCODINGS).map(lambda name: ("encoding", name))
    utf8 = st.just(("encoding", "utf-8"))
    stdout: SearchStrategy[Output] = st.one_of(failing, encoding, utf8, st.just(("closed", None)))
    stderr: SearchStrategy[Output] = st.one_of(utf8, utf8, stdout)
    columns = st.sampled_from(("100", "100", "1", "0", "100000", "-1", ""))
    return st.tuples(st.sampled_from(CALLS), stdout, stderr, st.booleans(), columns)


def play(box: Sandbox, drawn: tuple[tuple[str, ...], Output, Output, bool, str]) -> None:
    argv, to_stdout, to_stderr, buffered, columns = drawn
    _prepare(box)
    out, stdout = _stream(to_stdout, "strict", buffered)
    err, stderr = _stream(to_stderr, "backslashreplace", buffered)
    with mock.patch.dict(os.environ, COLUMNS=columns):
        code = box.run(argv, None if to_stdout[0] == "closed" else stdout, None if to_stderr[0] == "closed" else stderr)
    for stream in (stdout, stderr):
        _flush(stream, argv)
    result = CallResult(
        code, out.written.decode(stdout.encoding, "replace"), err.written.decode(stderr.encoding, "replace")
    )
    _judge(box, argv, result, out, whole_stderr=to_stderr[0] != "closed" and not err.lost)


def _stream(output: Output, errors: str, buffered: bool) -> tuple[Failing, io.TextIOWrapper]:
    kind, parameters = output
    room, number, encoding = (
        (parameters[1], parameters[0], "utf-8") if kind == "failing" else (-1, 0, parameters or "utf-8")
    )
    raw = Failing(room, number)
    return raw, io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, write_through=not buffered)


def _flush(stream: io.TextIOWrapper, argv: tuple[str, ...]) -> None:
    """Flush as Python does at exit, which fails with exit status 120."""
    try:
        stream.flush()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise FaultFound(Fault("exit", f"{argv[0]} {e.strerror}", "Python's last flush fails: exit status 120")) from e


def _judge(box: Sandbox, argv: tuple[str, ...], result: CallResult, out: Failing, *, whole_stderr: bool) -> None:
    if result.code != 2 or whole_stderr:
        box.judge(argv, result, terminal_safe=True)
    disk_full = out.lost and out.number != errno.EPIPE
    if disk_full and (result.code == 0 or (whole_stderr and not result.err.strip())):
        raise FaultFound(Fault("lost", argv[0], f"output was lost, exit status {result.code}, stderr: {result.err!r}"))
    if not out.lost and result.code == 0 and result.out and "--json" in argv and "--csv" not in argv:
        try:
            json.loads(result.out)
        except ValueError as e:
            raise FaultFound(Fault("json", argv[0], f"{e}: {result.out[:2000]}")) from e


def run_with_odd_text(box: Sandbox) -> RunDir:
    """Return a run with checkpoints whose files contain text that few encodings can represent."""
    run = full_run(box)
    moved = run.path.rename(box.root / "moved")
    (checkpointed_run(box).path / "checkpoints").rename(moved / "checkpoints")
    shutil.rmtree(run.path)
    moved.rename(run.path)
    log = fsio.JsonlAppender(run.attempt(1).events_path("agent-a"))
    log.append({"t": time.time(), "event": "signal", "source": TEXT}, {"t": time.time(), "event": TEXT})
    log.close()
    run.attempt(1).rank_log(0).write_text(f"{TEXT}\n")
    return run


def _prepare(box: Sandbox) -> None:
    for name, text in FILES.items():
        (box.site / name).write_text(text)
    if not (box.home / "runs" / RUN).exists():
        fresh_run(box, run_with_odd_text)


CLASSES = (InputClass("outputs", outputs, play, 60),)
