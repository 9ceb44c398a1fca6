"""Metrics of the run in the comment of its Slurm job.

``squeue -o %k`` shows it, and ``sacct -o comment`` if the site stores comments (``AccountingStoreFlags=job_comment``).
Users may change the comments of their jobs, unless a site's plugins forbid it: then there is no second try.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from clustertrain.errors import CommandFailed, SchedulerError
from clustertrain.scheduler import slurm

FIRST_UPDATE_S = 60.0  # after the start of an attempt
UPDATE_INTERVAL_S = 600.0  # seldom, to spare the site's controller
MAX_COMMENT_CHARS = 199
_PREFIX = "clustertrain run="
_SEPARATOR = " | "


class CommentMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics in a comment; None if unknown."""

    run: str
    step: int | None = None
    total_steps: int | None = None
    gpu_utilization: float | None = None
    """Mean of all GPUs."""
    memory_used_gib: float | None = None
    """Peak of the GPU that used most."""
    memory_total_gib: float | None = None
    """Memory of the same GPU."""
    power_w: float | None = None
    """Mean per GPU."""
    goodput: float | None = None
    insights: int | None = None
    """Number of insights in the report, without those of severity info."""


def format_comment(metrics: CommentMetrics) -> str:
    """Return the comment, for example ``clustertrain run=gpt-abc123 step=1200/10000 gpu_util=87% mem=61/80GiB``."""
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
    if f.insights is not None:
        fields.append(f"insights={f.insights}")
    return " ".join(fields)[:MAX_COMMENT_CHARS]


class JobComment:
    """The comment of one job. Text of the user, from the submission or later, stays in front of ours."""

    def __init__(self, job_id: str, on_event: Callable[..., Any] | None = None) -> None:
        """``on_event`` is called as ``on_event("comment_refused", reason=…)``, at most once."""
        self._job_id = job_id
        self._on_event = on_event
        self.refused = False

    def update(self, text: str) -> None:
        """Replace our last text by ``text``. Without an answer the next update tries again; a refusal ends updates."""
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
    """Return ``text`` after the user's part of the comment ``current``."""
    user_text = current.partition(_PREFIX)[0].removesuffix(_SEPARATOR)
    return f"{user_text}{_SEPARATOR}{text}" if user_text.strip() else text
