"""One container to start, independent of the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from clustertrain.config.container import Mount
from clustertrain.sysinfo.containers import ImageKind

# The /bin/sh of the image runs this, with the arguments PID_FILE CWD PYTHONPATH COMMAND…, and becomes the command. Go
# programs such as runc and podman install handlers for all signals, so the command would otherwise start with SIGUSR1
# and SIGUSR2 at their defaults, which end it. As in rank_exec.py.
START_SCRIPT = """
echo $$ >"$1" || exit 126
trap '' USR2
[ "$CLUSTERTRAIN_STOP_SIGNAL" = USR1 ] || trap '' USR1
cd -- "$2" || exit 126
[ -z "$3" ] || export PYTHONPATH="$3${PYTHONPATH:+:$PYTHONPATH}"
shift 3
exec "$@"
"""


class Launch(NamedTuple):
    """What the agent executes on the node, and with which environment."""

    argv: list[str]
    env: dict[str, str]


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """The container of one rank."""

    name: str
    """Name for the runtime, unique on the node."""
    image: str
    kind: ImageKind
    root: Path | None = None
    """The root file system, if the image is a folder or an OCI bundle."""
    command: tuple[str, ...]
    cwd: str
    python_path: str
    """Folders that come first on PYTHONPATH, before those of the image."""
    env: Mapping[str, str]
    """What the command gets in addition to the image's variables."""
    mounts: tuple[Mount, ...]
    """Parents before their children."""
    folder: Path
    """Folder on the node for the runtime's files, deleted after the attempt."""
    pid_path: Path
    """The file in which the container writes the PID of the command; seen under the same path inside."""
    device: str = "cpu"
    options: tuple[str, ...] = ()

    @property
    def start_arguments(self) -> tuple[str, ...]:
        return (str(self.pid_path), self.cwd, self.python_path, *self.command)

    @property
    def argv(self) -> tuple[str, ...]:
        """What the runtime executes in the container."""
        return ("/bin/sh", "-c", START_SCRIPT, "sh", *self.start_arguments)
