"""All ranks stop at the same step, whichever of them is told to, with no device synchronisation.

At boundary k each rank posts an asynchronous MAX all-reduce of its own flag on a private gloo group, and waits for the
one posted at boundary k-1, which has had a whole step to complete. Where that one is set, all ranks see it at the same
k; they wait for k's own, so that nothing is left in flight, and stop. The group's timeout is the deadline. The first
boundary waits for its own, so that a rank told to stop while it was starting does not do a step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from clustertrain import fsio

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """Whether this rank was told to stop: by a signal, or by the file ``stop`` that the node's agent writes."""

    def __init__(self, rank_dir: Path | None) -> None:
        self._file = rank_dir / "stop" if rank_dir else None
        self._set = False
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Handlers that set the flag and nothing else. Children get the default back at exec, since a handler, unlike
        SIG_IGN, is not inherited through it."""
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._on_signal) for s in SIGNALS}

    def uninstall(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Slurm may deliver the warning before the time limit to every process, up to a minute early. Under an agent
        # only that one knows whether there is time left to train.
        if number != signal.SIGUSR2 or self._file is None:
            self._set = True

    def deadline(self) -> float | None:
        """By when the process must have ended (UTC epoch s), as the agent wrote it; None where nobody said."""
        try:
            value = fsio.read_json(self._file) if self._file is not None else None
        except ValueError:
            return None
        return value.get("deadline") if value else None

    def __bool__(self) -> bool:
        if not self._set and self._file is not None:
            self._set = self._file.exists()
        return self._set


class StopAgreement:
    """Boundaries that all ranks pass in the same order; :meth:`poll` is collective.

    Other questions that one rank answers and all must act upon at the same step travel with the flag: ``also``, by
    name. What any rank said yes to, :meth:`taken` tells all of them at one boundary.
    """

    def __init__(
        self,
        told: Callable[[], bool],
        group: dist.ProcessGroup | None,
        also: Mapping[str, Callable[[], bool]] | None = None,
    ) -> None:
        self._told = told
        self._also = dict(also or {})
        self._group = group
        self._posted: tuple[dist.Work, torch.Tensor] | None = None
        self._first = True
        self._yes: set[str] = set()
        self.agreed = False

    def poll(self) -> bool:
        """True from the boundary on at which all ranks stop."""
        if self.agreed:
            return True
        if self._group is None:
            self._yes.update(name for name, asked in self._also.items() if asked())
            self.agreed = self._told()
            return self.agreed
        if self._first:
            self._first = False
            self.agreed = self._outcome(self._post())
            return self.agreed
        before, self._posted = self._posted, self._post()
        if before is not None and self._outcome(before):
            self.drain()
            self.agreed = True
        return self.agreed

    def taken(self, name: str) -> bool:
        """Whether a rank has said yes since this was asked last."""
        yes = name in self._yes
        self._yes.discard(name)
        return yes

    def _post(self) -> tuple[dist.Work, torch.Tensor]:
        flags = torch.tensor([self._told(), *(asked() for asked in self._also.values())], dtype=torch.int32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        return work, flags

    def _outcome(self, posted: tuple[dist.Work, torch.Tensor]) -> bool:
        work, flags = posted
        work.wait()
        stop, *others = flags.tolist()
        self._yes.update(name for name, yes in zip(self._also, others, strict=True) if yes)
        return bool(stop)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Collective, and only for after the agreement: it waits."""
        if self._group is None:
            return flag
        value = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return bool(value.item())

    def least(self, value: float) -> float:
        """The smallest of all ranks' values. Collective as :meth:`any`."""
        if self._group is None:
            return value
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._group)
        return float(found.item())

    def drain(self) -> None:
        """Wait for what is in flight, so that the group can be closed."""
        if self._posted is not None:
            self._outcome(self._posted)
            self._posted = None
