"""Progress of commands: steps that begin again, and checkpoints that only the next attempt has found."""

from __future__ import annotations

from pathlib import Path

from clustertrain.run import attempts
from tests.unit.run.histories import History


def test_committed_steps_of_earlier_attempts_are_the_start_of_one_that_restored_none(tmp_path: Path) -> None:
    history = History(tmp_path)
    for n, (restored, committed) in enumerate([(None, 20), (None, 10), (None, 30), (10, 15)], start=1):
        attempt = history.attempt(n, 100.0 * n)
        attempt.t = 100.0 * n + 5
        if restored is not None:
            attempt.timed_event("restored", "restore_s", 1.0, step=restored)
        attempt.step((restored or 0) + 1, 1.0)
        attempt.timed_event("checkpoint", "stall_s", 1.0, step=committed, save_s=1.0)
        attempt.batch_event(100.0 * n + 50, "ended", ending="time_limit")
        attempt.write()
    loaded = attempts.load_attempts(history.run)
    assert [(a.earlier_step, a.made_progress) for a in loaded] == [(0, True), (20, False), (20, True), (30, True)]
