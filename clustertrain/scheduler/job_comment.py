"""A line of figures in the Slurm job's comment: ``squeue -o %k`` shows it, and where the site keeps comments
(``AccountingStoreFlags=job_comment``) ``sacct -o comment``.

A user may change the comment of a job of their own; a site whose plugins forbid it is asked once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from clustertrain.errors import CommandFailed, SchedulerError
from clustertrain.scheduler import slurm

FIRST_UPDATE_S = 60.0  # after the start of an attempt
UPDATE_INTERVAL_S = 600.0  # a site's controller has other things to do
MAX_COMMENT_CHARS = 199
_PREFIX = "clustertrain run="
_SEPARATOR = " | "


class CommentMetrics(msgspec.Struct, frozen=True, kw_only=True):
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


def format_comment(metrics: CommentMetrics) -> str:
    """``clustertrain run=gpt-abc123 step=1200/10000 gpu_util=87% mem=61/80GiB power=480W goodput=93% notes=1``"""
    f = metrics
    fields = [f"{_PREFIX}{f.run}"]
    if f.step is not None:
        fields.append(f"step={f.step}" + ("" if f.total_steps is None else f"/{f.total_steps}"))
    if f.gpu_utilization is not None:
        fields.append(f"gpu_util={f.gpu_utilization:.0%}")
    if f.memory_used_gib is not None:
        total = "" if f.memory_total_gib is None else f"/{f.memory_total_gib:.0f}"
        fields.append(f"mem={f.memory_used_gib:.0f}{total}GiB")
    if f.power_w is not None:
        fields.append(f"power={f.power_w:.0f}W")
    if f.goodput is not None:
        fields.append(f"goodput={f.goodput:.0%}")
    if f.notes is not None:
        fields.append(f"notes={f.notes}")
    return " ".join(fields)[:MAX_COMMENT_CHARS]


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
            slurm.set_comment(self._job_id, append_to_comment(slurm.get_comment(self._job_id), text))
        except CommandFailed:
            return
        except SchedulerError as e:
            self.refused = True
            if self._on_event is not None:
                self._on_event("comment_refused", reason=e.message)


def append_to_comment(current: str, text: str) -> str:
    """``text`` behind what is the user's own in the comment ``current``."""
    user_text = current.partition(_PREFIX)[0].removesuffix(_SEPARATOR)
    return f"{user_text}{_SEPARATOR}{text}" if user_text.strip() else text
