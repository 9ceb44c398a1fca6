"""The node-local copy of an environment: unpacked once, shared, checked, limited, and not used if it is not whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from clustertrain.agent import environment_copy
from clustertrain.agent.environment_copy import EnvironmentCopy, NotCopied, Stopped, prepare_python, remove_copies
from clustertrain.agent.relocation import RankPython
from clustertrain.run import event_types, events
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import AttemptDir
from clustertrain.run.shipped_environment import ShippedEnvironment
from clustertrain.submit.shipping.archive import pack
from clustertrain.submit.shipping.environment import find_environment
from tests.fakes.environments import VERSION, make_environment, write

Usage = namedtuple("Usage", "total used free")
# Holds a lock as an agent does that is unpacking.
_HOLD = """
import fcntl, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "partial" / "environment").mkdir(parents=True, exist_ok=True)
fd = os.open(folder, os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX if sys.argv[2] == "EX" else fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShippedEnvironment:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    return pack(find_environment(make_environment(tmp_path / "shared") / "bin" / "python"))[0]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., EnvironmentCopy]]:
    """Return a function that returns what an agent on this node has."""
    copies: list[EnvironmentCopy] = []

    def make(should_stop: bool = False, folder: Path = tmp_path / "node") -> EnvironmentCopy:
        copies.append(EnvironmentCopy(str(folder), {}, lambda: should_stop))
        return copies[-1]

    yield make
    for copy in copies:
        copy.release()


def root(tmp_path: Path) -> Path:
    return tmp_path / "node" / f"clustertrain-environments-{os.getuid()}"


def hold(folder: Path, kind: str) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    argv = [sys.executable, "-I", "-S", "-c", _HOLD, str(folder), kind]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_copy_runs_from_its_own_place(
    shipped: ShippedEnvironment, node: Callable[..., EnvironmentCopy], tmp_path: Path
) -> None:
    copy = node()
    python = copy.prepare(shipped)
    folder = root(tmp_path) / shipped.hash / "copy"
    assert python == RankPython(shipped.prefixes, folder) and not copy.is_reused
    assert python.python == f"{folder}/environment/bin/python"
    assert os.path.realpath(python.python) == f"{folder}/base/bin/{VERSION}"
    assert f"home = {folder}/base/bin\n" in (folder / "environment" / "pyvenv.cfg").read_text()
    tool = folder / "environment" / "bin" / "tool"
    assert f"{folder}/environment/bin/python3 -I" in tool.read_text() and os.access(tool, os.X_OK)
    assert folder.stat().st_mode & 0o077 == 0


def test_later_agents_use_the_same_copy(
    shipped: ShippedEnvironment, node: Callable[..., EnvironmentCopy], tmp_path: Path
) -> None:
    first, second = node(), node()
    python = first.prepare(shipped)
    write(python.copy / "environment" / "lib" / VERSION / "new" / "__pycache__" / "x.pyc")  # as a rank does
    Path(shipped.archive).unlink()  # it is not read again
    assert second.prepare(shipped) == python and second.is_reused


def test_copy_of_a_killed_agent_is_not_used(
    shipped: ShippedEnvironment, node: Callable[..., EnvironmentCopy], tmp_path: Path
) -> None:
    folder = root(tmp_path) / shipped.hash
    holder = hold(folder, "EX")
    with pytest.raises(Stopped):  # it waits for the other agent, until the job has to stop
        node(should_stop=True).prepare(shipped)
    holder.kill()
    holder.communicate()
    copy = node()
    assert (copy.prepare(shipped).copy / "environment" / "pyvenv.cfg").exists() and not copy.is_reused
    assert not (folder / "partial").exists()


