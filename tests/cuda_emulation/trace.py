"""What a rank did on the emulated device: synchronizations, kernels, memory, streams and collectives, with places."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import clustertrain

PACKAGE = str(Path(clustertrain.__file__).parent)
THIS_FOLDER = str(Path(__file__).parent)
Kind = Literal["sync", "kernel", "memory", "stream", "collective"]
KINDS: tuple[Kind, ...] = ("sync", "kernel", "memory", "stream", "collective")
AUTOGRAD = "backward pass"


class Range(NamedTuple):
    """Bytes of memory, of the device or the host."""

    begin: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


class Event(NamedTuple):
    """One thing that the device was asked to do."""

    kind: Kind
    name: str
    """The operator, or what happened: ``item``, ``blocking copy, host to device``, ``record_event``, ``free``, …"""
    stream: int
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    value: int
    """Bytes of a copy, number of an event, or a transfer's peer, which is -1 for a collective."""
    place: str
    """The innermost function of clustertrain: ``train.step.train_step._update``."""
    caller: str
    """The innermost function of all, which may be torch's."""


class Trace:
    """The events of this process while it is switched on."""

    def __init__(self, *kinds: Kind) -> None:
        from tests.cuda_emulation.device import emulated

        self._emulated = emulated
        self._mask = sum(getattr(emulated, kind.upper()) for kind in kinds or KINDS)
        self.events: list[Event] = []

    def start(self) -> None:
        self._emulated.set_observer(self._observe, self._mask)

    def stop(self) -> None:
        self._emulated.set_observer(None, 0)

    def assume_busy_device(self, kernels: int = 64) -> None:
        """Let the device be ``kernels`` behind the host: events that were recorded since then are not complete."""
        self._emulated.set_lag(kernels)

    def write(self, path: Path) -> None:
        """Write the events for :func:`read`, a line each."""
        with path.open("w") as file:
            for event in self.events:
                file.write(json.dumps(event) + "\n")

    def _observe(
        self,
        kind: Kind,
        name: str,
        stream: int,
        reads: tuple[tuple[int, int], ...],
        writes: tuple[tuple[int, int], ...],
        value: int,
    ) -> None:
        place, caller = _places(sys._getframe())
        if name.startswith("synchronize") and _is_helper_thread():
            name += " in another thread"  # which says nothing about what the main thread launches next
        self.events.append(Event(kind, name, stream, _to_ranges(reads), _to_ranges(writes), value, place, caller))


def _is_helper_thread() -> bool:
    """Return whether this is a thread of Python's other than the main one; those of autograd are not."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


def _to_ranges(pairs: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    return tuple(Range(*pair) for pair in pairs if pair[1])


def _places(frame: FrameType | None) -> tuple[str, str]:
    caller = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(THIS_FOLDER):
            caller = caller or f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
            if file.startswith(PACKAGE):
                module = Path(file).relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
                return f"{module}.{frame.f_code.co_name}", caller
        frame = frame.f_back
    return AUTOGRAD, caller


def read(path: Path) -> Iterator[Event]:
    """Yield the events that :meth:`Trace.write` wrote."""
    with path.open() as file:
        for line in file:
            kind, name, stream, reads, writes, value, place, caller = json.loads(line)
            yield Event(kind, name, stream, _to_ranges(reads), _to_ranges(writes), value, place, caller)


def _group_ranks() -> dict[str, list[int]]:
    """Return the ranks of each of this rank's groups, in the group's order, by the group's name."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    return {
        world.pg_names[group]: sorted(ranks, key=ranks.__getitem__) for group, ranks in world.pg_group_ranks.items()
    }


def read_groups(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(ranks) for name, ranks in json.loads(path.read_text()).items()}


def use_host_random_numbers() -> None:
    """Setup of a rank: draw the CPU's random numbers on the device, so that a run equals one on the CPU."""
    from tests.cuda_emulation.device import emulated

    emulated.set_host_random(True)


def trace_steps(first: int, last: int, *kinds: Kind) -> None:
    """Setup of a rank: trace steps ``first`` to ``last`` and write the events into the rank's folder.

    A step begins where its metrics are logged in the one before.
    """
    use_host_random_numbers()
    trace = Trace(*kinds)
    trace.assume_busy_device()
    _after_step(first - 1, lambda _: trace.start())
    _after_step(last, lambda rank: _finish(trace, rank, _group_ranks()))


def trace_until_quiet(seconds: float) -> None:
    """Setup of a rank: trace collectives until ``seconds`` have passed without one, write them, and end the rank.

    For ranks that hang. Exit code 9.
    """
    from clustertrain.train.session.session import Session

    trace = Trace("collective")
    groups: dict[str, list[int]] = {}  # kept, because the end of a session removes its groups
    train_step = Session.train_step

    def end_when_quiet(rank: int) -> None:
        count = -1
        while count < len(trace.events):
            count = len(trace.events)
            time.sleep(seconds)
        _finish(trace, rank, groups | _group_ranks())
        os._exit(9)

    def changed(self: Session, *args: Any, **kwargs: Any) -> Any:
        if not self.step:
            trace.start()
            threading.Thread(target=end_when_quiet, args=[self.rank]).start()
        groups.update(_group_ranks())
        return train_step(self, *args, **kwargs)

    Session.train_step = changed  # type: ignore[method-assign]


def _after_step(step: int, act: Callable[[int], None]) -> None:
    """Call ``act`` with the rank when the step has logged its metrics."""
    from clustertrain.train.session.session import Session

    log = Session.log

    def changed(self: Session, **scalars: object) -> None:
        log(self, **scalars)  # type: ignore[arg-type]
        if self.step == step:
            act(self.rank)

    Session.log = changed  # type: ignore[method-assign]


def _finish(trace: Trace, rank: int, groups: Mapping[str, Sequence[int]]) -> None:
    trace.stop()
    folder = Path(os.environ["CLUSTERTRAIN_RANK_DIR"])
    trace.write(folder / f"trace-{rank}.jsonl")
    (folder / f"groups-{rank}.json").write_text(json.dumps(groups))
