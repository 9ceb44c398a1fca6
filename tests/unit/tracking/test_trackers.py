"""Rows in TensorBoard, W&B and MLflow, read back with their libraries, across requeues, kills and failures."""

from __future__ import annotations

import gc
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.numpy import load_file

from clustertrain.config.job import ScriptSpec
from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from clustertrain.tracking import registry, run_facts, tracker
from clustertrain.tracking.row_follower import RowFollower
from clustertrain.tracking.tracker import Tracker, TrackerState, TrackerUploader
from tests.unit.checkpoint.saved import save
from tests.unit.tracking import reading_back
from tests.unit.tracking.tracked_runs import T0, loss, make, write

# MLflow 3.17 uses a loader that SQLAlchemy 2.1 deprecates.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:The ``noload`` loader")]
ALL = ("tensorboard", "wandb", "mlflow")
READ: dict[str, Callable[..., reading_back.Points]] = {
    "tensorboard": reading_back.tensorboard, "wandb": reading_back.wandb, "mlflow": reading_back.mlflow
}  # fmt: skip


class Killed(BaseException):
    """Simulates SIGKILL: no later code runs."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an empty MLflow database once, because its dozens of migrations take seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``noload`` loader")
        from mlflow.tracking import MlflowClient

        MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(autouse=True)
def preinstalled_database(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Copy the empty MLflow database into place for the tests that use it."""
    if "mlflow" in request.node.name or "settings" in request.node.name:
        (tmp_path / "lm-abcdef" / "tracking").mkdir(parents=True)
        for path in (tmp_path / "lm-abcdef" / "tracking" / "mlflow.db", tmp_path / "later.db"):
            shutil.copy(request.getfixturevalue("empty_database"), path)


def make_tracked_run(folder: Path, name: str, **tracking: Any) -> RunDir:
    return make(folder, tracking={"trackers": [name], **tracking}, contract={"task": "words", "target": "research"})


def build_tracker(run: RunDir, name: str, attempt: int = 1) -> Tracker:
    return registry.build_tracker(name, run, run_facts.load_run_metadata(run, attempt))


def upload(run: RunDir, name: str, attempt: int = 1, ending: str | None = "completed") -> list[str]:
    """Upload all rows as the tracking process does at the end of an attempt, and return the errors."""
    errors: list[str] = []
    uploader = TrackerUploader(
        run, build_tracker(run, name, attempt), lambda _, reason: errors.append(reason), get_ending=lambda: ending,
        retry=False,
    )  # fmt: skip
    uploader.request_stop()
    uploader.thread.run()
    return errors


@pytest.mark.parametrize("name", ALL)
def test_attempt_continues_the_previous_one(tmp_path: Path, name: str) -> None:
    run = make_tracked_run(tmp_path, name)
    write(run, 1, 1, 20)
    assert upload(run, name, ending=None) == []
    write(run, 2, 11, 30)  # ten steps are repeated
    assert upload(run, name, attempt=2) == []
    expected = [(s, loss(s, 1)) for s in range(1, 21)] + [(s, loss(s, 2)) for s in range(21, 31)]
    assert READ[name](run) == expected
    assert upload(run, name, attempt=2) == []  # again, by hand
    assert READ[name](run) == expected


