"""A fault on one rank ends all ranks cleanly and never damages an older checkpoint."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from clustertrain import clock, fsio, settings
from clustertrain.checkpoint.core.interval import count_failures
from clustertrain.checkpoint.offline import inspect
from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir
from clustertrain.run.usage.goodput import compute_goodput
from tests import runs
from tests.harness.chaos.rounds import processes
from tests.ranks.rank_pool import Ranks, digest, make_run, touch_stop_at

pytestmark = pytest.mark.ranks


def fault_at(point: str, rank: int, nth: int, fault: str) -> None:
    """Setup: inject a fault as described in :mod:`clustertrain.checkpoint.core.fault_points`."""
    os.environ[settings.FAULT_AT] = f"{point}:{rank}:{nth}:{fault}"


@pytest.fixture(scope="module")
def expected_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the final digest of an undisturbed run of six steps on two ranks."""
    return digest(
        Ranks(make_run(tmp_path_factory.mktemp("whole") / "run", "ddp", 2, steps=6, every=3), 2).expect(0).run
    )


def test_kill_at_any_point_of_a_save_keeps_older_checkpoint(tmp_path: Path, expected_digest: str) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=6, every=3)
    points = list(itertools.product(("before_staging", "during_staging", "after_staging"), (0, 1)))
    for n, (point, rank) in enumerate(points, start=1):
        nth = 2 if n == 1 else 1  # always in the save of step 6
        ranks = Ranks(run, 2, n, setup=fault_at, args=(point, rank, nth, "KILL"))
        assert ranks.wait()[rank] == -signal.SIGKILL, ranks.logs()
        assert [(e["step"], e["skipped"]) for e in ranks.events("restored")] == ([] if n == 1 else [(3, [])])
    _assert_resumes(run, 3, attempt=len(points) + 1)
    assert digest(run) == expected_digest


def test_writer_killed_once_costs_nothing(tmp_path: Path, expected_digest: str) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=6, every=3)
    ranks = Ranks(run, 2, 1, setup=fault_at, args=("before_write", 1, 2, "KILL")).expect(0)
    assert "was killed by SIGKILL; a new one continues with step 6" in ranks.logs()
    assert digest(run) == expected_digest


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        ("before_write", 1),
        ("during_write", 0),
        ("after_write", 1),
        ("after_part_done_marker", 0),
        ("before_commit_marker", 0),
        ("during_publish", 0),
        ("during_prune", 0),
    ],
)
def test_rank_killed_while_its_save_is_written_loses_nothing(
    tmp_path: Path, expected_digest: str, point: str, rank: int
) -> None:
    """The writer process completes what it has received, as far as possible."""
    run = make_run(tmp_path / "run", "ddp", 2, steps=6, every=3)
    ranks = Ranks(run, 2, 1, setup=fault_at, args=(point, rank, 1, "ORPHAN"))
    assert ranks.wait()[rank] == -signal.SIGKILL, ranks.logs()
    second = Ranks(run, 2, 2).expect(0)
    assert all((e["step"], e["skipped"]) == (3, []) for e in second.events("restored"))
    assert digest(run) == expected_digest


# Faults of the process that writes step 6 and of its replacement.
@pytest.mark.parametrize(
    ("point", "rank", "nth"),
    [
        ("during_write", 1, 5),
        ("before_write", 0, 1),
        ("before_commit_marker", 0, 1),
    ],
)
def test_writer_killed_twice_ends_ranks_and_keeps_checkpoint(tmp_path: Path, point: str, rank: int, nth: int) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=6, every=3)
    ranks = Ranks(run, 2, 1, setup=fault_from, args=(6, point, rank, nth)).expect(1)
    for result in ranks.results():
        assert (result["ending"], result["kind"], result["committed_step"]) == ("failed", "storage", 3)
        assert "step 6 was not saved" in result["error"]["message"]
        assert "was killed by SIGKILL, twice" in result["error"]["message"]
    _assert_resumes(run, 3)


def fault_from(step: int, point: str, rank: int, nth: int) -> None:
    """Setup: at ``step``, replace the writer process and inject the fault into the new one."""
    from clustertrain.checkpoint.manager import CheckpointManager

    save = CheckpointManager.save

    def save_with_fault(self: CheckpointManager, at: int, *args: Any, **kw: Any) -> Any:
        if at == step:
            self.wait_for_saves()
            self._pending.worker.close()
            self._pending.worker = type(self._pending.worker)("raw")  # type: ignore[call-arg]
            fault_at(point, rank, nth, "KILL")
        return save(self, at, *args, **kw)

    CheckpointManager.save = save_with_fault  # type: ignore[method-assign]


