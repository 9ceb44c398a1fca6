"""Files of a run, its telemetry and its checkpoints, damaged; every command that reads them."""

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
from tests.harness.fuzz.inputs.damage import change, json_changed
from tests.harness.fuzz.judge import Fault, FaultFound
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import Sandbox
from tests.unit.report import live_runs

# A healthy neighbor: damage in one run never hides another.
NEIGHBOR = "other-zzz222"
SWEEP = "grid-swp234"  # of the two
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
    """The folder of an undamaged RUN, with NEIGHBOR beside it."""
    kept = box.root / make.__name__
    if not kept.exists():
        make(box).path.rename(kept)
    folder, neighbor = (box.home / "runs" / name for name in (RUN, NEIGHBOR))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept, folder)
    if not neighbor.exists():
        shutil.copytree(kept, neighbor)
        sweep = box.home / "sweeps" / SWEEP
        sweep.mkdir(parents=True)
        for task, run in enumerate((folder, neighbor)):
            (sweep / str(task)).symlink_to(run)
    return folder


def player(make: Callable[[Sandbox], RunDir], neighbor_too: bool) -> Callable[[Sandbox, Any], None]:
    def play(box: Sandbox, drawn: tuple[list[tuple[int, Change]], tuple[str, ...]]) -> None:
        damages, words = drawn
        folder = fresh_run(box, make)
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        for place, how in damages:
            path = files[place % len(files)]
            # `logs` prints all that is there, if it takes an hour.
            endless = words[0] == "logs" and how[1] == "50 GB"
            if path.is_file() and not path.is_symlink() and not endless:
                damage(box, path, how)
        said = box.call(words, terminal_safe=True)
        if neighbor_too and words[0] == "list":
            _neighbor_is_listed(said.out)

    return play


def _neighbor_is_listed(shown: str) -> None:
    if NEIGHBOR not in shown:
        raise FaultFound(Fault("hidden", "list", f"{NEIGHBOR} is not in:\n{shown}"))


def damaged(readers: tuple[tuple[str, ...], ...]) -> SearchStrategy[Any]:
    places = st.lists(st.tuples(st.integers(0, 1000), changes()), min_size=1, max_size=2)
    return st.tuples(places, st.sampled_from(readers))


def telemetry_only(box: Sandbox, drawn: tuple[list[tuple[int, Change]], tuple[str, ...]]) -> None:
    """As the run files, but all damage is in the segments."""
    damages, words = drawn
    folder = fresh_run(box, full_run)
    files = sorted(p for p in folder.glob("attempts/*/telemetry/**/*") if p.is_file())
    for place, how in damages:
        path = files[place % len(files)]
        if path.is_file() and not path.is_symlink():
            damage(box, path, how)
    box.call(words, terminal_safe=True)


INDEX_READERS = (
    *CHECKPOINT_READERS,
    ("checkpoint", "digest", f"{RUN}@1"),
    ("checkpoint", "export", f"{RUN}@1", "--format", "safetensors", "-o", "exported", "--force"),
)


def signed_index(box: Sandbox, drawn: tuple[list[Change], tuple[str, ...]]) -> None:
    """A changed index of a checkpoint with the checksum that fits it. What `verify` calls good, `digest` reads."""
    from clustertrain.checkpoint.format import manifest as index

    changed, words = drawn
    folder = fresh_run(box, checkpointed_run)
    one = folder / "checkpoints" / "step-00000001"
    data = (one / index.MANIFEST).read_bytes()
    for how in changed:
        data = change(data, how)
    data = box.arm_bytes(data)
    (one / index.MANIFEST).write_bytes(data)
    marker = {"format": index.FORMAT_VERSION, "step": 1, "manifest_xxh3_128": index.checksum(data)}
    (one / index.COMMITTED).write_text(json.dumps(marker))
    box.call(words, terminal_safe=True)
    if words[1] == "digest":
        good = box.call(("checkpoint", "verify", f"{RUN}@1")).code == 0
        if good and box.call(words).code != 0:
            raise FaultFound(Fault("disagree", "digest", "verify calls good what digest does not read"))


def figures_changed(box: Sandbox, drawn: tuple[int, list[Change], tuple[str, ...]]) -> None:
    """Changed values in the segments, packed as a sampler packs them."""
    from clustertrain.telemetry.store import jsonl_blocks, totals

    place, changed, words = drawn
    folder = fresh_run(box, full_run)
    segment = next(folder.glob("attempts/*/telemetry/*/0"))
    path = segment / ("header.json", totals.NAME, jsonl_blocks.NAME)[place % 3]
    data = path.read_bytes() if path.suffix == ".json" else gzip.decompress(path.read_bytes())
    for how in changed:
        data = change(data, how)
    if path.name == jsonl_blocks.NAME:
        (segment / totals.NAME).unlink()  # else only the samples after it count
        data = jsonl_blocks.compress_member(data)
    elif path.name == totals.NAME:
        data = gzip.compress(data)
    path.write_bytes(data)
    box.call(words, terminal_safe=True)


TELEMETRY_READERS = tuple(words for words in READERS if words[0] in ("telemetry", "top", "status"))

CLASSES = (
    InputClass("run_files", lambda: damaged(READERS), player(full_run, neighbor_too=True), 40),
    InputClass(
        "figures",
        lambda: st.tuples(
            st.integers(0, 2), st.lists(json_changed(), min_size=1, max_size=2), st.sampled_from(TELEMETRY_READERS)
        ),
        figures_changed,
        40,
    ),
    InputClass("segments", lambda: damaged(TELEMETRY_READERS), telemetry_only, 40),
    InputClass(
        "indexes",
        lambda: st.tuples(st.lists(json_changed(), min_size=1, max_size=2), st.sampled_from(INDEX_READERS)),
        signed_index,
        30,
    ),
    InputClass("manifests", lambda: damaged(CHECKPOINT_READERS), player(checkpointed_run, neighbor_too=False), 25),
)
