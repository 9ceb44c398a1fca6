"""The command line of ``mpirun``: its sizes, its variables and the program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from clustertrain.errors import UsageError

MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SIZES = {"npernode": "ranks", "ppn": "ranks", "perhost": "ranks", "N": "ranks", "np": "total", "n": "total"}
_VALUES = {
    "hostfile": 1, "machinefile": 1, "f": 1, "H": 1, "host": 1, "hosts": 1, "bind-to": 1, "map-by": 1, "rank-by": 1,
    "mca": 2, "genv": 2, "env": 2, "x": 1, "wdir": 1, "wd": 1, "launcher": 1, "bootstrap": 1, "prtemca": 2,
    "oversubscribe": 0, "allow-run-as-root": 0, "report-bindings": 0, "tag-output": 0, "genvall": 0, "l": 0, "v": 0,
    "q": 0,
}  # fmt: skip


@dataclass
class MpiLaunch:
    """What the options of mpirun ask for."""

    ranks_per_node: int | None = None
    total: int | None = None
    """Ranks on all nodes together."""
    env: list[str] = field(default_factory=list)
    """Assignments ``NAME=VALUE``."""
    program: list[str] = field(default_factory=list)


def parse_mpi(launcher: str, arguments: Sequence[str]) -> MpiLaunch:
    """Return what stands after ``launcher``.

    Raises:
        UsageError: an option is not known.
    """
    launch, rest = MpiLaunch(), list(arguments)
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        word = rest.pop(0)
        name, has_value, value = word.lstrip("-").partition("=")
        count = 1 if name in _SIZES else _VALUES.get(name)
        if count is None:
            raise UsageError(
                f"{launcher} {word}: an option that clustertrain does not know",
                fix=f"remove it, or name the program without {launcher}",
            )
        values = [value] if has_value else [rest.pop(0) for _ in range(min(count, len(rest)))]
        if name in ("x", "genv", "env") and values:
            text = values[0] if name == "x" else "=".join(values)
            launch.env += [text] if _ASSIGNMENT.fullmatch(text) else []
        elif name in _SIZES and values and values[0].isdecimal():
            if _SIZES[name] == "ranks":
                launch.ranks_per_node = int(values[0])
            else:
                launch.total = int(values[0])
    launch.program = rest
    return launch
