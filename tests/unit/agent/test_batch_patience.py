"""How long batch waits for agents once their nodes' results are there."""

from __future__ import annotations

from collections.abc import Container, Set
from typing import Any, cast

import pytest

from clustertrain.agent import batch
from clustertrain.agent.batch import Batch, Step


class Watching(Batch):
    """A batch that only looks at results."""

    def __init__(self, without_agent: Set[str] = frozenset(), **endings: str) -> None:
        self.nodes = ("n1", "n2")
        self.without_agent = without_agent
        self.endings = endings
        self.aborted = False

    def _results(self) -> dict[str, dict[str, Any]]:
        return {node: {"ending": ending} for node, ending in self.endings.items()}

    def _ended_agents(self, results: Container[str]) -> set[str]:
        return {n for n in self.without_agent if n not in results}

    def _abort(self, step: Step) -> None:
        self.aborted = True

    def aborts_after(self, seconds: float, *, asked_to_stop: bool = False) -> bool:
        step = Step(cast(Any, None), stop_at=1.0 if asked_to_stop else None)
        for now in (100.0, 100.0 + seconds):
            self._watch_failures(step, now)
        return self.aborted


def test_agents_whose_ranks_have_ended_by_themselves_may_make_their_files_small() -> None:
    both = {"n1": "completed", "n2": "completed"}
    assert not Watching(**both).aborts_after(batch.AFTER_RESULTS_S - 1)
    assert Watching(**both).aborts_after(batch.AFTER_RESULTS_S + 1)


@pytest.mark.parametrize("endings", [{"n1": "stopped", "n2": "stopped"}, {"n1": "failed"}])
def test_after_a_stop_or_a_failure_there_is_no_time_for_it(endings: dict[str, str]) -> None:
    assert not Watching(**endings).aborts_after(batch.AFTER_END_S - 1)
    assert Watching(**endings).aborts_after(batch.AFTER_END_S + 1)


def test_who_was_asked_to_stop_has_no_time_either_though_all_steps_were_done() -> None:
    assert Watching(n1="completed", n2="completed").aborts_after(batch.AFTER_END_S + 1, asked_to_stop=True)


def test_a_node_that_is_still_at_work_is_waited_for() -> None:
    assert not Watching(n1="completed").aborts_after(10_000.0)


def test_a_node_whose_agent_has_ended_without_a_result_is_not_waited_for() -> None:
    for endings in ({}, {"n1": "completed"}):
        killed = Watching(frozenset({"n2"}), **endings)
        assert not killed.aborts_after(batch.AFTER_END_S - 1)
        assert killed.aborts_after(batch.AFTER_END_S + 1)
    assert not Watching(frozenset({"n2"}), n1="completed", n2="completed").aborts_after(batch.AFTER_END_S + 1)
