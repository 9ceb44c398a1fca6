"""Judge of one call: no traceback, no hang, no executed input, no write outside the sandbox, no unpickling.

The call runs in this process, so that 100,000 calls take minutes. CPython's audit events (PEP 578) report each file
that it opens for writing, each path that it changes and each global that a pickle names. The hook raises before a
forbidden operation happens, so the judge may run as root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import clustertrain

HANG_S = 10.0
PACKAGE = Path(clustertrain.__file__).parent
# Events, and the positions of their arguments that are changed paths.
PATH_EVENTS = {
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.truncate": (0,),
    "shutil.rmtree": (0,),
}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
ALLOWED_FILES = ("/dev/null", "/dev/tty")


@dataclass(frozen=True)
class Fault:
    """A fault; two faults with the same kind and ``where``, the innermost frame in the package, are the same."""

    kind: str  # traceback, hang, canary, outside, pickle, exit, raw, leak
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}\n{self.detail}"


class FaultFound(AssertionError):
    """Error that carries a fault; an AssertionError, so that Hypothesis reduces the input."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class Forbidden(BaseException):
    """Error raised inside of the call; not an Exception, so that no handler of the program catches it."""


class _Timeout(BaseException):
    pass


@dataclass
class Watch:
    """Folders that one call may write to, and its faults."""

    roots: tuple[str, ...]
    faults: list[Fault] = field(default_factory=list)

    def forbid(self, kind: str, detail: str) -> None:
        where = _innermost(traceback.extract_stack())
        self.faults.append(Fault(kind, where, detail))
        raise Forbidden(detail)

    def writes(self, path: Any) -> None:
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else None
        if name is None or name.startswith("/proc/self/fd/"):  # a descriptor, which was judged when it was opened
            return
        parent, leaf = os.path.split(os.path.abspath(name))  # noqa: PTH100 - must not follow the last part
        real = os.path.join(os.path.realpath(parent), leaf)  # noqa: PTH118
        if real not in ALLOWED_FILES and not f"{real}{os.sep}".startswith(self.roots):
            self.forbid("outside", f"writes {real}")


_current: Watch | None = None
_hooked = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    watch = _current
    if watch is None:
        return
    if event == "open":
        path, _, flags = args
        if flags is not None and flags & WRITE_FLAGS:
            watch.writes(path)
    elif event in PATH_EVENTS:
        for position in PATH_EVENTS[event]:
            watch.writes(args[position])
    elif event == "pickle.find_class":
        watch.forbid("pickle", f"unpickles {args[0]}.{args[1]}")
    elif event == "os.system":
        watch.forbid("canary", f"os.system({args[0]!r})")


@contextlib.contextmanager
def watching(roots: Sequence[Path], hang_s: float = HANG_S) -> Iterator[Watch]:
    """Judge the block.

    Args:
        roots: folders that it may write to.
        hang_s: seconds after which it counts as hanging.

    Raises:
        FaultFound: the block committed a fault.
    """
    global _current, _hooked  # noqa: PLW0603 - an audit hook can be added and never removed
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    watch = Watch(tuple(f"{os.path.realpath(root)}/" for root in roots))
    stuck: list[str] = []

    def on_alarm(_: int, frame: FrameType | None) -> None:
        stuck.append(_innermost(traceback.extract_stack(frame)))
        raise _Timeout

    before = signal.signal(signal.SIGALRM, on_alarm)
    # Repeated each second, because code may catch the first alarm.
    signal.setitimer(signal.ITIMER_REAL, hang_s, 1.0)
    _current = watch
    try:
        yield watch
    except (Forbidden, _Timeout):
        pass
    except FaultFound as e:
        watch.faults.append(e.fault)
    except BaseException as e:
        frames = traceback.extract_tb(e.__traceback__)
        text = "".join(traceback.format_exception(e)[-12:])
        watch.faults.append(Fault("traceback", f"{type(e).__name__} {_innermost(frames)}", text))
    finally:
        _current = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if stuck:
        watch.faults.insert(0, Fault("hang", stuck[0], f"ran for more than {hang_s:g} s"))
    if watch.faults:
        raise FaultFound(watch.faults[0]) from None


def _innermost(frames: traceback.StackSummary) -> str:
    """Return the innermost frame in the package, or the innermost one if none is in the package."""
    candidates = [f for f in frames if Path(f.filename).is_relative_to(PACKAGE)] or [
        f for f in frames if f.filename != __file__
    ]
    last = candidates[-1]
    return f"{Path(last.filename).name}:{last.lineno} {last.name}"
