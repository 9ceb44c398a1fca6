"""How long the batch process waits: for agents after their nodes' results, and for a missing run folder."""

from __future__ import annotations

import threading
from collections.abc import Container, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clustertrain.agent import batch_process
from clustertrain.agent.batch_process import BatchProcess, JobStep
from clustertrain.run.results import NodeResult, RankEnding
from clustertrain.run.run_dir import RunDir


class FailureWatcher(BatchProcess):
    """A batch process that only reads results."""

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


def test_agents_get_time_to_compact_after_all_ranks_completed() -> None:
    both = {"n1": "completed", "n2": "completed"}
    assert not FailureWatcher(**both).aborts_after(batch_process.AFTER_RESULTS_S - 1)
    assert FailureWatcher(**both).aborts_after(batch_process.AFTER_RESULTS_S + 1)


@pytest.mark.parametrize("endings", [{"n1": "stopped", "n2": "stopped"}, {"n1": "failed"}])
def test_agents_get_no_time_to_compact_after_stop_or_failure(endings: dict[str, RankEnding]) -> None:
    assert not FailureWatcher(**endings).aborts_after(batch_process.AFTER_END_S - 1)
    assert FailureWatcher(**endings).aborts_after(batch_process.AFTER_END_S + 1)


def test_agents_get_no_time_to_compact_after_a_stop_request() -> None:
    assert FailureWatcher(n1="completed", n2="completed").aborts_after(
        batch_process.AFTER_END_S + 1, asked_to_stop=True
    )


def test_batch_waits_for_a_node_that_still_works() -> None:
    assert not FailureWatcher(n1="completed").aborts_after(10_000.0)


def test_batch_does_not_wait_for_a_node_without_agent_or_result() -> None:
    for endings in ({}, {"n1": "completed"}):
        killed = FailureWatcher(frozenset({"n2"}), **endings)
        assert not killed.aborts_after(batch_process.AFTER_END_S - 1)
        assert killed.aborts_after(batch_process.AFTER_END_S + 1)
    assert not FailureWatcher(frozenset({"n2"}), n1="completed", n2="completed").aborts_after(
        batch_process.AFTER_END_S + 1
    )


class FolderWatcher(BatchProcess):
    """A batch process that only watches its run folder."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self.attempt = self.run.attempt(1)
        self.signals = cast(Any, SimpleNamespace(received=[]))


@pytest.fixture
def watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderWatcher:
    monkeypatch.setattr(batch_process, "CHECK_INTERVAL_S", 0.02)
    (tmp_path / "run" / "attempts" / "1").mkdir(parents=True)
    return FolderWatcher(tmp_path / "run")


@pytest.mark.parametrize(("newest", "lost"), [(1, ""), (2, "taken over by attempt 2")])
def test_batch_waits_for_a_run_folder_that_comes_back(watcher: FolderWatcher, newest: int, lost: str) -> None:
    moved = watcher.run.path.rename(watcher.run.path.with_name("elsewhere"))
    (moved / "attempts" / str(newest)).mkdir(exist_ok=True)
    timer = threading.Timer(0.3, moved.rename, [watcher.run.path])
    timer.start()
    assert watcher._lost_reason(JobStep(cast(Any, None))) == lost
    timer.join()


def test_run_folder_that_stays_away_is_reported_as_gone(
    watcher: FolderWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_process, "FOLDER_S", 0.1)
    watcher.run.path.rename(watcher.run.path.with_name("elsewhere"))
    assert "the run folder is gone" in watcher._lost_reason(JobStep(cast(Any, None)))


def test_signal_ends_the_wait_for_the_run_folder(watcher: FolderWatcher) -> None:
    watcher.run.path.rename(watcher.run.path.with_name("elsewhere"))
    timer = threading.Timer(0.2, watcher.signals.received.append, ["SIGTERM"])
    timer.start()
    assert "the run folder is gone" in watcher._lost_reason(JobStep(cast(Any, None)))  # not after a minute
    timer.join()
