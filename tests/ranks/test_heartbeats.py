"""Heartbeats of running ranks, read as the node agent does."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from clustertrain import clock, fsio
from clustertrain.run import attempts, heartbeat
from clustertrain.run.heartbeat import PHASES, Heartbeat, HeartbeatReader
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage import goodput
from tests import runs
from tests.ranks.rank_pool import SEQ_LEN, Ranks, make_run
from tests.runs import LOCAL, Run

pytestmark = pytest.mark.ranks

# At certain points, a rank requests an observation and waits until its heartbeat has been read.
SCRIPT = """
import os
import sys
import time
from pathlib import Path
import clustertrain as ct
from clustertrain import settings

def wait_until_observed():
    request = Path(sys.argv[1]) / os.environ["RANK"]
    request.with_suffix(".new").write_text(os.environ[settings.RANK_DIR])
    request.with_suffix(".new").rename(request)
    while request.exists():
        time.sleep(0.005)

class Slow:
    def state_dict(self):
        wait_until_observed()
        return {}

    def load_state_dict(self, state):
        pass

with ct.session() as s:
    s.tokens_per_step = 100
    wait_until_observed()
    for step in s.steps(total=8, state={"slow": Slow()}, checkpoint_every=5):
        wait_until_observed()
        if step == 2:
            with s.evaluation():
                wait_until_observed()
            wait_until_observed()
    wait_until_observed()
"""


def observe(run: Run, requests: Path) -> dict[int, list[Heartbeat]]:
    """Return the heartbeats of both ranks that were observed until the end of the run, by rank."""
    heartbeats_by_rank: dict[int, list[Heartbeat]] = defaultdict(list)
    readers: dict[Path, HeartbeatReader] = {}

    def observe_once() -> bool:
        pending = [path for path in requests.iterdir() if path.suffix != ".new"]
        for path in pending[:1] if not readers else []:
            folder = Path(path.read_text())
            readers[folder] = HeartbeatReader(folder, [0, 1])
        for reader in readers.values():
            for rank, beat in reader.read().items():
                heartbeats_by_rank[rank].append(beat)
        for path in pending:
            path.unlink()  # the rank has waited since before its heartbeat was read
        return len(heartbeats_by_rank) == 2 and all(
            beats[-1].step == 8 and beats[-1].phase == heartbeat.IDLE for beats in heartbeats_by_rank.values()
        )

    clock.wait_until(lambda: observe_once() or bool(list(run.path.glob("attempts/1/results/*.json"))), 120, poll_s=0.01)
    return heartbeats_by_rank


def test_agent_observes_all_phases_of_both_ranks(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    env["CLUSTERTRAIN_HOME"] = str(tmp_path / "home")
    script = tmp_path / "seen.py"
    script.write_text(SCRIPT)
    requests = tmp_path / "requests"
    requests.mkdir()
    local = (*LOCAL, "--nodes", "1", "--gpus", "2", "--layout", "ddp")
    run = runs.submit(env, *local, str(script), str(requests))
    try:
        heartbeats_by_rank = observe(run, requests)
        assert sorted(heartbeats_by_rank) == [0, 1], run.explain()
        for rank, beats in heartbeats_by_rank.items():
            # Idle and restore are short and may be missed.
            observed = [b.phase for b in beats if b.phase not in (heartbeat.IDLE, heartbeat.RESTORE)]
            phases = [PHASES[code] for code, _ in itertools.groupby(observed)]
            expected = ["startup", "train", "evaluation", "train", "checkpoint", "train", "checkpoint", "shutdown"]
            assert phases == expected, (rank, phases)
            steps = [b.step for b in beats]
            assert steps == sorted(steps) and set(steps) == {*range(9)}
            assert {b.tokens - 50.0 * b.step for b in beats} == {0.0}  # half of the tokens of each step
            assert len({b.pid for b in beats}) == 1 and all(math.isnan(b.forward_s) for b in beats)
            assert all(0 < b.t <= clock.monotonic() for b in beats if b.step)
        run.complete()
        ledger = goodput.compute_goodput(RunDir(run.path), attempts.load_attempts(RunDir(run.path)), clock.now(), True)
        assert math.fsum(getattr(ledger, part) for part in goodput.TIME_CATEGORIES) == pytest.approx(
            ledger.wall_s, abs=1e-6
        )
        assert ledger.evaluation_s > 0 and ledger.checkpoint_stall_s > 0 and ledger.productive_s > 0
        assert ledger.lost_s == ledger.repeated_s == 0.0
    finally:
        run.cancel_if_active()
        run.wait_until_final()


def kill_at(step: int, only_rank: int) -> None:
    """Setup: kill rank ``only_rank`` with SIGKILL in step ``step``."""
    from clustertrain.train.session.session import Session

    original = Session.log

    def log(self: Session, **scalars: float) -> None:
        original(self, **scalars)
        if self.step == step and self.rank == only_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    Session.log = log  # type: ignore[assignment,method-assign]


def test_heartbeat_of_killed_rank_has_its_last_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=40, every=100)
    ranks = Ranks(run, 2, setup=kill_at, args=(17, 1))
    assert ranks.wait()[1] == -signal.SIGKILL, ranks.logs()
    beats = HeartbeatReader(ranks.rank_dir, [0, 1]).read()
    killed = beats[1]
    assert (killed.step, PHASES[killed.phase], killed.pid) == (17, "train", ranks.processes[1].pid)
    assert killed.tokens == 17 * 16 * SEQ_LEN / 2
    # A forward pass under DDP waits for no other rank, so it is timed.
    assert killed.forward_s > 0 and killed.data_wait_s > 0
    assert beats[0].phase == heartbeat.IDLE  # the session ended normally


@pytest.mark.parametrize(("strategy", "forward_timed"), [("ddp", True), ("fsdp", False)])
def test_rows_and_events_share_one_timeline(tmp_path: Path, strategy: str, forward_timed: bool) -> None:
    run = make_run(tmp_path / "run", strategy, 2, steps=6, every=3)
    ranks = Ranks(run, 2).expect(0)
    rows = list(fsio.read_jsonl(run.metrics_path(1)))
    assert [r["step"] for r in rows] == [*range(1, 7)]
    assert [r["sum_tokens"] for r in rows] == [16 * SEQ_LEN * n for n in range(1, 7)]
    for key in ("step_s", "data_wait_s"):
        for total, row in zip(itertools.accumulate(r[key] for r in rows), rows, strict=True):
            assert row[f"sum_{key}"] == pytest.approx(total, abs=1e-5)
    assert all({"loss", "grad_norm", "lr"} <= row.keys() for row in rows)
    starts = [ranks.events(n)[0]["t_begin"] for n in ("session_started", "first_step", "checkpoint", "session_ended")]
    assert starts == sorted(starts)
    assert starts[1] <= rows[0]["t"] - rows[0]["step_s"] + 0.01
    saves = ranks.events("checkpoint")
    assert [e["step"] for e in saves] == [3, 6]
    assert rows[2]["t"] <= saves[0]["t_begin"] and saves[0]["t_begin"] + saves[0]["save_s"] <= saves[0]["t"] + 0.01
    ended = ranks.events("session_ended")[0]
    assert (ended["step"], ended["ending"]) == (6, "completed")
    forward = [b.forward_s for b in HeartbeatReader(ranks.rank_dir, [0, 1]).read().values()]
    assert [not math.isnan(s) for s in forward] == [forward_timed, forward_timed]