@pytest.mark.parametrize(
    "name", [f"environment/lib/{VERSION}/site-packages/pkg/__init__.py", "base/lib/python3.12/os.py"]
)
def test_damaged_copy_is_unpacked_again(
    name: str, shipped: ShippedEnvironment, node: Callable[..., EnvironmentCopy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that clean /tmp remove files which nobody has read for days."""
    first = node()
    path = first.prepare(shipped).copy / name
    path.unlink()
    monkeypatch.setattr(environment_copy, "DAMAGED_WAIT_S", 0.0)
    with pytest.raises(NotCopied, match="in use by other processes"):  # of the first agent
        node().prepare(shipped)
    first.release()
    again = node()
    again.prepare(shipped)
    assert path.exists() and not again.is_reused


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda archive, root: archive.unlink(), r"\.tar: No such file"),
        (lambda archive, root: os.truncate(archive, 5 * 512), r"tar could not unpack .*\.tar: its end is missing"),
        (lambda archive, root: archive.write_text("x" * 1024), "tar could not unpack .*not look like a tar archive"),
        (lambda archive, root: root.symlink_to("/tmp"), "is not a folder that only you can write"),
        (lambda archive, root: root.mkdir(mode=0o777) or root.chmod(0o777), "is not a folder that only you can write"),
        (lambda archive, root: root.write_text(""), "is not a folder that only you can write"),
    ],
)
def test_reasons_against_a_copy(
    spoil: Callable[[Path, Path], object],
    message: str,
    shipped: ShippedEnvironment,
    node: Callable[..., EnvironmentCopy],
    tmp_path: Path,
) -> None:
    (tmp_path / "node").mkdir()
    spoil(Path(shipped.archive), root(tmp_path))
    with pytest.raises(NotCopied, match=message):
        node().prepare(shipped)
    assert not list(tmp_path.glob("node/*/*/copy")) and not list(tmp_path.glob("node/*/*/partial"))


def test_copy_from_before_a_restart_of_the_node_is_unpacked_again(
    shipped: ShippedEnvironment, node: Callable[..., EnvironmentCopy], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = node(), node()
    first.prepare(shipped)
    first.release()
    monkeypatch.setattr(environment_copy, "_read_boot_id", lambda: "another")
    second.prepare(shipped)
    assert not second.is_reused


def test_unsuitable_node_folders(
    shipped: ShippedEnvironment,
    node: Callable[..., EnvironmentCopy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: Usage(2**30, 2**30, 0))
        with pytest.raises(NotCopied, match=r"has 0\.0 GB free, and the copy needs 1\.1 GB"):
            node().prepare(shipped)
    with monkeypatch.context() as patch:
        patch.setattr(environment_copy, "find_shared_filesystem_type", lambda folder: "lustre")
        with pytest.raises(NotCopied, match=r"on a shared filesystem \(lustre\)"):
            node().prepare(shipped)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda folder: mock.Mock(f_flag=os.ST_NOEXEC))
        with pytest.raises(NotCopied, match="without permission to execute"):
            node().prepare(shipped)
    with pytest.raises(NotCopied, match=r"\$NO_SUCH_VARIABLE is not set here"):
        node(folder=Path("$NO_SUCH_VARIABLE")).prepare(shipped)


def test_default_folder_is_the_first_suitable_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name for name in ("SLURM_TMPDIR", "TMPDIR")}
    for folder in folders.values():
        folder.mkdir()
    environ = {name: str(folder) for name, folder in folders.items()}
    assert environment_copy._choose_folder("", environ) == folders["SLURM_TMPDIR"]
    monkeypatch.setattr(
        environment_copy, "find_shared_filesystem_type", lambda folder: "nfs" if folder.name == "SLURM_TMPDIR" else ""
    )
    assert environment_copy._choose_folder("", environ) == folders["TMPDIR"]
    assert environment_copy._choose_folder("", {}) == Path("/tmp")


def test_stop_ends_unpacking(shipped: ShippedEnvironment, node: Callable[..., EnvironmentCopy], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "archive")  # tar waits for a writer, as for a filesystem that does not answer
    blocked = msgspec.structs.replace(shipped, archive=str(tmp_path / "archive"))
    with pytest.raises(Stopped):
        node(should_stop=True).prepare(blocked)
    node().prepare(shipped)


def test_least_recently_used_copies_are_removed(
    shipped: ShippedEnvironment, node: Callable[..., EnvironmentCopy], tmp_path: Path
) -> None:
    used = node()
    folder = root(tmp_path) / shipped.hash
    size = environment_copy._read_files(folder) if used.prepare(shipped) else None
    assert size is not None
    others = {}
    for n, name in enumerate(("a" * 16, "b" * 16, "c" * 16)):
        others[name[0]] = shutil.copytree(folder, folder.with_name(name), symlinks=True)
        os.utime(others[name[0]], (n + 1, n + 1))
    (folder.with_name("d" * 16) / "partial").mkdir(parents=True)
    remove_copies(root(tmp_path), 3 * size.bytes)  # of four
    assert {path.name[0] for path in root(tmp_path).iterdir()} == {"b", "c", shipped.hash[0]}
    os.utime(folder, (0, 0))
    remove_copies(root(tmp_path), 0)
    assert [path.name for path in root(tmp_path).iterdir()] == [shipped.hash]  # an agent uses it


def test_agent_records_what_the_ranks_run_from(
    shipped: ShippedEnvironment,
    node: Callable[..., EnvironmentCopy],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attempt = AttemptDir(tmp_path / "attempt", 1)
    log = EventLog(attempt.events_path("agent-a"))
    python = prepare_python(node(), shipped, node="a", log=log)
    missing = msgspec.structs.replace(shipped, hash="f" * 16, archive="/no/such/archive.tar")
    assert prepare_python(node(), missing, node="a", log=log).python == ""
    log.close()
    (copied,) = events.select(events.for_attempt(attempt), event_types.EnvironmentCopied)
    assert (copied.hash, copied.path, copied.reused) == (shipped.hash, str(python.copy), False)
    assert copied.bytes and copied.copy_s is not None
    (refused,) = events.select(events.for_attempt(attempt), event_types.EnvironmentNotCopied)
    assert refused.reason == "/no/such/archive.tar: No such file or directory"
    assert "the ranks use the shared environment, because" in capsys.readouterr().err
