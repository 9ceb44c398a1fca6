"""A virtual environment with the base install and nothing else, made from the packages of the tests' environment."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT


def build_base_environment(folder: Path, wheel: Path | None = None) -> Path:
    """Create the environment in ``folder`` without a network; return its Python.

    It links to the packages that ``pip install clustertrain`` would install: the dependencies in pyproject.toml, and
    theirs. clustertrain itself is installed from ``wheel``; without one, the checkout is linked.
    """
    venv.create(folder, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in sorted(_list_distributions(project["dependencies"])):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    python = folder / "bin" / "python"
    if wheel is not None:
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
        return python
    (site / "clustertrain").symlink_to(ROOT / "clustertrain")
    (site / "clustertrain-0.dist-info").mkdir()  # for `clustertrain --version`
    (site / "clustertrain-0.dist-info" / "METADATA").write_text(f"Name: clustertrain\nVersion: {project['version']}\n")
    return python


def _list_distributions(requirements: Iterable[str]) -> set[str]:
    """Return the distributions that ``requirements`` need, directly or not."""
    found: set[str] = set()
    pending = list(requirements)
    while pending:
        requirement = Requirement(pending.pop())
        name = canonicalize_name(requirement.name)  # one may ask for typing-extensions, another for typing_extensions
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        pending += importlib.metadata.requires(requirement.name) or ()
    return found


class BaseInstall:
    """The command line of a base install, in a folder of a user."""

    def __init__(self, python: Path, cwd: Path) -> None:
        self.python, self.cwd = python, cwd
        # Not the PYTHONPATH of the tests: it may lead to their environment. `python` is the one of the base install.
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        self.environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "PATH": path, "CLUSTERTRAIN_HOME": str(cwd / "home"),
        }  # fmt: skip

    def __call__(self, *argv: str, code: int = 0) -> str:
        """Run ``clustertrain ARGV``, check its exit code, and return its output, errors included."""
        done = self.run_python("-m", "clustertrain", *argv)
        assert done.returncode == code, done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout

    def run_python(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *argv],
            cwd=self.cwd, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=120,
        )  # fmt: skip
