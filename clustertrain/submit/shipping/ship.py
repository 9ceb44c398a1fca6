"""``environment = "ship"``: which environment a run takes to its nodes, and its archive."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from clustertrain.errors import ConfigError
from clustertrain.run.shipped_environment import ShippedEnvironment
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.program.python_words import is_python
from clustertrain.submit.shipping.environment import PythonEnvironment, find_environment
from clustertrain.submit.snapshot import code_snapshot

OnProgress = Callable[[int, int], object]
"""Called with the bytes done and the total."""


def check_environment(prepared: PreparedRun) -> list[str]:
    """Refuse an environment to ship that is no environment; note what the ranks still read from elsewhere."""
    if prepared.spec.job.environment != "ship":
        return []
    if prepared.spec.job.container:
        raise ConfigError(
            "--ship-env: the ranks run in a container, whose image is their environment",
            fix="leave --ship-env or --container out",
        )
    environment = find_environment(*find_python(prepared))
    notes = []
    if environment.outside:
        notes.append(f"--ship-env: still read from their own folders: {', '.join(environment.outside)}")
    if prepared.code is not None and _is_in_snapshot(environment.prefix, prepared.code):
        fix = "add it to .gitignore, so that the code snapshot does not copy it"
        notes.append(f"--ship-env: {environment.prefix} is part of the code: {fix}")
    return notes


def find_python(prepared: PreparedRun) -> tuple[Path, str]:
    """Return the interpreter of the ranks, and where it comes from if the user has not named it.

    For a command it is the one that the command names or starts, as far as its text says so.
    """
    script = prepared.spec.script
    if script is None or not script.command:
        return Path(prepared.python.ranks.path), ""
    program = Path(script.command[0])
    if is_python(program.name):
        return program, ""
    if (python := program.with_name("python")).exists():  # a console script lies beside its interpreter
        try:
            find_environment(python)
        except ConfigError:
            pass
        else:
            return python, ""
    found = shutil.which("python", path=prepared.parsed.request.environ.get("PATH"))
    if found is None:
        return program, ""
    return prepared.parsed.request.cwd / found, "the python in your PATH"


def _is_in_snapshot(prefix: Path, code: Path) -> bool:
    """Return whether the snapshot would copy the environment too."""
    root = code_snapshot.find_snapshot_root(code)
    if not prefix.resolve().is_relative_to(root):
        return False
    if code_snapshot.find_repository_root(root) is not None:
        return not code_snapshot.is_git_ignored(prefix / "bin" / "python")  # uv ignores the files in it
    return not (prefix / "pyvenv.cfg").is_file()


class EnvironmentPacker:
    """Packs the environments of one submission, which may have many runs.

    Args of the constructor:
        on_progress: called with the bytes done and the total while an archive is written.
    """

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self.notes: list[str] = []
        self._on_progress = on_progress
        self._packed: dict[PythonEnvironment, ShippedEnvironment] = {}

    def pack(self, prepared: PreparedRun) -> ShippedEnvironment | None:
        """Return the packed environment of a run; None if it does not ship one.

        Raises:
            ConfigError: it cannot be packed.
        """
        if prepared.spec.job.environment != "ship":
            return None
        # Not at the top: few submissions need it.
        from clustertrain.submit.shipping.archive import pack

        environment = find_environment(*find_python(prepared))
        if environment not in self._packed:
            self._packed[environment], outside = pack(environment, self._on_progress)
            if outside:
                self.notes.append(f"--ship-env: folders that stay where they are: {', '.join(outside)}")
        return self._packed[environment]
