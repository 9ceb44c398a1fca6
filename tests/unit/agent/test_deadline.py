"""Slurm's early warning of the time limit must not end an allocation that has time left."""

from __future__ import annotations

import pytest

from clustertrain.agent.deadline import Deadline

LIMITED = Deadline(end_time=1000.0, lead_s=20.0, signal_lead_s=120.0)


@pytest.mark.parametrize(
    ("signals", "now", "explained"),
    [
        (["SIGUSR2"], 890.0, True),  # as asked for
        (["SIGUSR2", "SIGUSR2"], 830.0, True),  # up to a minute early
        (["SIGUSR2"], 500.0, False),  # far from the limit: a preemption, or a person
        (["SIGUSR2"], 985.0, False),  # time to stop anyway
        (["SIGTERM"], 890.0, False),
        (["SIGUSR2", "SIGTERM"], 890.0, False),
    ],
)
def test_which_signals_the_time_limit_explains(signals: list[str], now: float, explained: bool) -> None:
    assert LIMITED.is_limit_warning(signals, now) is explained


def test_without_a_limit_every_signal_is_a_request_to_stop() -> None:
    unlimited = Deadline(end_time=None, lead_s=20.0, signal_lead_s=120.0)
    assert not unlimited.is_limit_warning(["SIGUSR2"], 890.0)
    assert not unlimited.is_due(1e12)


def test_the_ranks_are_told_by_the_measured_lead() -> None:
    assert not LIMITED.is_due(979.0)
    assert LIMITED.is_due(980.0)


@pytest.mark.parametrize(
    ("sources", "lead_s"),
    [
        # scontrol update TimeLimit: Slurm warns at once, before batch knows of the new end.
        (["signal:SIGUSR2", "batch"], 195.0),
        (["signal:SIGTERM", "signal:SIGUSR2"], 20.0),
        (["deadline"], 20.0),
    ],
)
def test_how_early_a_stop_may_be_because_of_the_limit(sources: list[str], lead_s: float) -> None:
    assert LIMITED.lead_for_sources(sources) == lead_s
