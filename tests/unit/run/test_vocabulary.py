"""The words for states and endings: each is explained, and those of earlier versions are still read."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from clustertrain import fsio
from clustertrain.report.status import STATE_STYLES
from clustertrain.run import attempts, endings, events, results, state
from clustertrain.run.run_dir import RunDir


def test_every_word_is_explained() -> None:
    assert set(endings.DESCRIPTIONS) == set(get_args(endings.Ending))
    own = {value for name, value in vars(state).items() if name.isupper() and isinstance(value, str)}
    assert set(state.DESCRIPTIONS) == own and own > state.FINAL
    assert set(STATE_STYLES) <= own | set(endings.DESCRIPTIONS)


def test_words_that_states_and_endings_share_mean_the_same() -> None:
    shared = set(state.DESCRIPTIONS) & set(endings.DESCRIPTIONS)
    assert shared == state.FINAL


def test_ending_of_an_earlier_version(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "net-abc234")
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    fsio.write_json(attempt.record, {"job_id": "local-1", "nodes": ["a"], "host": "a", "t": 1.0, "restart": 0})
    log = fsio.JsonlAppender(attempt.events_path("batch"))
    log.append({"t": 2.0, "event": "ended", "ending": "user_error", "reason": "ValueError"})
    log.close()
    assert attempts.load_attempt(run, attempt).ending == endings.FAILED
    assert [e["ending"] for e in events.for_attempt(attempt)] == ["failed"]
    assert [endings.current_name(x) for x in ("hang", None, 3, ["x"])] == ["hang", None, 3, ["x"]]


def test_failure_kind_of_an_earlier_version() -> None:
    rank = {"rank": 1, "ending": "failed", "kind": "user_error"}
    node = results.parse_node_result({"node": "a", "ending": "failed", "kind": "user_error", "ranks": [rank]})
    assert node is not None and (node.kind, node.ranks[0].kind) == ("error", "error")
    record = results.parse_rank_result(rank)
    assert record is not None and record.kind == "error"
