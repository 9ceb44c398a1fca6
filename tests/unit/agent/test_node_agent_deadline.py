"""Nothing but the checkpoint gets time between a word to stop and the end of a node."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock, fsio
from clustertrain.agent.deadline import Deadline
from clustertrain.agent.node_agent import NodeAgent
from clustertrain.agent.telemetry import NodeTelemetry
from clustertrain.run.results import NodeResult, RankEnding
from tests.unit.agent.test_node_agent_settings import agent


@pytest.fixture
def compacted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that an agent compacts."""
    done: list[str] = []
    monkeypatch.setattr(NodeTelemetry, "compact", lambda self, interrupted: done.append("compacted"))
    return done


def ends(
    one: NodeAgent, monkeypatch: pytest.MonkeyPatch, ending: RankEnding, order: dict[str, Any] | None = None
) -> None:
    """Runs the agent, whose ranks end at once."""
    one.context.attempt.results.mkdir()
    one.context.run.spec.write_text("version = 1\n")

    def ranks(self: NodeAgent) -> NodeResult:
        if order is not None:
            fsio.write_json(self.context.attempt.stop_request, order)
        return NodeResult(node="localhost", ending=ending, exit_code=0, step=7, committed_step=7)

    monkeypatch.setattr(NodeAgent, "_run_ranks", ranks)
    one.run()


def test_ranks_that_ended_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: list[str]) -> None:
    ends(agent(tmp_path), monkeypatch, "completed")
    assert compacted == ["compacted"]


def test_ranks_that_stopped_though_nobody_told_this_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: list[str]
) -> None:
    ends(agent(tmp_path), monkeypatch, "stopped")
    assert compacted == []


@pytest.mark.parametrize("order", [{"reason": "signal:SIGTERM"}, {"abort": True}])
def test_an_order_that_came_with_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: list[str], order: dict[str, Any]
) -> None:
    ends(agent(tmp_path), monkeypatch, "completed", order)
    assert compacted == []


def test_the_ranks_have_the_word_before_anything_else_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = agent(tmp_path)
    seen: list[bool] = []

    class Slow:
        def suspend(self) -> None:
            seen.append((one.rank_dir / "stop").exists())

    one.telemetry = Slow()  # type: ignore[assignment]
    one._stop_ranks("signal:SIGTERM", None)
    assert seen == [True]


@pytest.fixture
def warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeAgent:
    """Return an agent that got Slurm's early warning 60 s before the end; ranks are to stop 30 s before it."""
    monkeypatch.setattr(clock, "now", lambda: 1000.0)
    one = agent(tmp_path)
    one.context = dataclasses.replace(one.context, grace_s=5.0)
    one.deadline = Deadline(end_time=1060.0, lead_s=30.0, signal_lead_s=60.0)
    one.signals.received.append("SIGUSR2")
    one._handle_signals()
    assert one.stop_source is None and one.context.attempt.signal_warning.exists()
    return one


def test_early_warning_that_becomes_due_leaves_time_until_the_end(
    warned: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 1031.0)
    warned._handle_signals()
    order = fsio.read_json(warned.rank_dir / "stop")
    assert (order["source"], order["deadline"]) == ("deadline", 1060.0)


def test_another_signal_after_the_early_warning_has_the_grace_time(warned: NodeAgent) -> None:
    warned.signals.received.append("SIGTERM")
    warned._handle_signals()
    order = fsio.read_json(warned.rank_dir / "stop")
    assert (order["source"], order["deadline"]) == ("signal:SIGUSR2", 1005.0)


def test_signal_near_the_end_without_a_warning_has_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 1031.0)
    one = agent(tmp_path)
    one.context = dataclasses.replace(one.context, grace_s=5.0)
    one.deadline = Deadline(end_time=1060.0, lead_s=30.0, signal_lead_s=60.0)
    one.signals.received.append("SIGUSR2")
    one._handle_signals()
    assert fsio.read_json(one.rank_dir / "stop")["deadline"] == 1036.0
