"""The folder of a run is removed while the run goes on: its processes do not make another one in its place."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustertrain import fsio, settings
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.format.storage_errors import StorageError
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.cli.jobs import list_
from clustertrain.cli.main import main
from clustertrain.run import run_dir
from clustertrain.run.events import EventLog
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import run_status
from tests.unit.checkpoint.saved import state_of
from tests.unit.report import live_runs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    made = run_dir.create_run("gone")
    monkeypatch.setenv(settings.RUN_DIR, str(made.path))
    return made


@pytest.mark.parametrize(
    "write",
    [
        lambda run: fsio.make_folder(run.tracking / "state"),
        lambda run: EventLog(run.attempt(1).events_path("rank-0")),
        lambda run: fsio.JsonlAppender(run.metrics_path(1, segment=1)),
    ],
)
def test_a_process_of_the_run_makes_no_other_folder_of_its_name(run: RunDir, write: Callable[[RunDir], object]) -> None:
    shutil.rmtree(run.path)
    with pytest.raises(FileNotFoundError, match="run folder is gone"):
        write(run)
    assert not run.path.exists()


def test_a_save_fails_and_says_why(run: RunDir) -> None:
    manager = CheckpointManager(run.checkpoints, Ranks(), CheckpointConfig(attempt="1", layout={}, async_save=False))
    manager.restore(state_of(0.0))
    assert manager.save(5, state_of(1.0))
    shutil.rmtree(run.path)
    with pytest.raises(StorageError, match=r"step 10 was not saved: .*run folder is gone"):
        manager.save(10, state_of(2.0))
    assert not run.path.exists()


def test_folders_elsewhere_are_made_with_all_that_lacks_above_them(run: RunDir, tmp_path: Path) -> None:
    shutil.rmtree(run.path)
    fsio.make_folder(tmp_path / "my" / "own" / "checkpoints")
    assert (tmp_path / "my" / "own" / "checkpoints").is_dir()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_run_that_goes_while_list_reads_hides_no_other(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes after the last look at its state: nothing of it is read for the table."""
    going, staying = (live_runs.new_run(tmp_path, 1e9, name=name) for name in ("going-abc234", "staying-abc234"))
    looked = run_status.run_statuses

    def then_goes(runs: Sequence[RunDir]) -> list[run_status.RunStatus | run_status.Unreadable]:
        seen = looked(runs)
        shutil.rmtree(going.path)
        return seen

    monkeypatch.setattr(run_status, "run_statuses", then_goes)
    done = CliRunner().invoke(list_, list(options))
    assert done.exit_code == 0, done.output
    assert going.id in done.stdout and staying.id in done.stdout


def test_a_run_without_its_checkpoints_folder_has_no_committed_step(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.checkpoints.mkdir(exist_ok=True)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # it was there a moment ago
    run.checkpoints.rmdir()
    assert run.committed_steps() == []


def test_a_run_that_goes_while_status_reads_it_is_an_error_without_a_traceback(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def goes(_: RunDir) -> None:
        run.spec.unlink()
        run.spec.read_bytes()

    run.spec.write_text("version = 1\n")
    monkeypatch.setattr(run_status, "run_status", goes)
    monkeypatch.setattr(sys, "argv", ["clustertrain", "status", run.id])
    assert main() == 1
    assert capsys.readouterr().err == f"clustertrain: {run.spec}: No such file or directory\n"
