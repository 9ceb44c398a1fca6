"""All ranks stop at the same step, no matter how the request reaches them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from clustertrain import clock, fsio
from tests.ranks.rank_pool import Ranks, make_run, touch_stop_at

pytestmark = pytest.mark.ranks


def test_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 4)
    ranks = Ranks(run, 4, setup=touch_stop_at, args=(2, 3)).expect(0)
    assert {(r["ending"], r["step"], r["committed_step"]) for r in ranks.results()} == {("stopped", 4, 4)}
    assert ranks.events("stop_agreed")[0]["step"] == 4


def test_stop_before_first_step_trains_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "fsdp", 2)
    ranks = Ranks(run, 2, setup=touch_stop_file)
    ranks.expect(0)
    assert {(r["ending"], r["step"], r["committed_step"]) for r in ranks.results()} == {("stopped", 0, None)}
    assert ranks.losses() == {}
    assert not run.checkpoints.exists() or not list(run.checkpoints.iterdir())


def stop_with_deadline(step: int, remaining_s: float) -> None:
    """Setup: the session expects saves to take ten seconds, and at ``step`` the agent grants ``remaining_s``."""
    from clustertrain.train.session.session import Session, get_runtime

    original = Session.log

    def log(self: Session, **scalars: Any) -> None:
        original(self, **scalars)
        get_runtime(self).checkpointer._deadline_tracker.save_durations_s.append(10.0)
        if self.step == step and self.rank == 1:
            fsio.write_json(Path(os.environ["CLUSTERTRAIN_RANK_DIR"], "stop"), {"deadline": clock.now() + remaining_s})

    Session.log = log  # type: ignore[method-assign]


@pytest.mark.parametrize(("remaining_s", "saved"), [(5.0, False), (3600.0, True)])
def test_deadline_decides_whether_a_stop_saves(tmp_path: Path, remaining_s: float, saved: bool) -> None:
    run = make_run(tmp_path / "run", "fsdp", 2, steps=100_000, every=3)
    ranks = Ranks(run, 2, setup=stop_with_deadline, args=(4, remaining_s)).expect(0)
    endings = {(r["ending"], r["step"], r["committed_step"]) for r in ranks.results()}
    (ending, stopped_at, committed) = endings.pop()
    assert not endings
    assert ending == "stopped"
    assert committed == (stopped_at if saved else (stopped_at - 1) // 3 * 3) > 0
    assert [e["save"] for e in ranks.events("stop_agreed")] == [saved]


def touch_stop_file() -> None:
    (Path(os.environ["CLUSTERTRAIN_RANK_DIR"]) / "stop").touch()


def test_stop_right_after_resume_does_not_save_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 2)
    Ranks(run, 2, 1, setup=touch_stop_at, args=(1,)).expect(0)
    marker = run.checkpoints / "step-00000003" / "COMMITTED"
    before = marker.stat().st_mtime_ns
    second = Ranks(run, 2, 2, setup=touch_stop_file).expect(0)
    assert {(r["ending"], r["step"], r["committed_step"]) for r in second.results()} == {("stopped", 3, 3)}
    assert second.events("checkpoint") == []
    assert marker.stat().st_mtime_ns == before


def test_sigterm_to_all_processes_with_workers_ends_cleanly(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=100_000, every=50_000, data={"workers": 2})
    ranks = Ranks(run, 2, setup=list_workers)
    assert clock.wait_until(lambda: bool(ranks.events("first_step")), 60.0), ranks.logs()
    workers = [int(p) for f in ranks.rank_dir.glob("workers-*") for p in f.read_text().split()]
    assert len(workers) == 4
    # Slurm's linuxproc tracking signals every descendant, twice if necessary.
    for pid in [*workers, *(p.pid for p in ranks.processes), *workers]:
        os.kill(int(pid or 0), signal.SIGTERM)
    ranks.expect(0)
    results = ranks.results()
    assert {r["ending"] for r in results} == {"stopped"}
    assert len({r["step"] for r in results}) == 1
    assert results[0]["committed_step"] == results[0]["step"] > 0
    assert clock.wait_until(lambda: not any(_is_alive(p) for p in workers), 30.0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def list_workers() -> None:
    """Setup: write the process ids of this rank's data workers to a file."""
    import multiprocessing

    from clustertrain.train.data.loader import Loader

    original = Loader._start_reading

    def start(self: Loader) -> Any:
        iterator = original(self)
        pids = " ".join(str(p.pid) for p in multiprocessing.active_children())
        fsio.write_text(Path(os.environ["CLUSTERTRAIN_RANK_DIR"], f"workers-{os.environ['RANK']}"), pids)
        return iterator

    Loader._start_reading = start  # type: ignore[method-assign]


CUSTOM_LOADER = """
import os, pathlib, torch
from torch.utils.data import DataLoader, TensorDataset
import clustertrain as ct

folder = pathlib.Path(os.environ["CLUSTERTRAIN_RANK_DIR"])

with ct.session() as session:
    state = {"n": torch.zeros(())}
    data = iter(DataLoader(TensorDataset(torch.zeros(100_000, 1)), batch_size=1, num_workers=1))
    for step in session.steps(100_000_000, state, checkpoint_every=2):
        next(data)
        if step == 3:
            (folder / "worker").write_text(str(data._workers[0].pid))
            while data._workers[0].is_alive():
                pass
"""


@pytest.mark.parametrize(
    ("stop_requested", "ending", "code", "kind"), [(True, "stopped", 0, None), (False, "failed", 1, "error")]
)
def test_data_worker_killed_by_stop_is_not_a_failure(
    tmp_path: Path, stop_requested: bool, ending: str, code: int, kind: str | None
) -> None:
    script = tmp_path / "custom_loader.py"
    script.write_text(CUSTOM_LOADER)
    run = make_run(tmp_path / "run", "single", 1, script=(script, ()))
    ranks = Ranks(run, 1)
    worker = ranks.rank_dir / "worker"
    assert clock.wait_until(lambda: worker.exists() and bool(worker.read_text()), 60.0), ranks.logs()
    os.kill(int(worker.read_text()), signal.SIGTERM)
    if stop_requested:  # the signal reaches the worker before the rank sees the request
        clock.wait_until(lambda: False, 0.5)
        ranks.request_stop()
    ranks.expect(code)
    (result,) = ranks.results()
    assert (result["ending"], result["kind"]) == (ending, kind)
    # The batches that the worker has prefetched may suffice for two more steps and a save.
    assert result["committed_step"] in (2, 4)


def test_peer_killed_during_stop_leaves_others_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 3, global_batch=12, every=2)
    ranks = Ranks(run, 3, setup=stop_and_kill_last_rank, args=(5,))
    codes = ranks.wait()
    assert codes[2] == -signal.SIGKILL
    assert codes[:2] == [0, 0], ranks.logs()
    assert {(r["rank"], r["ending"]) for r in ranks.results()} == {(0, "stopped"), (1, "stopped")}
    # Rank 0 commits; the others notice it at the next save, or with the two staging buffers of a GPU one save later.
    assert max(r["committed_step"] or 0 for r in ranks.results()) == 4


def stop_and_kill_last_rank(step: int) -> None:
    """Setup: in step ``step``, request a stop and kill the last rank."""
    from clustertrain.train.session.session import Session

    def train_step(self: Session, *args: Any, **kw: Any) -> Any:
        if self.step == step:
            touch_stop_file()
            if self.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kw)

    original = Session.train_step
    Session.train_step = train_step  # type: ignore[method-assign]
