"""The folder of a run is removed while the run is active: its processes do not create it again."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustertrain import fsio, settings
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.cli.jobs import list_
from clustertrain.cli.main import main
from clustertrain.run import run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import run_list, run_status
from tests.unit.checkpoint.saved import state_of
from tests.unit.report import live_runs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    run = run_dir.create_run("gone")
    monkeypatch.setenv(settings.RUN_DIR, str(run.path))
    return run


@pytest.mark.parametrize(
    "write",
    [
        lambda run: fsio.make_folder(run.tracking / "state"),
        lambda run: EventLog(run.attempt(1).events_path("rank-0")),
        lambda run: fsio.JsonlAppender(run.metrics_path(1, segment=1)),
    ],
    ids=["folder", "events", "rows"],
)
def test_write_to_a_removed_run_does_not_create_its_folder(run: RunDir, write: Callable[[RunDir], object]) -> None:
    shutil.rmtree(run.path)
    with pytest.raises(FileNotFoundError, match="run folder is gone"):
        write(run)
    assert not run.path.exists()


def test_save_to_a_removed_run_fails_with_the_reason(run: RunDir) -> None:
    manager = CheckpointManager(run.checkpoints, Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    manager.restore(state_of(0.0))
    assert manager.save(5, state_of(1.0))
    shutil.rmtree(run.path)
    with pytest.raises(StorageError, match=r"step 10 was not saved: .*run folder is gone"):
        manager.save(10, state_of(2.0))
    assert not run.path.exists()


def test_folders_elsewhere_are_created_with_their_parents(run: RunDir, tmp_path: Path) -> None:
    shutil.rmtree(run.path)
    fsio.make_folder(tmp_path / "new" / "parent" / "checkpoints")
    assert (tmp_path / "new" / "parent" / "checkpoints").is_dir()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_run_that_vanishes_during_list_hides_no_other_run(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run disappears after its state was read and before the table reads its files."""
    vanishing, staying = (live_runs.new_run(tmp_path, 1e9, name=name) for name in ("going-abc234", "staying-abc234"))
    real_statuses = run_status.run_statuses

    def read_then_remove(runs: Sequence[RunDir]) -> list[run_status.RunStatus | run_status.Unreadable]:
        statuses = real_statuses(runs)
        shutil.rmtree(vanishing.path)
        return statuses

    monkeypatch.setattr(run_list, "run_statuses", read_then_remove)
    done = CliRunner().invoke(list_, list(options))
    assert done.exit_code == 0, done.output
    assert vanishing.id in done.stdout and staying.id in done.stdout


def test_run_without_a_checkpoints_folder_has_no_committed_step(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.checkpoints.mkdir(exist_ok=True)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # the folder existed a moment ago
    run.checkpoints.rmdir()
    assert run.committed_steps() == []


def test_run_that_vanishes_during_status_is_a_plain_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def remove_and_read(_: RunDir) -> None:
        run.spec.unlink()
        run.spec.read_bytes()

    run.spec.write_text("version = 1\n")
    monkeypatch.setattr(run_status, "run_status", remove_and_read)
    monkeypatch.setattr(sys, "argv", ["clustertrain", "status", run.id])
    assert main() == 1
    assert capsys.readouterr().err == f"clustertrain: {run.spec}: No such file or directory\n"
