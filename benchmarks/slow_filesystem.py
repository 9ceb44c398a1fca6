"""A read-only FUSE filesystem that shows a folder and delays each metadata operation, as a busy shared filesystem does.

``python -m benchmarks.slow_filesystem SOURCE MOUNT DELAY_MS COUNTS`` mounts it until SIGTERM and writes the number of
operations to COUNTS. The kernel caches names and attributes for a minute, absent names included: no network filesystem
caches longer by default. An open goes to the server, as with NFS (close-to-open). Data takes no delay.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, CannotRun

CACHE_S = 60
MOUNT_TIMEOUT_S = 20.0


@contextlib.contextmanager
def mounted(source: Path, mount: Path, delay_ms: float) -> Iterator[dict[str, int]]:
    """Mount ``source`` at ``mount`` with empty caches; yield a dict that has the number of operations afterwards.

    Raises:
        CannotRun: this machine has no FUSE, or the user may not mount.
    """
    mount.mkdir(exist_ok=True)
    counts_path, log_path = mount.with_name("counts.json"), mount.with_name("mount.log")
    counts_path.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "benchmarks.slow_filesystem", str(source), str(mount), str(delay_ms)]
    counts: dict[str, int] = {}
    with log_path.open("wb") as log:
        server = subprocess.Popen([*argv, str(counts_path)], stdout=log, stderr=log, cwd=ROOT)
    try:
        deadline = time.monotonic() + MOUNT_TIMEOUT_S
        while not os.path.ismount(mount):
            if server.poll() is not None or time.monotonic() > deadline:
                raise CannotRun(f"FUSE does not mount: {log_path.read_text(errors='replace').strip()[-500:]}")
            time.sleep(0.05)
        yield counts
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(MOUNT_TIMEOUT_S)
    counts.update(json.loads(counts_path.read_text()))


def serve(source: Path, mount: Path, delay_s: float) -> dict[str, int]:
    """Serve ``source`` at ``mount`` until a signal; return the number of operations by name."""
    import mfusepy

    counts: Counter[str] = Counter()

    def delay(operation: str) -> None:
        counts[operation] += 1
        time.sleep(delay_s)

    class SlowFolder(mfusepy.Operations):
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            delay("getattr")  # lookups too
            info = os.lstat(f"{source}{path}")
            times = {f"st_{name}": getattr(info, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
            names = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_ino")
            return {**times, **{name: getattr(info, name) for name in names}}

        def readdir(self, path: str, fh: int) -> list[str]:
            delay("readdir")
            return [".", "..", *(entry.name for entry in os.scandir(f"{source}{path}"))]

        def readlink(self, path: str) -> str:
            delay("readlink")
            return str(Path(f"{source}{path}").readlink())

        def open(self, path: str, flags: int) -> int:
            delay("open")
            if flags & (os.O_WRONLY | os.O_RDWR):
                raise mfusepy.FuseOSError(errno.EROFS)
            return os.open(f"{source}{path}", os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            counts["read"] += 1
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            info = os.statvfs(source)
            return {name: getattr(info, name) for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail")}

    timeouts = {f"{name}_timeout": CACHE_S for name in ("attr", "entry", "negative")}
    try:
        mfusepy.FUSE(SlowFolder(), str(mount), foreground=True, ro=True, kernel_cache=True, **timeouts)
    except RuntimeError:  # the end by a signal too
        if not counts:
            raise
    return dict(counts)


def main() -> None:
    source, mount, delay_ms, counts = sys.argv[1:]
    result = serve(Path(source), Path(mount), float(delay_ms) / 1e3)
    Path(counts).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
