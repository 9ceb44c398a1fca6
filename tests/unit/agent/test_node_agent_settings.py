"""The agent passes its node's settings to the ranks and records them as an event, but only on a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from clustertrain.agent.environment_copy import Stopped
from clustertrain.agent.node_agent import NodeAgent
from clustertrain.agent.node_context import NodeContext
from clustertrain.agent.signals import Signals
from clustertrain.run import events
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.rendezvous import Rendezvous

RENDEZVOUS = Rendezvous("localhost", 29500, "x")


def agent(folder: Path, **environ: str) -> NodeAgent:
    run = RunDir(folder / "test-abcdef")
    attempt = run.attempt(1)
    attempt.events.mkdir(parents=True)
    base = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "NCCL_", "GLOO_"))}
    context = NodeContext(
        run=run, attempt=attempt, node="localhost", node_rank=0, nodes=("localhost", "localhost"), ranks_per_node=1,
        device="cpu", grace_s=None, environ={**base, **environ},
    )  # fmt: skip
    with mock.patch("tempfile.tempdir", str(folder)):  # nobody removes the ranks' folder
        return NodeAgent(context, Signals())


def test_node_settings_are_in_ranks_environment_and_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node_agent = agent(tmp_path)
    environ = node_agent._build_environment(RENDEZVOUS)
    (event,) = events.filter_by_name(events.for_attempt(node_agent.context.attempt), "node_settings")
    assert event["node"] == "localhost"
    assert all(environ[name] == s["value"] and s["reason"] for name, s in event["settings"].items())
    assert environ["GLOO_SOCKET_IFNAME"]  # the node's setting, or the interface of the route to the other nodes
    stderr = capsys.readouterr().err
    assert all(f"{name}={s['value']}: {s['reason']}" in stderr for name, s in event["settings"].items())


def test_network_interface_set_by_the_user_stays(tmp_path: Path) -> None:
    node_agent = agent(tmp_path, GLOO_SOCKET_IFNAME="chosen0")
    assert node_agent._build_environment(RENDEZVOUS)["GLOO_SOCKET_IFNAME"] == "chosen0"
    (event,) = events.filter_by_name(events.for_attempt(node_agent.context.attempt), "node_settings")
    assert "GLOO_SOCKET_IFNAME" not in event["settings"]


def test_local_backend_does_not_inspect_the_node(tmp_path: Path) -> None:
    node_agent = agent(tmp_path, CLUSTERTRAIN_LOCAL_JOB="/somewhere")
    assert node_agent._build_environment(RENDEZVOUS)["GLOO_SOCKET_IFNAME"] == "lo"
    assert list(events.filter_by_name(events.for_attempt(node_agent.context.attempt), "node_settings")) == []


def test_stop_before_the_ranks_start_is_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent was unpacking the environment."""
    node_agent = agent(tmp_path)
    node_agent.signals.received.append("SIGTERM")
    monkeypatch.setattr(node_agent, "_copy_environment", mock.Mock(side_effect=Stopped))
    result = node_agent._run_ranks()
    assert (result.ending, result.exit_code, result.reason) == ("stopped", 75, "stopped before the ranks were started")
    (event,) = events.filter_by_name(events.for_attempt(node_agent.context.attempt), "signal")
    assert event["source"] == "signal:SIGTERM"
