"""How an attempt ended, for trackers, from the results of its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import fsio
from clustertrain.run.run_dir import RunDir
from clustertrain.tracking.endings import attempt_ending


@pytest.mark.parametrize(
    ("node_endings", "expected"),
    [
        ([], None),
        (["completed", "completed"], "completed"),
        (["completed", "failed"], "failed"),
        (["completed", "stopped"], None),
    ],
)
def test_ending_of_an_attempt_follows_from_all_nodes(
    tmp_path: Path, node_endings: list[str], expected: str | None
) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    assert attempt_ending(RunDir(tmp_path), 1) is None
    attempt.results.mkdir(parents=True)
    for i, ending in enumerate(node_endings):
        fsio.write_json(attempt.result_path(f"node{i}"), {"ending": ending})
    attempt.result_path("torn").write_text('{"ending": ')
    (attempt.results / "note.txt").write_text("not a result")
    assert attempt_ending(RunDir(tmp_path), 1) == expected