def _assert_resumes(run: RunDir, step: int, attempt: int = 2) -> None:
    """Assert that the run resumes from the checkpoint of ``step`` and completes."""
    committed = [c["step"] for c in inspect.list_checkpoints(run.checkpoints) if c["committed"]]
    assert committed == [step]
    second = Ranks(run, 2, attempt).expect(0)
    assert second.events("restored")[0]["step"] == step
    assert second.events("restored")[0]["skipped"] == []
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000003", "step-00000006"]
    assert all(c["verified"] for c in inspect.list_checkpoints(run.checkpoints, verify=True))


def test_disk_error_on_one_rank_fails_all_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 3, global_batch=12, steps=8, every=4)
    ranks = Ranks(run, 3, 1, setup=fault_at, args=("before_write", 1, 2, "EIO")).expect(1)
    for result in ranks.results():
        assert (result["ending"], result["kind"], result["committed_step"]) == ("failed", "storage", 4)
        assert result["error"]["type"] == "StorageError"
        assert "step 8 was not saved: rank 1" in result["error"]["message"]
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000004"]
    inspect.verify(inspect.find_checkpoint(run.checkpoints))
    Ranks(run, 3, 2).expect(0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield an empty folder with 8 MiB of space."""
    folder = tmp_path / "run"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(filler: Path, free_bytes: int, before_step: int) -> None:
    """Setup: rank 0 fills the disk up to ``free_bytes`` bytes before step ``before_step`` is saved."""
    from clustertrain import clock
    from clustertrain.checkpoint.format.manifest import list_checkpoint_folders
    from clustertrain.checkpoint.manager import CheckpointManager

    save = CheckpointManager.save

    def save_on_full_disk(self: CheckpointManager, at: int, *args: Any, **kw: Any) -> Any:
        if at == before_step and os.environ["RANK"] == "0":
            # The previous save, in the background, needs space too.
            assert clock.wait_until(lambda: bool(list_checkpoint_folders(self._root)), 60.0)
            with filler.open("wb", buffering=0) as file:
                with contextlib.suppress(OSError):
                    while file.write(bytes(1 << 16)):
                        pass
                file.truncate(max(0, file.tell() - free_bytes))
        return save(self, at, *args, **kw)

    CheckpointManager.save = save_on_full_disk  # type: ignore[method-assign]


@pytest.mark.parametrize("free_bytes", [0, 100_000], ids=["full", "nearly full"])
def test_full_disk_is_reported_and_run_resumes_with_space(
    small_disk: Path, expected_digest: str, free_bytes: int
) -> None:
    run = make_run(small_disk, "ddp", 2, steps=6, every=3)
    filler = small_disk / "filler"
    ranks = Ranks(run, 2, 1, setup=fill_disk, args=(filler, free_bytes, 6))
    assert 0 not in ranks.wait()  # the exit codes vary, because the logs are on the same disk
    assert len(ranks.results()) == 2
    for result in ranks.results():
        assert (result["ending"], result["kind"], result["exit_code"]) == ("failed", "environment", 78), result
        assert "No space left on device" in result["error"]["message"]
        assert "step 6 was not saved" in result["error"]["message"]
    filler.unlink()
    _assert_resumes(run, 3)
    assert digest(run) == expected_digest


def test_damaged_checkpoint_falls_back_to_older_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "fsdp", 4)
    Ranks(run, 4, 1).expect(0)
    expected_digest = digest(run)
    # Only rank 2 reads this file; the others must fall back with it.
    damaged = run.checkpoints / "step-00000008" / "rank-2.bin"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 16
    damaged.write_bytes(data)
    second = Ranks(run, 4, 2).expect(0)
    restored = second.events("restored")[0]
    assert restored["step"] == 4
    assert [s["step"] for s in restored["skipped"]] == [8]
    assert "rank-2.bin" in restored["skipped"][0]["reason"]
    assert digest(run) == expected_digest
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000004", "step-00000008"]


def fail_reads(number: int) -> None:
    """Setup: make rank 1 fail to read shards with errno ``number``."""
    from clustertrain.checkpoint.format import storage_errors

    storage_errors.RETRY_TIMEOUT_S = 0.2
    if os.environ["RANK"] == "1":

        def refuse(*args: Any) -> int:
            raise OSError(number, os.strerror(number))

        os.preadv = refuse


def test_read_error_on_one_rank_keeps_the_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "fsdp", 2)
    Ranks(run, 2, 1).expect(0)
    second = Ranks(run, 2, 2, setup=fail_reads, args=(errno.ESTALE,)).expect(1)
    assert [(r["ending"], r["kind"]) for r in second.results()] == [("failed", "storage")] * 2
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000004", "step-00000008"]
    third = Ranks(run, 2, 3).expect(0)
    assert [(e["step"], e["skipped"]) for e in third.events("restored")] == [(8, [])]


def jumping_clock(by_s: float) -> None:
    """Setup: shift every other reading of the wall clock by ``by_s``."""
    readings = itertools.count()
    original_now = clock.now

    def now() -> float:
        return original_now() + by_s * (next(readings) % 2)

    clock.now = now


@pytest.mark.parametrize("by_s", [5 * 3600.0, -5 * 3600.0])
def test_jumping_clock_changes_nothing(tmp_path: Path, expected_digest: str, by_s: float) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=6, every=1, keep=2)
    ranks = Ranks(run, 2, 1, setup=jumping_clock, args=(by_s,)).expect(0)
    assert digest(run) == expected_digest
    assert [r["step"] for r in inspect.list_checkpoints(run.checkpoints)] == [5, 6]
    saved = ranks.events("checkpoint")
    assert [e["step"] for e in saved] == [1, 2, 3, 4, 5, 6]
    assert all(0 <= e["stall_s"] <= e["save_s"] < 3600 for e in saved)
    history = attempts.load_attempts(run)
    parts = msgspec.to_builtins(compute_goodput(run, history, clock.now(), True))
    assert min(parts.values()) >= 0
    assert count_failures(history, 1).trained_s >= 0


def deadline_and_jump(step: int, by_s: float) -> None:
    """Setup: at ``step``, the agent grants an hour, and then the wall clock jumps by ``by_s``."""
    from clustertrain.train.session.session import Session

    original, original_now = Session.log, clock.now

    def log(self: Session, **scalars: Any) -> None:
        original(self, **scalars)
        if self.step == step:
            if self.rank == 1:
                fsio.write_json(Path(os.environ[settings.RANK_DIR], "stop"), {"deadline": original_now() + 3600})
            clock.now = lambda: original_now() + by_s

    Session.log = log  # type: ignore[method-assign]


@pytest.mark.parametrize(("by_s", "saved"), [(5 * 3600.0, False), (-5 * 3600.0, True)])
def test_clock_jump_after_warning_costs_at_most_a_save(tmp_path: Path, by_s: float, saved: bool) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=100_000, every=2)
    ranks = Ranks(run, 2, setup=deadline_and_jump, args=(4, by_s)).expect(0)
    (ending, stopped_at, committed), *others = {(r["ending"], r["step"], r["committed_step"]) for r in ranks.results()}
    assert (ending, others) == ("stopped", [])
    assert committed == (stopped_at if saved else (stopped_at - 1) // 2 * 2)
    assert [e["save"] for e in ranks.events("stop_agreed")] == [saved]


STOPPED_IN_SAVE = """
import os
import torch
if os.environ["CLUSTERTRAIN_ATTEMPT"] == "1":
    os.environ["CLUSTERTRAIN_FAULT_AT"] = "POINT:0:2:STOP"
import clustertrain as ct

with ct.session() as session:
    state = {"done": torch.zeros(())}
    for step in session.steps(6, state, checkpoint_every=2):
        state["done"] += 1
        session.log(done=state["done"])
"""


@pytest.mark.parametrize("point", ["after_staging", "during_write", "before_commit_marker"])
def test_killed_agent_ends_its_ranks_and_run_resumes(tmp_path: Path, point: str) -> None:
    """The agent is killed while the rank or its writer process is saving."""
    clean_env = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_"))}
    script = tmp_path / "script.py"
    script.write_text(STOPPED_IN_SAVE.replace("POINT", point))
    args = (*runs.LOCAL, "--nodes", "1", "--gpus", "1", str(script))
    run = runs.submit({**clean_env, "CLUSTERTRAIN_HOME": str(tmp_path / "home")}, *args)
    stopped_processes: list[psutil.Process] = []

    def is_stopped() -> bool:
        stopped_processes[:] = [p for p in processes(run.path) if p.status() == psutil.STATUS_STOPPED]
        return bool(stopped_processes)

    assert clock.wait_until(is_stopped, 120.0), run.explain()
    stopped = stopped_processes[0]
    agent = next(p for p in stopped.parents() if p.cmdline()[1:] == ["-P", "-m", "clustertrain", "agent"])
    agent.kill()
    status = run.complete()
    assert not [p for p in processes(run.path) if p.pid == stopped.pid]
    assert [a["state"] for a in status["attempts"]][1:] == ["completed"]
    assert status["attempts"][0]["state"] in ("unknown", "node_failure")
    first = 1 if point == "during_write" else 3  # a writer passes this point several times in the first save
    assert status["attempts"][1]["first_step"] == first
    assert [r["done"] for r in fsio.read_jsonl(run.path / "metrics" / "attempt-2.jsonl")] == list(range(first, 7))


def add_state_on(rank: int) -> None:
    """Setup: add an entry to the state of ``rank`` that the checkpoint lacks."""
    from clustertrain.train.session.session import Session

    original = Session.steps

    def steps(self: Session, total: int, state: dict[str, Any], *more: Any) -> Iterator[int]:
        if self.rank == rank:
            state["news"] = torch.zeros(3)
        return original(self, total, state, *more)

    Session.steps = steps  # type: ignore[method-assign]


def test_load_error_of_one_rank_reaches_all_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 2, steps=6, every=3)
    Ranks(run, 2, 1, setup=touch_stop_at, args=(3,)).expect(0)
    ranks = Ranks(run, 2, 2, setup=add_state_on, args=(1,)).expect(78)
    assert {(r["kind"], r["exit_code"]) for r in ranks.results()} == {("environment", 78)}
    assert all("contains no state news" in r["error"]["message"] for r in ranks.results())
    assert "rank 1: " in ranks.results()[0]["error"]["message"]
    assert not list(run.checkpoints.glob("damaged-*"))


@pytest.mark.parametrize(("point", "rank"), [("during_write", 1), ("before_commit_marker", 0)])
@pytest.mark.parametrize("steps", [100_000, 4])
def test_hanging_save_is_abandoned_before_the_kill(tmp_path: Path, point: str, rank: int, steps: int) -> None:
    """A writer process hangs in the last save, as on a file system that does not respond."""
    run = make_run(tmp_path / "run", "ddp", 2, steps=steps, every=100_000)
    ranks = Ranks(run, 2, setup=hanging_writer, args=(point, rank, 3, 4.0)).expect(0)
    for leftover in processes(run.path):
        leftover.kill()
    assert {(r["ending"], r["committed_step"]) for r in ranks.results()} == {("stopped", None)}
    (event,) = ranks.events("save_abandoned")
    assert f"rank {rank}: " in event["reason"] or rank == 0
    assert not list(run.checkpoints.glob("step-*"))


def hanging_writer(point: str, rank: int, step: int, remaining_s: float) -> None:
    """Setup: the writer of ``rank`` hangs at ``point``, and at ``step`` the agent grants ``remaining_s`` seconds."""
    from clustertrain.train.session.session import Session

    original = Session.log
    fault_at(point, rank, 1, "STOP")

    def log(self: Session, **scalars: Any) -> None:
        original(self, **scalars)
        if self.step == step:
            fsio.write_json(Path(os.environ[settings.RANK_DIR], "stop"), {"deadline": clock.now() + remaining_s})

    Session.log = log  # type: ignore[method-assign]


def raise_at(step: int, rank: int, error: str) -> None:
    """Setup: raise an exception in the training loop of ``rank``."""
    from clustertrain.train.session.session import Session

    errors: dict[str, BaseException] = {"value": ValueError("bad value"), "memory": torch.OutOfMemoryError("no room")}

    def log(self: Session, **scalars: Any) -> None:
        if self.step == step and self.rank == rank:
            raise errors[error]

    Session.log = log  # type: ignore[method-assign]


@pytest.mark.parametrize(("error", "expected"), [("value", "error"), ("memory", "out_of_memory")])
def test_exception_is_distinguished_from_its_consequences(tmp_path: Path, error: str, expected: str) -> None:
    run = make_run(tmp_path / "run", "ddp", 2)
    ranks = Ranks(run, 2, setup=raise_at, args=(5, 1, error)).expect(1)
    results = ranks.results()
    assert [r["kind"] for r in results] == ["communication", expected]
    assert results[1]["error"]["traceback"].startswith("Traceback")
    assert {(r["ending"], r["exit_code"]) for r in results} == {("failed", 1)}
    assert max(r["committed_step"] or 0 for r in results) == 4


def test_cuda_without_gpu_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    run = make_run(tmp_path / "run", "single", 1)
    ranks = Ranks(run, 1, setup=request_cuda).expect(78)
    result = ranks.results()[0]
    assert (result["kind"], result["exit_code"]) == ("environment", 78)
    assert "cuda was requested" in result["error"]["message"]
    assert "fix:" in ranks.logs()


def request_cuda() -> None:
    os.environ["CLUSTERTRAIN_DEVICE"] = "cuda"


def test_plan_for_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "ddp", 4)
    ranks = Ranks(run, 2).expect(78)
    assert "the plan is for 4 ranks, but 2 were started" in ranks.results()[0]["error"]["message"]
