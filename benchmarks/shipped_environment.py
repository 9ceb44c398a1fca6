"""Start of a rank until torch is imported: from a shared filesystem with slow metadata, and from a shipped environment.

The shared filesystem takes 5 ms for each metadata operation (:mod:`benchmarks.slow_filesystem`). It has a virtual
environment with torch, the interpreter from which it was made, and the archive. Each start begins with empty caches of
the shared filesystem, as on a node that has not used the environment before; its server has everything in memory.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from unittest import mock

import msgspec

from benchmarks import measure
from benchmarks.cold import file_system
from benchmarks.measure import CannotRun, Command
from benchmarks.slow_filesystem import mounted
from benchmarks.verdict import MIN_PAIRS, Goal, verdict
from clustertrain import settings
from clustertrain.agent.environment_copy import EnvironmentCopy, NotCopied
from clustertrain.run.shipped_environment import ShippedEnvironment
from clustertrain.submit.shipping.archive import pack
from clustertrain.submit.shipping.environment import find_environment

DELAY_MS = 5.0
MEMORY = Path("/dev/shm")  # separates the cost of unpacking from that of the disk
GOAL = Goal(0.2, "at most")
_PROGRAM = ["-c", "import torch"]
_COMPILE = "import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2)"  # some tests are no valid Python


def main() -> int:
    context = measure.context(("clustertrain", "torch"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared, mount = folder / "shared", folder / "mount"
        build_environment(shared, mount)
        with mounted(shared, mount, DELAY_MS):
            started = time.perf_counter()
            environment = _pack(shared, mount)
            pack_s = time.perf_counter() - started
        archive_gb = (shared / Path(environment.archive).relative_to(mount)).stat().st_size / 1e9
        rows = [_compare(folder, environment, n) for n in range(MIN_PAIRS)]
    start = [row["shipped_s"] / row["shared_s"] for row in rows]
    with_unpacking = [(row["unpack_s"] + row["shipped_s"]) / row["shared_s"] for row in rows]
    verdicts = {"start": verdict(start, GOAL), "start_with_unpacking": verdict(with_unpacking, GOAL)}
    result = {
        **context,
        "delay_ms": DELAY_MS,
        "node_folder": file_system(folder),
        "archive_gb": archive_gb,
        "pack_s": pack_s,
        "rounds": rows,
        "ratio_start": measure.spread(start),
        "ratio_start_with_unpacking": measure.spread(with_unpacking),
        "goal": str(GOAL),
        "verdicts": verdicts,
    }
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    print(
        f"a rank imports torch in {median['shared_s']:.1f} s from the shared folder ({median['operations']:.0f} slow "
        f"operations), and in {median['shipped_s']:.1f} s from the copy. It takes {median['unpack_s']:.1f} s to unpack "
        f"{archive_gb:.2f} GB onto the disk, {median['unpack_in_memory_s']:.1f} s into memory"
    )
    print(f"start: {statistics.median(start):.3f} of the time (target: {GOAL}): {verdicts['start']}")
    print(f"with unpacking: {statistics.median(with_unpacking):.3f} ({verdicts['start_with_unpacking']})")
    print(f"written to {measure.write('shipped_environment', result).relative_to(measure.ROOT)}")
    return 0 if verdicts["start"] == "met" else 1


def build_environment(shared: Path, mount: Path) -> None:
    """Build a Python and a virtual environment with torch in ``shared``, for use at ``mount``.

    The files are hard links to those of this interpreter, if the filesystem allows it.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base, venv = shared / "python", shared / "venv"
    library = Path(sysconfig.get_path("stdlib"))
    ignore = shutil.ignore_patterns("site-packages", "dist-packages", "test", "config-*")
    shutil.copytree(library, base / "lib" / version, copy_function=_link, ignore=ignore)
    (base / "bin").mkdir()
    _link(os.path.realpath(sys.executable), str(base / "bin" / version))
    packages = venv / "lib" / version / "site-packages"
    for name in sorted(_list_requirements(set(), "torch")):
        for file in importlib.metadata.files(name) or ():
            source = Path(str(file.locate()))
            if source.is_file() and ".." not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                _link(str(source), str(packages / file))
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(mount / "python" / "bin" / version)
    (venv / "pyvenv.cfg").write_text(f"home = {mount}/python/bin\ninclude-system-site-packages = false\n")
    for folder in (base, packages):  # a network filesystem has the bytecode that the installation wrote
        Command("compile", [sys.executable, "-W", "ignore", "-c", _COMPILE, str(folder)], _environ(), shared).run()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem
        shutil.copy2(source, target)


def _list_requirements(known: set[str], name: str) -> set[str]:
    """Return ``name`` and the installed packages that it needs, directly or not."""
    known.add(name)
    for requirement in importlib.metadata.requires(name) or ():
        needed = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if "extra ==" not in requirement and needed not in known:
            try:
                _list_requirements(known, needed)
            except importlib.metadata.PackageNotFoundError:  # for another platform
                known.discard(needed)
    return known


def _pack(shared: Path, mount: Path) -> ShippedEnvironment:
    """Pack the environment as ``submit`` does; return it with the path of its archive on the slow filesystem."""
    with mock.patch.dict(os.environ, {settings.HOME: str(shared / "home")}):
        environment, _ = pack(find_environment(mount / "venv" / "bin" / "python"))
    archive = mount / Path(environment.archive).relative_to(shared)
    return msgspec.structs.replace(environment, archive=str(archive))


def _compare(folder: Path, environment: ShippedEnvironment, n: int) -> dict[str, float]:
    """Return the seconds of a start from the shared folder, of unpacking, and of a start from the copy."""
    shared, mount = folder / "shared", folder / "mount"
    with mounted(shared, mount, DELAY_MS) as counts:
        row = {"shared_s": _import_torch(str(mount / "venv" / "bin" / "python"), folder)}
    row["operations"] = sum(number for name, number in counts.items() if name != "read")
    for label, node in (("unpack_in_memory_s", MEMORY / folder.name), ("unpack_s", folder / f"node-{n}")):
        copy = EnvironmentCopy(str(node), os.environ, lambda: False)
        try:
            with mounted(shared, mount, DELAY_MS):
                started = time.perf_counter()
                python = copy.prepare(environment).python
                row[label] = time.perf_counter() - started
            if label == "unpack_s":
                row["shipped_s"] = _import_torch(python, folder)
        except NotCopied as e:
            raise CannotRun(str(e)) from e
        finally:
            copy.release()
            shutil.rmtree(node, ignore_errors=True)
    return row


def _import_torch(python: str, cwd: Path) -> float:
    return Command("start", [python, *_PROGRAM], _environ(), cwd).run().wall_s


def _environ() -> dict[str, str]:
    environ = measure.child_environ(os.environ)
    return {k: v for k, v in environ.items() if not k.startswith("CLUSTERTRAIN_")} | {"OMP_NUM_THREADS": "1"}
