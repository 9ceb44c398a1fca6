"""What is known about ended runs, in the user's cache folder: the next server shows it at once.

The key of an entry contains the stamp of the run's files, so an entry of a run that has changed is never found.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from clustertrain import fsio, reading, schema, settings

T = TypeVar("T")

MAX_ENTRIES = 5000
MAX_BYTES = 64 * reading.MIB
_FORMAT = "1"  # of the files, and of what their values mean


class Cache(Generic[T]):
    """Values by key, in one file per home. Safe in threads."""

    def __init__(self, kind: str, value_type: type[T]) -> None:
        """Read the file of this ``kind``, if there is one of this version."""
        home = hashlib.blake2b(str(settings.home()).encode(errors="surrogateescape"), digest_size=8).hexdigest()
        self._path = settings.cache_folder() / "ui" / f"{home}-{kind}.json"
        self._lock = threading.Lock()
        self._values: dict[str, T] = {}
        self._is_saved = True
        with contextlib.suppress(OSError, ValueError):  # none yet, damaged, or of another version
            self._values = schema.decode(reading.read_bytes(self._path, MAX_BYTES), dict[str, value_type])  # type: ignore[valid-type]

    def get(self, key: str) -> T | None:
        with self._lock:
            return self._values.get(key)

    def add(self, values: Mapping[str, T]) -> None:
        with self._lock:
            added = {key: value for key, value in values.items() if self._values.get(key) != value}
            self._values |= added
            self._is_saved = self._is_saved and not added
            while len(self._values) > MAX_ENTRIES:
                self._values.pop(next(iter(self._values)))  # the oldest

    def save(self) -> None:
        """Write the file, if that is necessary and possible: without it, the next server reads the runs again."""
        with self._lock, contextlib.suppress(OSError, UnicodeEncodeError):
            if not self._is_saved:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                fsio.write_bytes(self._path, msgspec.json.encode(self._values), mode=0o600)
                self._is_saved = True


def make_key(*parts: object) -> str:
    """Return a key of parts whose ``repr`` identifies them."""
    return hashlib.blake2b(repr((_FORMAT, *parts)).encode(errors="surrogateescape"), digest_size=12).hexdigest()
