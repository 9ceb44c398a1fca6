"""Nothing but the checkpoint gets time between a word to stop and the end of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
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
