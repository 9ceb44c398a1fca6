"""After a request to stop, only the checkpoint gets time: no compaction, and the right deadline."""

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
    """Collect one entry per compaction."""
    done: list[str] = []
    monkeypatch.setattr(NodeTelemetry, "compact", lambda self, interrupted: done.append("compacted"))
    return done


def run_agent(
    node_agent: NodeAgent, monkeypatch: pytest.MonkeyPatch, ending: RankEnding, request: dict[str, Any] | None = None
) -> None:
    """Run the agent with ranks that end at once."""
    node_agent.context.attempt.results.mkdir()
    node_agent.context.run.spec.write_text("version = 1\n")

    def ranks(self: NodeAgent) -> NodeResult:
        if request is not None:
            fsio.write_json(self.context.attempt.stop_request, request)
        return NodeResult(node="localhost", ending=ending, exit_code=0, step=7, committed_step=7)

    monkeypatch.setattr(NodeAgent, "_run_ranks", ranks)
    node_agent.run()


def test_telemetry_is_compacted_after_ranks_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: list[str]
) -> None:
    run_agent(agent(tmp_path), monkeypatch, "completed")
    assert compacted == ["compacted"]


def test_telemetry_is_not_compacted_after_ranks_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: list[str]
) -> None:
    run_agent(agent(tmp_path), monkeypatch, "stopped")
    assert compacted == []


@pytest.mark.parametrize("stop_request", [{"reason": "signal:SIGTERM"}, {"abort": True}], ids=["stop", "abort"])
def test_telemetry_is_not_compacted_after_a_late_stop_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: list[str], stop_request: dict[str, Any]
) -> None:
    run_agent(agent(tmp_path), monkeypatch, "completed", stop_request)
    assert compacted == []


def test_ranks_get_the_stop_request_before_telemetry_suspends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_agent = agent(tmp_path)
    seen: list[bool] = []

    class FakeTelemetry:
        def suspend(self) -> None:
            seen.append((node_agent.rank_dir / "stop").exists())

    node_agent.telemetry = FakeTelemetry()  # type: ignore[assignment]
    node_agent._stop_ranks("signal:SIGTERM", None)
    assert seen == [True]


@pytest.fixture
def warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeAgent:
    """An agent that got Slurm's early warning 60 s before the end; ranks are to stop 30 s before the end."""
    monkeypatch.setattr(clock, "now", lambda: 1000.0)
    node_agent = agent(tmp_path)
    node_agent.context = dataclasses.replace(node_agent.context, grace_s=5.0)
    node_agent.deadline = Deadline(end_time=1060.0, lead_s=30.0, signal_lead_s=60.0)
    node_agent.signals.received.append("SIGUSR2")
    node_agent._handle_signals()
    assert node_agent.stop_source is None and node_agent.context.attempt.signal_warning.exists()
    return node_agent


def test_due_early_warning_has_the_time_until_the_end(warned: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: 1031.0)
    warned._handle_signals()
    request = fsio.read_json(warned.rank_dir / "stop")
    assert (request["source"], request["deadline"]) == ("deadline", 1060.0)


def test_signal_after_the_early_warning_has_the_grace_time(warned: NodeAgent) -> None:
    warned.signals.received.append("SIGTERM")
    warned._handle_signals()
    request = fsio.read_json(warned.rank_dir / "stop")
    assert (request["source"], request["deadline"]) == ("signal:SIGUSR2", 1005.0)


def test_signal_of_a_requeue_by_hand_leaves_the_time_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 1000.0)
    node_agent = agent(tmp_path)
    node_agent.context = dataclasses.replace(node_agent.context, grace_s=5.0)
    node_agent.deadline = Deadline(end_time=9000.0, lead_s=30.0, signal_lead_s=60.0)
    fsio.write_json(node_agent.context.attempt.stop_request, {"reason": "requeue", "t": 999.0})
    node_agent.signals.received.append("SIGUSR2")
    node_agent._handle_signals()
    request = fsio.read_json(node_agent.rank_dir / "stop")
    assert (request["source"], request["deadline"]) == ("batch", 9000.0)


def test_signal_near_the_end_without_a_warning_has_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 1031.0)
    node_agent = agent(tmp_path)
    node_agent.context = dataclasses.replace(node_agent.context, grace_s=5.0)
    node_agent.deadline = Deadline(end_time=1060.0, lead_s=30.0, signal_lead_s=60.0)
    node_agent.signals.received.append("SIGUSR2")
    node_agent._handle_signals()
    assert fsio.read_json(node_agent.rank_dir / "stop")["deadline"] == 1036.0


@pytest.mark.parametrize(("signal", "deadline"), [("SIGUSR1", 1300.0), ("SIGTERM", 1005.0)])
def test_warning_of_a_user_s_own_script_leaves_the_time_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: str, deadline: float
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 1000.0)
    node_agent = agent(tmp_path)
    node_agent.context = dataclasses.replace(node_agent.context, grace_s=5.0)
    node_agent.deadline = Deadline(end_time=1300.0, lead_s=30.0, signal_lead_s=60.0, own_script=True)
    node_agent.signals.received.append(signal)
    node_agent._handle_signals()
    assert fsio.read_json(node_agent.rank_dir / "stop")["deadline"] == deadline
