"""Files of a run, its telemetry and its checkpoints, damaged; every command that reads them."""

from __future__ import annotations

import contextlib
import functools
import gzip
import math
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from clustertrain import fsio
from clustertrain.run.folder import RunDir
from tests.fuzz.inputs.commands import RUN, finished_run
from tests.fuzz.inputs.damage import change, json_changed
from tests.fuzz.judge import Fault, FaultFound
from tests.fuzz.play import InputClass
from tests.fuzz.sandbox import Sandbox
from tests.unit.report import live_runs

READERS = (
    ("status", RUN),
    ("status", RUN, "--json"),
    ("list",),
    ("list", "--json"),
    ("logs", RUN),
    ("logs", RUN, "--job"),
    ("telemetry", RUN),
    ("telemetry", RUN, "--json"),
    ("telemetry", RUN, "--html", "page.html"),
    ("telemetry", RUN, "--csv", "-"),
    ("telemetry", "compare", RUN, RUN),
    ("runs", "compare", RUN, RUN),
    ("top", RUN, "--once"),
    ("wait", RUN),
)
CHECKPOINT_READERS = (
    ("checkpoint", "list", RUN),
    ("checkpoint", "list", RUN, "--json"),
    ("checkpoint", "verify", RUN),
    ("checkpoint", "diff", f"{RUN}@1", f"{RUN}@2"),
    ("checkpoint", "diff", f"{RUN}@1", f"{RUN}@2", "--json"),
    ("checkpoint", "prune", "--dry-run", "--keep", "1", RUN),
)
# A healthy neighbor: damage in one run never hides another.
NEIGHBOR = "other-zzz222"
Change = tuple[str, Any]
ODD_KINDS = ("fifo", "socket", "folder", "link to itself", "link to zeros", "link outside", "gone", "50 GB", "bomb")


def changes() -> SearchStrategy[Change]:
    return st.one_of(json_changed(), json_changed(), st.tuples(st.just("kind"), st.sampled_from(ODD_KINDS)))


def damage(box: Sandbox, path: Path, how: Change) -> None:
    if how[0] != "kind":
        if path.stat().st_size > 1 << 26:  # damaged before
            return
        path.write_bytes(box.arm_bytes(change(path.read_bytes(), how)))
        return
    path.unlink()
    if how[1] == "fifo":
        os.mkfifo(path)
    elif how[1] == "folder":
        path.mkdir()
    elif how[1] == "link to itself":
        path.symlink_to(path.name)
    elif how[1] == "link to zeros":
        path.symlink_to("/dev/zero")
    elif how[1] == "link outside":
        path.symlink_to(box.outside / "secret")
    elif how[1] == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as s:  # the kernel takes 107 bytes of a path
            s.bind(path.name)
    elif how[1] == "50 GB":
        path.touch()
        os.truncate(path, 50 << 30)
    elif how[1] == "bomb":
        path.write_bytes(bomb())


@functools.cache
def bomb() -> bytes:
    """512 MiB of zeros in a member of gzip."""
    return gzip.compress(bytes(1 << 29), compresslevel=1)


def full_run(box: Sandbox) -> RunDir:
    """A run with a file of every kind that a command reads, but checkpoints."""
    run = finished_run(box)
    live_runs.record(run, "a", time.time() - 60, gpus=2, seconds=20, end=True)
    attempt = run.attempt(1)
    log = fsio.Appender(attempt.events_of("agent-a"))
    log.append(
        {"t": time.time(), "event": "gpu_event", "uuid": "GPU-a-0", "kind": "xid", "xid": 79, "count": 1},
        {"t": time.time(), "event": "profiled", "steps": [3, 5], "path": "profiles/x"},
        {"t": time.time(), "event": "signal", "source": "signal:SIGTERM"},
    )
    log.close()
    run.plan.write_text('{"layout": {"strategy": "ddp"}, "batch": {"micro_batch": 1}, "time": {"step_s": 0.5}}\n')
    run.record.write_text('{"git": {"commit": "abc"}, "packages": {"torch": "2"}}\n')
    (run.path / "job.log").write_text("job\n")
    return run


def checkpointed_run(box: Sandbox) -> RunDir:
    from tests.unit.checkpoint.saved import save, state_of

    run = finished_run(box)
    for step in (1, 2):
        state = state_of(float(step)) | {"metric": {"loss": float(step), "list": [1, "x", None]}}
        save(run.path / "checkpoints", step, state, {"random": [step, math.pi]})
    return run


def player(make: Callable[[Sandbox], RunDir], neighbor_too: bool) -> Callable[[Sandbox, Any], None]:
    def play(box: Sandbox, drawn: tuple[list[tuple[int, Change]], tuple[str, ...]]) -> None:
        damages, words = drawn
        kept = box.root / make.__name__
        if not kept.exists():
            make(box).path.rename(kept)
        folder = box.home / "runs" / RUN
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        for place, how in damages:
            path = files[place % len(files)]
            # `logs` prints all that is there, if it takes an hour.
            endless = words[0] == "logs" and how[1] == "50 GB"
            if path.is_file() and not path.is_symlink() and not endless:
                damage(box, path, how)
        said = box.call(words, terminal_safe=True)
        if neighbor_too and words[0] == "list":
            _neighbor_is_listed(box, said.out)

    return play


def _neighbor_is_listed(box: Sandbox, shown: str) -> None:
    neighbor = box.home / "runs" / NEIGHBOR
    if not neighbor.exists():
        shutil.copytree(box.root / full_run.__name__, neighbor)
    elif NEIGHBOR not in shown:
        raise FaultFound(Fault("hidden", "list", f"{NEIGHBOR} is not in:\n{shown}"))


def damaged(readers: tuple[tuple[str, ...], ...]) -> SearchStrategy[Any]:
    places = st.lists(st.tuples(st.integers(0, 1000), changes()), min_size=1, max_size=2)
    return st.tuples(places, st.sampled_from(readers))


def telemetry_only(box: Sandbox, drawn: tuple[list[tuple[int, Change]], tuple[str, ...]]) -> None:
    """As the run files, but all damage is in the segments."""
    damages, words = drawn
    kept = box.root / full_run.__name__
    if not kept.exists():
        full_run(box).path.rename(kept)
    folder = box.home / "runs" / RUN
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept, folder)
    files = sorted(p for p in folder.glob("attempts/*/telemetry/**/*") if p.is_file())
    for place, how in damages:
        path = files[place % len(files)]
        if path.is_file() and not path.is_symlink():
            damage(box, path, how)
    box.call(words, terminal_safe=True)


TELEMETRY_READERS = tuple(words for words in READERS if words[0] in ("telemetry", "top", "status"))

CLASSES = (
    InputClass("run_files", lambda: damaged(READERS), player(full_run, neighbor_too=True), 40),
    InputClass("segments", lambda: damaged(TELEMETRY_READERS), telemetry_only, 40),
    InputClass("manifests", lambda: damaged(CHECKPOINT_READERS), player(checkpointed_run, neighbor_too=False), 25),
)
