"""An attempt that goes on though a newer one has claimed its run: it commits nothing, says why and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain import clock
from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import Ranks, make_run

pytestmark = pytest.mark.ranks


def wait_for_commit(run: RunDir, ranks: Ranks, after: int) -> None:
    assert clock.wait_until(lambda: max(run.committed_steps(), default=0) > after, 120, 0.05), ranks.logs()


def test_ranks_of_replaced_attempt_do_not_commit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=100_000, every=2, keep=1000)
    old = Ranks(run, 2)
    wait_for_commit(run, old, 2)
    run.attempt(2).path.mkdir()
    # No failure, which would be charged: torchrun takes any other code for one.
    old.expect(0)
    found = old.results()
    assert [r["ending"] for r in found] == ["stopped", "stopped"]
    assert all("taken over by attempt 2" in r["reason"] for r in found)
    left = max(run.committed_steps())
    assert found[0]["committed_step"] <= left < found[0]["step"]
    new = Ranks(run, 2, attempt=2)
    wait_for_commit(run, new, left)
    new.tell_to_stop()
    new.expect(0)
    assert [e["step"] for e in new.events("restored")] == [left]
