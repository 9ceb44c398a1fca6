"""The archive of an environment: its content, its name, and when it is written and removed."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from clustertrain import clock, fsio
from clustertrain.errors import ConfigError
from clustertrain.run import run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.shipped_environment import ShippedEnvironment, archives_folder
from clustertrain.submit.shipping import archive
from clustertrain.submit.shipping.archive import pack, remove_unused
from clustertrain.submit.shipping.environment import PythonEnvironment, find_environment
from tests.fakes.environments import VERSION, make_environment, write

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PythonEnvironment:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    return find_environment(make_environment(tmp_path / "shared") / "bin" / "python")


def read(shipped: ShippedEnvironment) -> dict[str, str]:
    """Return the content or link target of each member; folders end with a slash."""
    members = {}
    with tarfile.open(shipped.archive) as file:
        for member in file:
            content = file.extractfile(member) if member.isreg() else None
            name = f"{member.name}/" if member.isdir() else member.name
            members[name] = content.read().decode() if content is not None else member.linkname
    return members


def test_content(environment: PythonEnvironment) -> None:
    shipped, outside = pack(environment)
    members = read(shipped)
    packages = f"environment/lib/{VERSION}/site-packages"
    assert members[f"{packages}/pkg/__init__.py"] == "NAME = 1\n"
    assert members[f"{packages}/pkg/__pycache__/__init__.cpython-312.pyc"] == "bytecode"
    assert members["environment/lib64"] == "lib" and members["environment/bin/python"] == f"../../base/bin/{VERSION}"
    assert members[f"base/bin/{VERSION}"].startswith("#!/bin/sh") and "base/lib/libpython3.12.so.1.0" in members
    assert members[f"base/lib/{VERSION}/os.py"] == "base os" and f"base/include/{VERSION}/Python.h" in members
    assert not [name for name in members if name.startswith("base/") and ("test" in name or "site-packages" in name)]
    assert not [name for name in members if name.endswith(".a")]
    assert outside == [] and shipped.prefixes == (str(environment.prefix),) and shipped.base_python == VERSION
    assert Path(shipped.archive) == archives_folder() / f"{shipped.hash}.tar"
    with tarfile.open(shipped.archive) as file:
        assert file.getmember("environment/bin/tool").mode == 0o755
        source = environment.prefix / "lib" / VERSION / "site-packages" / "pkg" / "__init__.py"
        assert file.getmember(f"{packages}/pkg/__init__.py").mtime == int(source.stat().st_mtime)


def test_links(environment: PythonEnvironment, tmp_path: Path) -> None:
    packages = environment.prefix / "lib" / VERSION / "site-packages"
    cache = write(tmp_path / "cache" / "file.py", "cached").parent
    links = {"inside": packages / "pkg", "file": cache / "file.py", "folder": cache, "nothing": tmp_path / "nothing"}
    for name, target in links.items():
        (packages / f"{name}_link").symlink_to(target)
    shipped, outside = pack(environment)
    found = {name: read(shipped)[f"environment/lib/{VERSION}/site-packages/{name}_link"] for name in links}
    assert found == {"inside": "pkg", "file": "cached", "folder": str(cache), "nothing": str(tmp_path / "nothing")}
    assert outside == [f"{cache} (linked from {packages / 'folder_link'})"]


def test_home_and_caches_of_conda_are_left_out(environment: PythonEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(environment.prefix / "home"))
    for folder in ("home", "pkgs", "envs"):
        write(environment.prefix / folder / "large", folder)
    shipped, _ = pack(environment)
    assert not [name for name in read(shipped) if name.endswith("large")]


def test_unchanged_environment_is_packed_once(environment: PythonEnvironment) -> None:
    first, _ = pack(environment)
    before = Path(first.archive).stat()
    os.utime(first.archive, (0, 0))
    packages = environment.prefix / "lib" / VERSION / "site-packages"
    write(packages / "pkg" / "__pycache__" / "other.pyc", "written by an import")
    second, _ = pack(environment)
    after = Path(first.archive).stat()
    assert second == first and after.st_ino == before.st_ino and after.st_mtime > 1e9  # it was used


@pytest.mark.parametrize(
    "change",
    [
        lambda packages: write(packages / "new.py"),
        lambda packages: write(packages / "pkg" / "__init__.py", "NAME = 10\n"),
        lambda packages: os.utime(packages / "pkg" / "__init__.py", ns=(0, 1)),
        lambda packages: (packages / "pkg" / "__init__.py").chmod(0o755),
        lambda packages: (packages / "pkg" / "__init__.py").unlink(),
        lambda packages: (packages / "link").symlink_to("pkg"),
    ],
)
def test_changed_environment_has_another_hash(environment: PythonEnvironment, change: Callable[[Path], object]) -> None:
    first, _ = pack(environment)
    change(environment.prefix / "lib" / VERSION / "site-packages")
    assert pack(environment)[0].hash != first.hash


def test_two_submissions_at_once(environment: PythonEnvironment) -> None:
    others: list[ShippedEnvironment] = []

    def pack_too(done: int, total: int) -> None:
        if not others:
            others.append(pack(environment)[0])  # complete while the first one is being written

    shipped, _ = pack(environment, pack_too)
    assert others == [shipped] and [path.name for path in archives_folder().iterdir()] == [f"{shipped.hash}.tar"]
    assert f"environment/lib/{VERSION}/site-packages/pkg/__init__.py" in read(shipped)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text(""), "large.bin changed while it was packed"),
        (lambda path: path.unlink(), r"large\.bin: No such file"),
    ],
)
def test_environment_that_changes_meanwhile_is_refused(
    environment: PythonEnvironment, change: Callable[[Path], object], message: str
) -> None:
    large = environment.prefix / "large.bin"
    large.write_bytes(bytes(2**20 + 1))
    with pytest.raises(ConfigError, match=message):
        pack(environment, lambda done, total: change(large) if large.exists() and large.stat().st_size else None)
    assert list(archives_folder().iterdir()) == []


def test_full_filesystem_is_refused(environment: PythonEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: Usage(100, 99, 1))
        with pytest.raises(ConfigError, match=r"takes 0\.0 GB, and .*environments has 0\.0 GB free"):
            pack(environment)

    def write_nothing(*args: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(archive, "_write", write_nothing)
    with pytest.raises(ConfigError, match=r"cannot be packed: .*Disk quota exceeded") as refusal:
        pack(environment)
    assert "CLUSTERTRAIN_HOME" in str(refusal.value.fix) and list(archives_folder().iterdir()) == []


def test_unused_archives_are_removed_and_needed_ones_stay(environment: PythonEnvironment) -> None:
    folder = archives_folder()
    folder.mkdir(parents=True)
    old = clock.now() - archive.KEEP_S - 10
    names = ("unused", "ended", "pending", "recent", ".x.tar.1-abandoned", ".x.tar.2-written-now")
    paths = {name: write(folder / (name if name.startswith(".") else f"{name}.tar")) for name in names}
    for name in ("unused", "ended", "pending", ".x.tar.1-abandoned"):
        os.utime(paths[name], (old, old))
    for name in ("ended", "pending"):
        run = run_dir.create_run(name)
        shipped = ShippedEnvironment(hash=name, prefixes=(), archive=str(paths[name]))
        fsio.write_json(run.environment, msgspec.to_builtins(shipped))
        log = EventLog(run.attempt(1).events_path("batch"))
        log.write("started", job_id="1", nodes=["a"])
        if name == "ended":
            log.write("ended", ending="completed", reason="done")
        log.close()
    remove_unused(folder)
    assert {name for name in names if paths[name].exists()} == {"pending", "recent", ".x.tar.2-written-now"}
