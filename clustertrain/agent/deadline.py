"""When the allocation ends, and whether a signal is only Slurm's warning of that."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clustertrain import fsio

# The signal that job.sh asks for before the time limit. With preempt_send_user_signal it announces a preemption too.
LIMIT_SIGNAL = signal.SIGUSR2.name
SIGNAL_EARLY_S = 75.0  # Slurm sends it up to a minute early; and some seconds for clocks that differ


@dataclass(frozen=True)
class Deadline:
    """``deadline.json``: written by batch, read by every agent. ``end_time`` is UTC epoch s, None without a limit."""

    end_time: float | None
    lead_s: float  # when the ranks are to be told, from what was measured
    signal_lead_s: float  # when Slurm was asked to warn; fixed when the job was submitted

    def is_due(self, now: float) -> bool:
        """Time to tell the ranks."""
        return self.end_time is not None and now >= self.end_time - self.lead_s

    def is_limit_warning(self, signals: Sequence[str], now: float) -> bool:
        """Whether these signals may all be Slurm's early warning, with time left to train until :meth:`is_due`.

        Stopping at it would give away up to a minute and the lead of every allocation, and all of a short one.
        """
        if self.end_time is None or self.is_due(now):
            return False
        return set(signals) == {LIMIT_SIGNAL} and now >= self.end_time - self.signal_lead_s - SIGNAL_EARLY_S

    def lead_for_sources(self, sources: Iterable[str]) -> float:
        """How long before the end those who asked to stop may have done so because of it. With an end that was moved
        forward, Slurm's warning comes before batch knows of the new one."""
        signals = {s for s in sources if s.startswith("signal:")}
        return self.signal_lead_s + SIGNAL_EARLY_S if signals == {f"signal:{LIMIT_SIGNAL}"} else self.lead_s


def write(path: Path, deadline: Deadline) -> None:
    fsio.write_json(path, asdict(deadline))


def load(path: Path) -> Deadline | None:
    value = fsio.poll_json(path)
    return Deadline(**value) if value is not None else None
