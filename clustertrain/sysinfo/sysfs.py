"""Files of the kernel under a root, read so that nothing in them can raise: what is absent is empty, what is there and
cannot be read or understood is empty too and noted."""

from __future__ import annotations

import errno
import re
from pathlib import Path

_MAX_BYTES = 65_536
# An interface that is down answers EINVAL for its speed, a GID that is not mapped into a container too.
_ABSENT_ERRNOS = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV)


class Sysfs:
    """Paths are absolute as on the node (``/sys/class/net``). ``unread`` collects the notes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unread: list[str] = []

    def host_path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def read_text(self, path: str) -> str:
        try:
            with self.host_path(path).open("rb") as file:
                return file.read(_MAX_BYTES).decode(errors="replace").strip()
        except OSError as e:
            self._note_error(path, e)
            return ""

    def read_number(self, path: str) -> int | None:
        """None also for what the kernel writes where there is none: a negative one."""
        text = self.read_text(path)
        if not text:
            return None
        if not re.fullmatch(r"-?\d{1,18}", text):
            self.note_unparsable(path, text, "a number")
            return None
        return int(text) if int(text) >= 0 else None

    def list_names(self, folder: str) -> list[str]:
        """The entries of a folder, eth2 before eth10."""
        try:
            return sorted((p.name for p in self.host_path(folder).iterdir()), key=natural_key)
        except OSError as e:
            self._note_error(folder, e)
            return []

    def exists(self, path: str) -> bool:
        try:
            return self.host_path(path).exists()
        except OSError:  # a link that leads to itself
            return False

    def read_link(self, path: str) -> str:
        """Where a link leads, as a path on the node; empty where there is none."""
        try:
            resolved = self.host_path(path).resolve(strict=True)
            return "/" + str(resolved.relative_to(self.root.resolve()))
        except (OSError, RuntimeError, ValueError):  # RuntimeError: a loop, before Python 3.13
            return ""

    def note_unparsable(self, path: str, text: str, expected: str) -> None:
        self.unread.append(f"{path}: {text[:40]!r} is not {expected}")

    def _note_error(self, path: str, error: OSError) -> None:
        if error.errno not in _ABSENT_ERRNOS:
            self.unread.append(f"{path}: {error.strerror or error}")


def natural_key(name: str) -> list[tuple[int, str]]:
    return [(int(token), "") if token.isdigit() else (-1, token) for token in re.split(r"(\d+)", name) if token]
