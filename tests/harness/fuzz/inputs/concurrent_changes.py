"""Files of a run that change while a command reads them: removed, moved, truncated or replaced by something else."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.harness.fuzz.inputs.commands import RUN
from tests.harness.fuzz.inputs.outputs import run_with_odd_text
from tests.harness.fuzz.inputs.run_files import CHECKPOINT_READERS, NEIGHBOR, READERS, fresh_run
from tests.harness.fuzz.judge import Fault, FaultFound
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import Sandbox

CHANGES = (
    "gone",
    "folder gone",
    "cut",
    "grown",
    "folder",
    "run gone",
    "run away",
    "run another",
    "link",
    "empty again",
)
EVENTS = ("open", "os.listdir", "os.scandir")
Drawn = tuple[tuple[str, ...], int, int, str]


class _Trigger:
    """Audit hook that acts once, just before the ``remaining``-th access to the run's folder."""

    def __init__(self) -> None:
        self.remaining, self.folder = 0, ""
        self.act: Callable[[], None] | None = None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.act is None or event not in EVENTS or not str(args[0]).startswith(self.folder):
            return
        self.remaining -= 1
        if self.remaining <= 0:
            act, self.act = self.act, None
            act()


_trigger = _Trigger()
_hooked: list[_Trigger] = []  # an audit hook can be added and never removed


def draw_change() -> SearchStrategy[Drawn]:
    """Draw a call, the access before which the change happens, the changed file, and the change."""
    calls = st.sampled_from((*READERS, *CHECKPOINT_READERS))
    return st.tuples(calls, st.integers(1, 60), st.integers(0, 500), st.sampled_from(CHANGES))


def play(box: Sandbox, drawn: Drawn) -> None:
    argv, accesses, place, act = drawn
    moved = box.home / "away"
    shutil.rmtree(moved, ignore_errors=True)
    folder = box.home / "runs" / RUN
    if folder.is_symlink():
        folder.unlink()
    fresh_run(box, run_with_odd_text)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    if not _hooked:
        _hooked.append(_trigger)
        sys.addaudithook(_trigger)
    _trigger.remaining, _trigger.folder = accesses, str(folder)
    _trigger.act = lambda: _change(folder, files[place % len(files)], moved, act)
    try:
        result = box.call(argv, terminal_safe=True)
    finally:
        _trigger.act = None
    if argv[0] == "list" and NEIGHBOR not in result.out:
        raise FaultFound(Fault("hidden", "list", f"{NEIGHBOR} is not in:\n{result.out}"))


def _change(run: Path, path: Path, moved: Path, act: str) -> None:
    if act == "gone":
        path.unlink()
    elif act == "folder gone":
        shutil.rmtree(path.parent)
    elif act == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif act == "grown":
        path.write_bytes(path.read_bytes() + b'{"t": 1, "ev')
    elif act == "folder":
        path.unlink()
        path.mkdir()
    elif act == "run gone":
        shutil.rmtree(run)
    elif act == "link":
        path.unlink()
        path.symlink_to(path.name)
    elif act == "empty again":
        path.write_bytes(b"")
    else:
        run.rename(moved)
        if act == "run another":
            run.symlink_to(run.parent / NEIGHBOR)


CLASSES = (InputClass("concurrent_changes", draw_change, play, 120),)
