"""Damaged files of a run, its telemetry and its checkpoints, and every command that reads them."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
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
from clustertrain.run.run_dir import RunDir
from tests.harness.fuzz.inputs.commands import RUN, finished_run
from tests.harness.fuzz.inputs.damage import change, json_changes
from tests.harness.fuzz.judge import Fault, FaultFound
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import Sandbox
from tests.unit.report import live_runs

# A sound run: damage to another run must never hide it.
NEIGHBOR = "other-zzz222"
SWEEP = "grid-swp234"  # contains both runs
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
    ("compare", RUN, NEIGHBOR),
    ("top", RUN, "--once"),
    ("wait", RUN),
    ("sweep", "show", SWEEP),
    ("sweep", "show", SWEEP, "--json"),
)
CHECKPOINT_READERS = (
    ("checkpoint", "list", RUN),
    ("checkpoint", "list", RUN, "--json"),
    ("checkpoint", "verify", RUN),
    ("checkpoint", "diff", f"{RUN}@1", f"{RUN}@2"),
    ("checkpoint", "diff", f"{RUN}@1", f"{RUN}@2", "--json"),
    ("checkpoint", "prune", "--dry-run", "--keep", "1", RUN),
)
Change = tuple[str, Any]
ODD_KINDS = ("fifo", "socket", "folder", "link to itself", "link to zeros", "link outside", "gone", "50 GB", "bomb")


def changes() -> SearchStrategy[Change]:
    return st.one_of(json_changes(), json_changes(), st.tuples(st.just("kind"), st.sampled_from(ODD_KINDS)))


def damage(box: Sandbox, path: Path, operation: Change) -> None:
    if operation[0] != "kind":
        if path.stat().st_size > 1 << 26:  # enlarged by earlier damage
            return
        path.write_bytes(box.arm_bytes(change(path.read_bytes(), operation)))
        return
    path.unlink()
    if operation[1] == "fifo":
        os.mkfifo(path)
    elif operation[1] == "folder":
        path.mkdir()
    elif operation[1] == "link to itself":
        path.symlink_to(path.name)
    elif operation[1] == "link to zeros":
        path.symlink_to("/dev/zero")
    elif operation[1] == "link outside":
        path.symlink_to(box.outside / "secret")
    elif operation[1] == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as s:  # a socket path has at most 107 bytes
            s.bind(path.name)
    elif operation[1] == "50 GB":
        path.touch()
        os.truncate(path, 50 << 30)
    elif operation[1] == "bomb":
        path.write_bytes(bomb())


@functools.cache
def bomb() -> bytes:
    """Return a gzip member with 512 MiB of zeros."""
    return gzip.compress(bytes(1 << 29), compresslevel=1)


def full_run(box: Sandbox) -> RunDir:
    """Return a run with a file of every kind that a command reads, except checkpoints."""
    run = finished_run(box)
    live_runs.record(run, "a", time.time() - 60, gpus=2, seconds=20, end=True)
    attempt = run.attempt(1)
    log = fsio.JsonlAppender(attempt.events_path("agent-a"))
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


def fresh_run(box: Sandbox, make: Callable[[Sandbox], RunDir]) -> Path:
    """Return the folder of an undamaged RUN, next to NEIGHBOR."""
    template = box.root / make.__name__
    if not template.exists():
        make(box).path.rename(template)
    folder, neighbor = (box.home / "runs" / name for name in (RUN, NEIGHBOR))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    if not neighbor.exists():
        shutil.copytree(template, neighbor)
        sweep = box.home / "sweeps" / SWEEP
        sweep.mkdir(parents=True)
        for task, run in enumerate((folder, neighbor)):
            (sweep / str(task)).symlink_to(run)
    return folder


def make_player(make: Callable[[Sandbox], RunDir], check_neighbor: bool) -> Callable[[Sandbox, Any], None]:
    def play(box: Sandbox, drawn: tuple[list[tuple[int, Change]], tuple[str, ...]]) -> None:
        damages, argv = drawn
        folder = fresh_run(box, make)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        for place, operation in damages:
            path = files[place % len(files)]
            # `logs` would print the whole file, which takes an hour.
            endless = argv[0] == "logs" and operation[1] == "50 GB"
            if path.is_file() and not path.is_symlink() and not endless:
                damage(box, path, operation)
        result = box.call(argv, terminal_safe=True)
        if check_neighbor and argv[0] == "list":
            _check_neighbor_is_listed(result.out)

    return play


def _check_neighbor_is_listed(output: str) -> None:
    if NEIGHBOR not in output:
        raise FaultFound(Fault("hidden", "list", f"{NEIGHBOR} is not in:\n{output}"))


def damaged(readers: tuple[tuple[str, ...], ...]) -> SearchStrategy[Any]:
    places = st.lists(st.tuples(st.integers(0, 1000), changes()), min_size=1, max_size=2)
    return st.tuples(places, st.sampled_from(readers))


def play_segments(box: Sandbox, drawn: tuple[list[tuple[int, Change]], tuple[str, ...]]) -> None:
    """Damage only telemetry segments, and call a command."""
    damages, argv = drawn
    folder = fresh_run(box, full_run)
    files = sorted(p for p in folder.glob("attempts/*/telemetry/**/*") if p.is_file())
    for place, operation in damages:
        path = files[place % len(files)]
        if path.is_file() and not path.is_symlink():
            damage(box, path, operation)
    box.call(argv, terminal_safe=True)


INDEX_READERS = (
    *CHECKPOINT_READERS,
    ("checkpoint", "digest", f"{RUN}@1"),
    ("checkpoint", "export", f"{RUN}@1", "--format", "safetensors", "-o", "exported", "--force"),
)


def play_index(box: Sandbox, drawn: tuple[list[Change], tuple[str, ...]]) -> None:
    """Change a checkpoint's manifest and adapt its checksum; `digest` must read what `verify` accepts."""
    from clustertrain.checkpoint.format import manifest as index

    changes_drawn, argv = drawn
    folder = fresh_run(box, checkpointed_run)
    checkpoint = folder / "checkpoints" / "step-00000001"
    data = (checkpoint / index.MANIFEST).read_bytes()
    for operation in changes_drawn:
        data = change(data, operation)
    data = box.arm_bytes(data)
    (checkpoint / index.MANIFEST).write_bytes(data)
    marker = {"format": index.FORMAT_VERSION, "step": 1, "manifest_xxh3_128": index.checksum(data)}
    (checkpoint / index.COMMITTED).write_text(json.dumps(marker))
    box.call(argv, terminal_safe=True)
    if argv[1] == "digest":
        valid = box.call(("checkpoint", "verify", f"{RUN}@1")).code == 0
        if valid and box.call(argv).code != 0:
            raise FaultFound(Fault("disagree", "digest", "verify accepts what digest cannot read"))


