"""Files of a run that change while a command reads them: removed, moved away, cut, or another kind of thing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.harness.fuzz.inputs.commands import RUN
from tests.harness.fuzz.inputs.outputs import speaking_run
from tests.harness.fuzz.inputs.run_files import CHECKPOINT_READERS, NEIGHBOR, READERS, fresh_run
from tests.harness.fuzz.judge import Fault, FaultFound
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import Sandbox

ACTS = ("gone", "folder gone", "cut", "grown", "folder", "run gone", "run away", "run another", "link", "empty again")
EVENTS = ("open", "os.listdir", "os.scandir")
Drawn = tuple[tuple[str, ...], int, int, str]


class _Meanwhile:
    """Acts once, just before the program's ``left``-th look into the run's folder."""

    def __init__(self) -> None:
        self.left, self.inside = 0, ""
        self.act: Callable[[], None] | None = None

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.act is None or event not in EVENTS or not str(args[0]).startswith(self.inside):
            return
        self.left -= 1
        if self.left <= 0:
            act, self.act = self.act, None
            act()


_meanwhile = _Meanwhile()
_hooked: list[_Meanwhile] = []  # an audit hook can be added and never removed


def changed() -> SearchStrategy[Drawn]:
    """A call, before which look into the folder of the run the change comes, to which file, and what it is."""
    calls = st.sampled_from((*READERS, *CHECKPOINT_READERS))
    return st.tuples(calls, st.integers(1, 60), st.integers(0, 500), st.sampled_from(ACTS))


def play(box: Sandbox, drawn: Drawn) -> None:
    words, looks, place, act = drawn
    away = box.home / "away"
    shutil.rmtree(away, ignore_errors=True)
    folder = box.home / "runs" / RUN
    if folder.is_symlink():
        folder.unlink()
    fresh_run(box, speaking_run)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    if not _hooked:
        _hooked.append(_meanwhile)
        sys.addaudithook(_meanwhile)
    _meanwhile.left, _meanwhile.inside = looks, str(folder)
    _meanwhile.act = lambda: _change(folder, files[place % len(files)], away, act)
    try:
        said = box.call(words, terminal_safe=True)
    finally:
        _meanwhile.act = None
    if words[0] == "list" and NEIGHBOR not in said.out:
        raise FaultFound(Fault("hidden", "list", f"{NEIGHBOR} is not in:\n{said.out}"))


def _change(run: Path, path: Path, away: Path, act: str) -> None:
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
        run.rename(away)
        if act == "run another":
            run.symlink_to(run.parent / NEIGHBOR)


CLASSES = (InputClass("meanwhile", changed, play, 120),)
