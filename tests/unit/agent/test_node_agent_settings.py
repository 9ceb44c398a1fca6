"""The agent hands its node's settings to the ranks and writes them among the events, on a cluster and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clustertrain.agent.node_agent import NodeAgent
from clustertrain.agent.node_context import NodeContext
from clustertrain.agent.signals import Signals
from clustertrain.run import events
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler.rendezvous import Rendezvous

MEETING = Rendezvous("localhost", 29500, "x")


def agent(folder: Path, **environ: str) -> NodeAgent:
    run = RunDir(folder / "test-abcdef")
    attempt = run.attempt(1)
    attempt.events.mkdir(parents=True)
    base = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "NCCL_", "GLOO_"))}
    place = NodeContext(
        run=run, attempt=attempt, node="localhost", node_rank=0, nodes=("localhost", "localhost"), ranks_per_node=1,
        device="cpu", grace_s=None, environ={**base, **environ},
    )  # fmt: skip
    return NodeAgent(place, Signals())


def test_what_was_set_is_in_the_ranks_environment_and_among_the_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = agent(tmp_path)
    environ = one._build_environment(MEETING)
    (event,) = events.filter_by_name(events.for_attempt(one.context.attempt), "node_settings")
    assert event["node"] == "localhost"
    assert all(environ[name] == s["value"] and s["reason"] for name, s in event["settings"].items())
    assert environ["GLOO_SOCKET_IFNAME"]  # from the node, or where there is nothing to choose the way to the others
    said = capsys.readouterr().err
    assert all(f"{name}={s['value']}: {s['reason']}" in said for name, s in event["settings"].items())


def test_the_users_interface_stays(tmp_path: Path) -> None:
    one = agent(tmp_path, GLOO_SOCKET_IFNAME="chosen0")
    assert one._build_environment(MEETING)["GLOO_SOCKET_IFNAME"] == "chosen0"
    (event,) = events.filter_by_name(events.for_attempt(one.context.attempt), "node_settings")
    assert "GLOO_SOCKET_IFNAME" not in event["settings"]


def test_the_local_backend_asks_nothing_of_the_machine(tmp_path: Path) -> None:
    one = agent(tmp_path, CLUSTERTRAIN_LOCAL_JOB="/somewhere")
    assert one._build_environment(MEETING)["GLOO_SOCKET_IFNAME"] == "lo"
    assert list(events.filter_by_name(events.for_attempt(one.context.attempt), "node_settings")) == []