def play_telemetry_values(box: Sandbox, drawn: tuple[int, list[Change], tuple[str, ...]]) -> None:
    """Change values in telemetry segments, which are then compressed as the sampler does."""
    from clustertrain.telemetry.store import jsonl_blocks, totals

    place, changes_drawn, argv = drawn
    folder = fresh_run(box, full_run)
    segment = next(folder.glob("attempts/*/telemetry/*/0"))
    path = segment / ("header.json", totals.NAME, jsonl_blocks.NAME)[place % 3]
    data = path.read_bytes() if path.suffix == ".json" else gzip.decompress(path.read_bytes())
    for operation in changes_drawn:
        data = change(data, operation)
    if path.name == jsonl_blocks.NAME:
        (segment / totals.NAME).unlink()  # otherwise only the samples after it count
        data = jsonl_blocks.compress_member(data)
    elif path.name == totals.NAME:
        data = gzip.compress(data)
    path.write_bytes(data)
    box.call(argv, terminal_safe=True)


TELEMETRY_READERS = tuple(argv for argv in READERS if argv[0] in ("telemetry", "top", "status"))

CLASSES = (
    InputClass("run_files", lambda: damaged(READERS), make_player(full_run, check_neighbor=True), 40),
    InputClass(
        "figures",
        lambda: st.tuples(
            st.integers(0, 2), st.lists(json_changes(), min_size=1, max_size=2), st.sampled_from(TELEMETRY_READERS)
        ),
        play_telemetry_values,
        40,
    ),
    InputClass("segments", lambda: damaged(TELEMETRY_READERS), play_segments, 40),
    InputClass(
        "indexes",
        lambda: st.tuples(st.lists(json_changes(), min_size=1, max_size=2), st.sampled_from(INDEX_READERS)),
        play_index,
        30,
    ),
    InputClass(
        "manifests", lambda: damaged(CHECKPOINT_READERS), make_player(checkpointed_run, check_neighbor=False), 25
    ),
)
