"""A line of figures in the Slurm job's comment: ``squeue -o %k`` shows it, and where the site keeps comments
(``AccountingStoreFlags=job_comment``) ``sacct -o comment``.

A user may change the comment of a job of their own; a site whose plugins forbid it is asked once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from clustertrain.errors import CommandFailed, SchedulerRefused
from clustertrain.scheduler import slurm

FIRST_S = 60.0  # after the start of an attempt
EVERY_S = 600.0  # a site's controller has other things to do
LONGEST = 199
_OURS = "clustertrain run="
_BETWEEN = " | "


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """None where something is not known. ``gpu_utilization`` is the mean of all GPUs, ``memory_used_gib`` the most that
    one has used and ``memory_total_gib`` what that one has, ``power_w`` the mean of a GPU; ``notes`` those of the
    report that are no mere information."""

    run: str
    step: int | None = None
    total_steps: int | None = None
    gpu_utilization: float | None = None
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    goodput: float | None = None
    notes: int | None = None


def comment_of(figures: Figures) -> str:
    """``clustertrain run=gpt-abc123 step=1200/10000 gpu_util=87% mem=61/80GiB power=480W goodput=93% notes=1``"""
    f = figures
    words = [f"{_OURS}{f.run}"]
    if f.step is not None:
        words.append(f"step={f.step}" + ("" if f.total_steps is None else f"/{f.total_steps}"))
    if f.gpu_utilization is not None:
        words.append(f"gpu_util={f.gpu_utilization:.0%}")
    if f.memory_used_gib is not None:
        of = "" if f.memory_total_gib is None else f"/{f.memory_total_gib:.0f}"
        words.append(f"mem={f.memory_used_gib:.0f}{of}GiB")
    if f.power_w is not None:
        words.append(f"power={f.power_w:.0f}W")
    if f.goodput is not None:
        words.append(f"goodput={f.goodput:.0%}")
    if f.notes is not None:
        words.append(f"notes={f.notes}")
    return " ".join(words)[:LONGEST]


class JobComment:
    """The comment of one job. What the user has written there, at submission or since, stays in front of ours."""

    def __init__(self, job_id: str, on_event: Callable[..., Any] | None = None) -> None:
        """``on_event``: called as ``on_event("comment_refused", reason=…)``, once at most."""
        self._job_id = job_id
        self._on_event = on_event
        self.refused = False

    def update(self, text: str) -> None:
        """Put ``text`` in the place of our last one. An answer that does not come is waited for next time; after a
        refusal nothing is asked any more."""
        if self.refused:
            return
        try:
            slurm.set_comment(self._job_id, joined(slurm.comment(self._job_id), text))
        except CommandFailed:
            return
        except SchedulerRefused as e:
            self.refused = True
            if self._on_event is not None:
                self._on_event("comment_refused", reason=e.message)


def joined(now: str, text: str) -> str:
    """``text`` behind what is the user's own in the comment ``now``."""
    theirs = now.partition(_OURS)[0].removesuffix(_BETWEEN)
    return f"{theirs}{_BETWEEN}{text}" if theirs.strip() else text