@pytest.mark.parametrize("name", ALL)
def test_repeated_evaluation_is_uploaded_with_its_step(tmp_path: Path, name: str) -> None:
    run = make_tracked_run(tmp_path, name)
    write(run, 1, 1, 3, validation_loss=0.75)
    write(run, 1, 4, 4, **metrics.CUT_SHORT)
    assert upload(run, name, ending=None) == []
    write(run, 2, 4, 4, validation_loss=0.5)
    assert upload(run, name, attempt=2) == []
    assert READ[name](run, tag="validation_loss") == [(1, 0.75), (2, 0.75), (3, 0.75), (4, 0.5)]
    assert [step for step, _ in READ[name](run)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_kill_at_any_point_loses_and_duplicates_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_tracked_run(tmp_path, name)
    write(run, 1, 1, 40)
    write_state, remaining = TrackerState.write, 0

    def write_and_die(self: TrackerState, **values: Any) -> None:
        """Raise before or after the write that records the upload."""
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            write_state(self, **values)
        if remaining <= 0:
            raise Killed
        write_state(self, **values)

    monkeypatch.setattr(TrackerState, "write", write_and_die)
    for num_writes in range(-1, 8):
        remaining = num_writes
        killed_tracker = build_tracker(run, name)
        try:
            follower = RowFollower(run, killed_tracker.open())
            while rows := follower.read(6):
                killed_tracker.log_rows(rows)
        except Killed:
            pass
        killed_tracker.abandon()
    monkeypatch.undo()
    assert upload(run, name) == []
    assert READ[name](run) == [(s, loss(s)) for s in range(1, 41)]


def test_rows_lost_by_a_killed_wandb_service_are_resent(tmp_path: Path) -> None:
    run = make_tracked_run(tmp_path, "wandb", offline=True)
    write(run, 1, 1, 900)  # several blocks of 32 KiB
    assert upload(run, "wandb", ending=None) == []
    (file,) = reading_back.wandb_files(run)
    complete = file.read_bytes()
    file.write_bytes(complete[: len(complete) // 2])
    points = reading_back.wandb(run)
    assert 100 < len(points) < 800 and points == [(s, loss(s)) for s in range(1, len(points) + 1)]
    assert upload(run, "wandb", attempt=1) == []
    assert reading_back.wandb(run) == [(s, loss(s)) for s in range(1, 901)]


def test_rows_are_uploaded_after_sigterm_to_the_wandb_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_tracked_run(tmp_path, "wandb", offline=True)
    write(run, 1, 1, 50)
    errors: list[str] = []
    uploader = TrackerUploader(
        run, build_tracker(run, "wandb"), lambda _, reason: errors.append(reason), get_ending=lambda: None
    )

    def preempt(wait_s: float) -> bool:
        (service,) = [c for c in psutil.Process().children() if "wandb-core" in c.name()]
        service.terminate()
        write(run, 1, 51, 60)
        uploader.request_stop()
        return False

    monkeypatch.setattr(uploader._stop, "wait", preempt)
    uploader.thread.run()
    assert errors == [] and not uploader.failed
    assert reading_back.wandb(run) == [(s, loss(s)) for s in range(1, 61)]
    # wandb keeps the handle of a dead service and never waits for it.
    for process in [o for o in gc.get_objects() if issubclass(type(o), subprocess.Popen)]:
        process.wait(30)


def test_tensorboard_truncates_a_partial_record(tmp_path: Path) -> None:
    run = make_tracked_run(tmp_path, "tensorboard")
    write(run, 1, 1, 5)
    upload(run, "tensorboard")
    (file,) = (run.tracking / "tensorboard").iterdir()
    with file.open("ab") as f:
        f.write(file.read_bytes()[-30:-7])
    write(run, 1, 6, 9)
    assert upload(run, "tensorboard") == []
    assert reading_back.tensorboard(run) == [(s, loss(s)) for s in range(1, 10)]


@pytest.mark.parametrize("missing", ["state", "events"])
def test_tensorboard_is_rewritten_if_a_part_is_missing(tmp_path: Path, missing: str) -> None:
    run = make_tracked_run(tmp_path, "tensorboard")
    write(run, 1, 1, 5)
    upload(run, "tensorboard")
    for file in (run.tracking / ("state" if missing == "state" else "tensorboard")).iterdir():
        file.unlink()
    foreign = run.tracking / "tensorboard" / "events.out.tfevents.1.of-another-program"
    foreign.write_bytes(b"")
    assert upload(run, "tensorboard") == []
    assert reading_back.tensorboard(run) == [(s, loss(s)) for s in range(1, 6)] and foreign.exists()


def test_mlflow_finds_its_run_without_a_state(tmp_path: Path) -> None:
    run = make_tracked_run(tmp_path, "mlflow")
    write(run, 1, 1, 5)
    upload(run, "mlflow")
    (run.tracking / "state" / "mlflow.json").unlink()
    write(run, 1, 6, 8)
    assert upload(run, "mlflow") == []
    assert reading_back.mlflow(run) == [(s, loss(s)) for s in range(1, 9)]


def test_mlflow_writes_to_a_file_store(tmp_path: Path) -> None:
    run = make_tracked_run(tmp_path, "mlflow", uri=(tmp_path / "mlruns").as_uri())
    write(run, 1, 1, 5)
    assert upload(run, "mlflow") == []
    assert reading_back.mlflow(run, uri=(tmp_path / "mlruns").as_uri()) == [(s, loss(s)) for s in range(1, 6)]


def test_nan_and_inf_are_uploaded(tmp_path: Path) -> None:
    run = make_tracked_run(tmp_path, "tensorboard")
    write(run, 1, 1, 1, loss=float("nan"), grad_norm=float("inf"), huge=1e300)
    upload(run, "tensorboard")
    ((_, nan),) = reading_back.tensorboard(run)
    assert math.isnan(nan)
    assert [reading_back.tensorboard(run, tag) for tag in ("grad_norm", "huge")] == [[(1, float("inf"))]] * 2


def test_settings_contract_and_tags_are_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_SECRET_OF_MINE", "hunter2")
    run = make(
        tmp_path,
        tracking={"trackers": list(ALL), "project": "words"},
        contract={"task": "bytes", "metric": "loss"},
        telemetry={"alerts": {"webhook": "https://hooks.example/T0KEN"}},
    )
    write(run, 1, 1, 3)
    for name in ALL:
        assert upload(run, name) == []
    client = MlflowClient(f"sqlite:///{run.tracking}/mlflow.db")
    mlflow_run = reading_back.only_mlflow_run(client)
    assert (mlflow_run.info.run_name, mlflow_run.info.status) == (run.id, "FINISHED")
    params = mlflow_run.data.params
    assert params["optim.lr"] == "0.0003" and params["contract.task"] == "bytes"
    tags = {k: v for k, v in mlflow_run.data.tags.items() if k.startswith("clustertrain.")}
    assert tags["clustertrain.run"] == run.id and tags["clustertrain.commit"] == "c0ffee"
    assert (tags["clustertrain.job_id"], tags["clustertrain.attempt"]) == ("771", "1") and tags["clustertrain.host"]
    assert [m.timestamp for m in client.get_metric_history(mlflow_run.info.run_id, "lr")] == [
        int(1000 * (T0 + s)) for s in (1, 2, 3)
    ]
    board = EventAccumulator(str(run.tracking / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {"loss", "lr"}
    recipe = board.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| optim.lr | `0.0003` |" in recipe and "| contract.metric | `loss` |" in recipe
    (wandb_run, *_) = [r.run for r in reading_back.wandb_records(run) if r.WhichOneof("record_type") == "run"]
    config = {u.key: u.value_json for u in wandb_run.config.update}
    assert (wandb_run.run_id, wandb_run.project) == (run.id, "words")
    assert (config["optim.lr"], config["run.job_id"]) == ("0.0003", '"771"')
    stored = b"".join(p.read_bytes() for p in run.tracking.rglob("*") if p.is_file())
    assert b"hunter2" not in stored and b"T0KEN" not in stored


def test_script_settings_exclude_trainer_defaults(tmp_path: Path) -> None:
    config = run_facts.load_run_metadata(make(tmp_path, script=ScriptSpec(path="train.py", cwd="/")), 0).config
    assert {"script.path", "train.seed", "job.gpus"} <= config.keys()
    assert not {"optim.lr", "model.dim", "train.steps"} & config.keys()


def test_trackers_do_not_import_torch(tmp_path: Path) -> None:
    run = make(tmp_path, tracking={"trackers": list(ALL)})
    program = (
        "import sys\nfrom pathlib import Path\nfrom clustertrain.run.run_dir import RunDir\n"
        "from clustertrain.tracking import registry, run_facts, __main__\nrun = RunDir(Path(sys.argv[1]))\n"
        f"for name in {ALL}: registry.build_tracker(name, run, run_facts.load_run_metadata(run, 0))\n"
        "print({'torch', 'tensorflow'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_unreachable_mlflow_server_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(tracker, "RETRY_FIRST_S", 0.01)
    run = make_tracked_run(tmp_path, "mlflow", uri="http://127.0.0.1:9")
    write(run, 1, 1, 5)
    errors: list[str] = []
    uploader = TrackerUploader(
        run, build_tracker(run, "mlflow"), lambda _, reason: errors.append(reason), get_ending=lambda: None
    )
    attempts = 0

    def stop_after_three(wait_s: float) -> bool:
        nonlocal attempts
        attempts += 1
        return attempts == 3

    monkeypatch.setattr(uploader._stop, "wait", stop_after_three)
    uploader.thread.run()
    assert attempts == 3 and uploader.failed and len(errors) == 1 and "127.0.0.1" in errors[0]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/later.db")
    write_spec_without_uri(run)
    assert upload(run, "mlflow") == []
    assert reading_back.mlflow(run, f"sqlite:///{tmp_path}/later.db") == [(s, loss(s)) for s in range(1, 6)]


class FlakyTracker:
    """A tracker that fails at the given calls and records the rows of the others."""

    name = "flaky"

    def __init__(self, *failures: bool) -> None:
        self.failures = list(failures)
        self.steps: list[int] = []

    def open(self) -> int:
        return self.steps[-1] if self.steps else -1

    def log_rows(self, rows: Any) -> None:
        if self.failures and self.failures.pop(0):
            raise ConnectionResetError("Connection lost")
        self.steps.append(rows[0]["step"])

    def close(self, ending: str | None) -> None:
        if self.failures:
            raise ConnectionResetError("Connection lost")

    def abandon(self) -> None:
        pass


@pytest.mark.parametrize(
    ("failures", "num_errors"),
    [((False, True), 0), ((False, True, False, True), 0), ((False, True, True), 1), ((True,), 0), ((True, True), 1)],
    ids=["once", "twice with success between", "twice in a row", "at the first call", "at the first two calls"],
)
def test_broken_tracker_is_reopened_once_before_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: tuple[bool, ...], num_errors: int
) -> None:
    monkeypatch.setattr(tracker.RowFollower, "read", read_one_row)
    run = make_tracked_run(tmp_path, "tensorboard")
    write(run, 1, 1, 6)
    flaky_tracker, errors = FlakyTracker(*failures), []
    uploader = TrackerUploader(run, flaky_tracker, lambda _, reason: errors.append(reason), get_ending=lambda: None)
    monkeypatch.setattr(uploader._stop, "wait", lambda wait_s: False)
    uploader.request_stop()
    uploader.thread.run()
    assert flaky_tracker.steps == [1, 2, 3, 4, 5, 6]
    assert errors == ["ConnectionResetError: Connection lost"] * num_errors and not uploader.failed


def read_one_row(follower: RowFollower) -> list[Any]:
    """Replace :meth:`RowFollower.read` to return six rows, one at a time."""
    rows = [] if follower.last_step >= 6 else [{"step": max(follower.last_step, 0) + 1}]
    follower.last_step += len(rows) + (follower.last_step < 0)
    return rows


def write_spec_without_uri(run: RunDir) -> None:
    run.spec.write_text(run.spec.read_text().replace('uri = "http://127.0.0.1:9"', 'uri = ""'))


@pytest.mark.parametrize(
    ("environ", "offline"),
    [
        ({}, True),
        ({"WANDB_API_KEY": "k"}, False),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, True),
        ({"WANDB_MODE": "online"}, False),
        ({"NETRC": "{}"}, False),
        ({"NETRC": "{}", "WANDB_BASE_URL": "https://wandb.example"}, True),
    ],
    ids=["no-key", "key", "offline-mode", "online-mode", "netrc", "netrc-of-another-host"],
)
def test_wandb_is_offline_without_a_key(tmp_path: Path, environ: dict[str, str], offline: bool) -> None:
    from clustertrain.tracking.wandb import is_offline

    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    environ = {k: v.format(tmp_path / "netrc") for k, v in {"NETRC": str(tmp_path / "none"), **environ}.items()}
    assert is_offline(False, environ) == offline and is_offline(True, environ)


def test_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_tracked_run(tmp_path, "wandb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(Exception, match=r"clustertrain\[wandb\]"):
        build_tracker(run, "wandb")


def run_with_checkpoint(folder: Path, name: str, **tracking: Any) -> RunDir:
    run = make_tracked_run(folder, name, **tracking)
    write(run, 1, 1, 3)
    save(run.checkpoints, 3, {"model": torch.nn.Linear(2, 1)})
    return run


def test_mlflow_registers_the_model_once(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    run = run_with_checkpoint(tmp_path, "mlflow", log_model="last", project="words")
    assert upload(run, "mlflow", ending=None) == []
    client = MlflowClient(f"sqlite:///{run.tracking}/mlflow.db")
    assert client.search_model_versions() == [], "the run is not complete"
    for _ in range(2):
        assert upload(run, "mlflow") == []
    (version,) = client.search_model_versions("name='words'")
    assert version.tags == {"clustertrain.run": run.id, "clustertrain.step": "3"}
    folder = client.download_artifacts(version.run_id, "model", str(tmp_path))
    assert load_file(Path(folder, "model.safetensors")).keys() == {"weight", "bias"}
    assert not (run.tracking / "model-mlflow").exists()


def test_wandb_logs_the_model_as_an_artifact(tmp_path: Path) -> None:
    run = run_with_checkpoint(tmp_path, "wandb", log_model="last")
    assert upload(run, "wandb") == []
    artifacts = [r.request.log_artifact.artifact for r in reading_back.wandb_records(run) if r.HasField("request")]
    (artifact,) = artifacts or [r.artifact for r in reading_back.wandb_records(run) if r.HasField("artifact")]
    assert (artifact.type, artifact.name) == ("model", "lm") and "model.safetensors" in str(artifact.manifest)


def test_missing_checkpoint_is_an_error_of_the_tracker_alone(tmp_path: Path) -> None:
    run = make_tracked_run(tmp_path, "wandb", log_model="best")
    write(run, 1, 1, 3)
    (error,) = upload(run, "wandb")
    assert "no checkpoint records a value" in error and len(READ["wandb"](run)) == 3


def test_mlflow_run_without_its_model_is_finished(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    run = make_tracked_run(tmp_path, "mlflow", log_model="best")
    write(run, 1, 1, 3)
    (error,) = upload(run, "mlflow")
    assert "no checkpoint records a value" in error
    client = MlflowClient(f"sqlite:///{run.tracking}/mlflow.db")
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert found.info.status == "FINISHED"


@pytest.mark.parametrize(("name", "project"), [("mlflow", "team/words: v2"), ("wandb", "wörter")])
def test_project_with_characters_that_no_model_may_have(tmp_path: Path, name: str, project: str) -> None:
    run = run_with_checkpoint(tmp_path, name, log_model="last", project=project)
    assert upload(run, name) == []
