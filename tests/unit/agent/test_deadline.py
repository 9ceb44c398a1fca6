"""Slurm's early warning of the time limit must not end an allocation that has time left."""

from __future__ import annotations

import pytest

from clustertrain.agent.deadline import Deadline

LIMITED = Deadline(end_time=1000.0, lead_s=20.0, signal_lead_s=120.0)


@pytest.mark.parametrize(
    ("signals", "now", "is_warning"),
    [
        (["SIGUSR2"], 890.0, True),  # at the requested time
        (["SIGUSR2", "SIGUSR2"], 830.0, True),  # up to a minute early
        (["SIGUSR2"], 500.0, False),  # far from the limit: a preemption, or a person
        (["SIGUSR2"], 985.0, False),  # time to stop anyway
        (["SIGTERM"], 890.0, False),
        (["SIGUSR2", "SIGTERM"], 890.0, False),
    ],
)
def test_which_signals_are_the_early_warning(signals: list[str], now: float, is_warning: bool) -> None:
    assert LIMITED.is_limit_warning(signals, now) is is_warning


def test_without_a_time_limit_no_signal_warns_and_no_stop_is_due() -> None:
    unlimited = Deadline(end_time=None, lead_s=20.0, signal_lead_s=120.0)
    assert not unlimited.is_limit_warning(["SIGUSR2"], 890.0)
    assert not unlimited.is_due(1e12)


def test_stop_is_due_one_lead_before_the_end() -> None:
    assert not LIMITED.is_due(979.0)
    assert LIMITED.is_due(980.0)


@pytest.mark.parametrize(
    ("sources", "lead_s"),
    [
        # scontrol update TimeLimit: Slurm warns at once, before the batch process knows the new end.
        (["signal:SIGUSR2", "batch"], 195.0),
        (["signal:SIGTERM", "signal:SIGUSR2"], 20.0),
        (["deadline"], 20.0),
    ],
)
def test_lead_depends_on_the_sources_of_the_stop(sources: list[str], lead_s: float) -> None:
    assert LIMITED.lead_for_sources(sources) == lead_s


def test_signal_of_a_user_s_own_script_requests_the_stop() -> None:
    own = Deadline(end_time=10_000.0, lead_s=20.0, signal_lead_s=120.0, own_script=True)
    assert not own.is_limit_warning(["SIGUSR2"], 9890.0)
    # Within half an hour of the end it counts as the warning of the time limit.
    assert own.lead_for_sources(["signal:SIGUSR1"]) == own.lead_for_sources(["signal:SIGTERM"]) == 1875.0
    assert own.lead_for_sources(["deadline"]) == 20.0
