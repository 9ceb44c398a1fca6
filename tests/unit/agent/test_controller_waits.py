"""How long batch waits: for agents once their nodes' results are there, and for a run folder that is away."""

from __future__ import annotations

import threading
from collections.abc import Container, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clustertrain.agent import controller
from clustertrain.agent.controller import JobController, JobStep
from clustertrain.run.results import NodeResult, RankEnding
from clustertrain.run.run_dir import RunDir


class Watching(JobController):
    """A batch that only looks at results."""

    def __init__(self, without_agent: Set[str] = frozenset(), **endings: RankEnding) -> None:
        self.nodes = ("n1", "n2")
        self.without_agent = without_agent
        self.endings = endings
        self.aborted = False

    def _read_results(self) -> dict[str, NodeResult]:
        return {node: NodeResult(ending=ending) for node, ending in self.endings.items()}

    def _nodes_without_agent(self, results: Container[str]) -> set[str]:
        return {n for n in self.without_agent if n not in results}

    def _abort(self, job_step: JobStep) -> None:
        self.aborted = True

    def aborts_after(self, seconds: float, *, asked_to_stop: bool = False) -> bool:
        job_step = JobStep(cast(Any, None), stop_requested_at=1.0 if asked_to_stop else None)
        for now in (100.0, 100.0 + seconds):
            self._watch_failures(job_step, now)
        return self.aborted


def test_agents_whose_ranks_have_ended_by_themselves_may_make_their_files_small() -> None:
    both = {"n1": "completed", "n2": "completed"}
    assert not Watching(**both).aborts_after(controller.AFTER_RESULTS_S - 1)
    assert Watching(**both).aborts_after(controller.AFTER_RESULTS_S + 1)


@pytest.mark.parametrize("endings", [{"n1": "stopped", "n2": "stopped"}, {"n1": "failed"}])
def test_after_a_stop_or_a_failure_there_is_no_time_for_it(endings: dict[str, RankEnding]) -> None:
    assert not Watching(**endings).aborts_after(controller.AFTER_END_S - 1)
    assert Watching(**endings).aborts_after(controller.AFTER_END_S + 1)


def test_who_was_asked_to_stop_has_no_time_either_though_all_steps_were_done() -> None:
    assert Watching(n1="completed", n2="completed").aborts_after(controller.AFTER_END_S + 1, asked_to_stop=True)


def test_a_node_that_is_still_at_work_is_waited_for() -> None:
    assert not Watching(n1="completed").aborts_after(10_000.0)


def test_a_node_whose_agent_has_ended_without_a_result_is_not_waited_for() -> None:
    for endings in ({}, {"n1": "completed"}):
        killed = Watching(frozenset({"n2"}), **endings)
        assert not killed.aborts_after(controller.AFTER_END_S - 1)
        assert killed.aborts_after(controller.AFTER_END_S + 1)
    assert not Watching(frozenset({"n2"}), n1="completed", n2="completed").aborts_after(controller.AFTER_END_S + 1)


class Owner(JobController):
    """A batch that only looks after its run's folder."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self.attempt = self.run.attempt(1)
        self.signals = cast(Any, SimpleNamespace(received=[]))


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    monkeypatch.setattr(controller, "CHECK_INTERVAL_S", 0.02)
    (tmp_path / "run" / "attempts" / "1").mkdir(parents=True)
    return Owner(tmp_path / "run")


@pytest.mark.parametrize(("newest", "lost"), [(1, ""), (2, "taken over by attempt 2")])
def test_a_run_folder_that_is_away_for_a_while_is_waited_for(owner: Owner, newest: int, lost: str) -> None:
    away = owner.run.path.rename(owner.run.path.with_name("elsewhere"))
    (away / "attempts" / str(newest)).mkdir(exist_ok=True)
    back = threading.Timer(0.3, away.rename, [owner.run.path])
    back.start()
    assert owner._lost_reason(JobStep(cast(Any, None))) == lost
    back.join()


def test_a_run_folder_that_stays_away_is_gone(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "FOLDER_S", 0.1)
    owner.run.path.rename(owner.run.path.with_name("elsewhere"))
    assert "the run folder is gone" in owner._lost_reason(JobStep(cast(Any, None)))


def test_a_signal_ends_the_wait_for_the_folder(owner: Owner) -> None:
    owner.run.path.rename(owner.run.path.with_name("elsewhere"))
    soon = threading.Timer(0.2, owner.signals.received.append, ["SIGTERM"])
    soon.start()
    assert "the run folder is gone" in owner._lost_reason(JobStep(cast(Any, None)))  # not after a minute
    soon.join()
