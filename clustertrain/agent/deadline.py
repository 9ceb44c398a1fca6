"""The end of the allocation, and Slurm's warning signal before it."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clustertrain import fsio

# The signal that job.sh requests before the time limit. With preempt_send_user_signal it also announces preemptions.
LIMIT_SIGNAL = signal.SIGUSR2.name
SIGNAL_EARLY_S = 75.0  # Slurm sends it up to a minute early; the rest allows for clocks that differ
OWN_WARNINGS = frozenset({f"signal:{s.name}" for s in (signal.SIGUSR1, signal.SIGUSR2)})
OWN_SIGNAL_LEAD_S = 1800.0  # a user's own `--signal` this close to the end is the warning of the time limit


@dataclass(frozen=True)
class Deadline:
    """The content of ``deadline.json``, which the batch process writes and every agent reads."""

    end_time: float | None
    """UTC epoch s; None without a time limit."""
    lead_s: float
    """Seconds before the end at which the ranks are asked to stop, from measured saves."""
    signal_lead_s: float
    """Seconds before the end at which Slurm sends its warning; fixed at submission."""
    own_script: bool = False
    """The batch script is the user's own. The lead of its ``--signal`` is unknown, and the signal requests the stop."""

    def is_due(self, now: float) -> bool:
        """Return whether it is time to stop the ranks."""
        return self.end_time is not None and now >= self.end_time - self.lead_s

    def is_limit_warning(self, signals: Sequence[str], now: float) -> bool:
        """Return whether these signals may all be Slurm's early warning, with time left to train until :meth:`is_due`.

        A stop at the warning would waste up to a minute of every allocation, and all of a short one.
        """
        if self.own_script or self.end_time is None or self.is_due(now):
            return False
        return set(signals) == {LIMIT_SIGNAL} and now >= self.end_time - self.signal_lead_s - SIGNAL_EARLY_S

    def lead_for_sources(self, sources: Iterable[str]) -> float:
        """Return how long before the end a stop from ``sources`` may have been caused by it.

        If the end was moved forward, Slurm's warning comes before the batch process knows the new end.
        """
        signals = {s for s in sources if s.startswith("signal:")}
        if self.own_script and signals:
            return OWN_SIGNAL_LEAD_S + SIGNAL_EARLY_S
        return self.signal_lead_s + SIGNAL_EARLY_S if signals == {f"signal:{LIMIT_SIGNAL}"} else self.lead_s


def write_deadline(path: Path, deadline: Deadline) -> None:
    fsio.write_json(path, asdict(deadline))


def load_deadline(path: Path) -> Deadline | None:
    value = fsio.poll_json(path)
    return Deadline(**value) if value is not None else None
