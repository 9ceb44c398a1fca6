"""Read kernel files under a root without raising.

A missing file reads as empty. A file that cannot be read or parsed reads as empty too, and is noted.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

_MAX_BYTES = 65_536
# Reading the speed of an interface that is down, or a GID not mapped into a container, fails with EINVAL.
_ABSENT_ERRNOS = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV)


class Sysfs:
    """The kernel files of a node; paths are absolute as on the node (``/sys/class/net``).

    ``read_errors`` collects the notes on files that could not be read or parsed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.read_errors: list[str] = []

    def host_path(self, path: str) -> Path:
        """Return the path of a node's file on this machine."""
        return self.root / path.lstrip("/")

    def read_text(self, path: str) -> str:
        """Return the stripped text of a file, empty if it cannot be read."""
        try:
            with self.host_path(path).open("rb") as file:
                return file.read(_MAX_BYTES).decode(errors="replace").strip()
        except OSError as e:
            self._note_error(path, e)
            return ""

    def read_number(self, path: str) -> int | None:
        """Return the number in a file; None if missing, invalid, or negative, the kernel's "not available"."""
        text = self.read_text(path)
        if not text:
            return None
        if not re.fullmatch(r"-?\d{1,18}", text):
            self.note_unparsable(path, text, "a number")
            return None
        return int(text) if int(text) >= 0 else None

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder in natural order, eth2 before eth10."""
        try:
            return sorted((p.name for p in self.host_path(folder).iterdir()), key=natural_key)
        except OSError as e:
            self._note_error(folder, e)
            return []

    def exists(self, path: str) -> bool:
        try:
            return self.host_path(path).exists()
        except OSError:  # a link to itself
            return False

    def read_link(self, path: str) -> str:
        """Return the target of a link as a path on the node, empty if there is none."""
        try:
            resolved = self.host_path(path).resolve(strict=True)
            return "/" + str(resolved.relative_to(self.root.resolve()))
        except (OSError, RuntimeError, ValueError):  # RuntimeError: a loop, before Python 3.13
            return ""

    def note_unparsable(self, path: str, text: str, expected: str) -> None:
        """Note that the text of a file is not ``expected``, such as "a number"."""
        self.read_errors.append(f"{path}: {text[:40]!r} is not {expected}")

    def _note_error(self, path: str, error: OSError) -> None:
        if error.errno not in _ABSENT_ERRNOS:
            self.read_errors.append(f"{path}: {error.strerror or error}")


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares digits in names as numbers."""
    return [(int(token), "") if token.isdigit() else (-1, token) for token in re.split(r"(\d+)", name) if token]
