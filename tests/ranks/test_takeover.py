"""An attempt whose run was taken over by a newer one ends with a reason and without another commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import clock
from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import Ranks, make_run

pytestmark = pytest.mark.ranks


def wait_for_commit(run: RunDir, ranks: Ranks, after: int) -> None:
    assert clock.wait_until(lambda: max(run.committed_steps(), default=0) > after, 120, 0.05), ranks.logs()


def test_ranks_of_taken_over_run_end_without_commit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=100_000, every=2, keep=1000)
    old = Ranks(run, 2)
    wait_for_commit(run, old, 2)
    run.attempt(2).path.mkdir()
    # torchrun would treat any other exit code as a failure, which would count.
    old.expect(0)
    results = old.results()
    assert [r["ending"] for r in results] == ["stopped", "stopped"]
    assert all("taken over by attempt 2" in r["reason"] for r in results)
    newest = max(run.committed_steps())
    assert results[0]["committed_step"] <= newest < results[0]["step"]
    new = Ranks(run, 2, attempt=2)
    wait_for_commit(run, new, newest)
    new.request_stop()
    new.expect(0)
    assert [e["step"] for e in new.events("restored")] == [newest]
