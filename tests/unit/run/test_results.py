"""The results of ranks and nodes, including those from a later version or a damaged disk."""

from __future__ import annotations

import msgspec
import pytest

from clustertrain.run import event_types, events
from clustertrain.run.results import LastSeen, NodeResult, RankOutcome, RankResult, parse_node_result, parse_rank_result


def test_results_keep_their_keys_on_disk() -> None:
    record = msgspec.to_builtins(RankResult(rank=1, ending="stopped", reason="asked", budget_spent=True))
    assert list(record) == [
        "rank", "local_rank", "ending", "finished", "step", "committed_step", "exit_code", "kind", "reason",
        "budget_spent", "error", "ended_by_signal", "peak_allocated_gib",
    ]  # fmt: skip
    node = msgspec.to_builtins(NodeResult(node="a", ending="failed", ranks=(RankOutcome(ending="failed"),)))
    assert list(node) == [
        "node", "node_rank", "ending", "kind", "exit_code", "step", "committed_step", "message", "ranks", "reason",
        "budget_spent",
    ]  # fmt: skip


def test_results_of_another_version_are_read() -> None:
    document = {
        "node": "a", "ending": "failed", "kind": "moonphase", "later": 1,
        "ranks": [{"rank": 1, "ending": "failed", "last_seen": {"step": 3}}, {"rank": 2, "ending": "asleep"}, 7],
    }  # fmt: skip
    result = parse_node_result(document)
    assert result is not None and (result.ending, result.kind) == ("failed", None)
    assert result.ranks == (RankOutcome(rank=1, ending="failed", last_seen=LastSeen(step=3)),)


@pytest.mark.parametrize("document", [None, [], "completed", {}, {"ending": 3}, {"ending": "asleep"}], ids=repr)
def test_documents_without_an_ending_are_not_results(document: object) -> None:
    assert parse_rank_result(document) is None
    assert parse_node_result(document) is None


def test_fields_with_wrong_types_are_omitted() -> None:
    result = parse_rank_result({"rank": 2, "ending": "completed", "step": "x", "reason": 4, "committed_step": 8})
    assert result == RankResult(rank=2, ending="completed", committed_step=8)


@pytest.mark.parametrize(("number", "expected"), [(3.0, 3), (3.5, None), (1e300, None), (True, None)])
def test_integer_fields_take_floats_without_a_fraction(number: object, expected: int | None) -> None:
    result = parse_rank_result({"ending": "stopped", "step": number, "peak_allocated_gib": 2.0})
    assert result == RankResult(ending="stopped", step=expected, peak_allocated_gib=2.0)
    event = {"event": "first_step", "t": 1.0, "total": number}
    assert [e.total for e in events.select([event], event_types.FirstStep)] == [expected]
