"""Rows in TensorBoard, W&B and MLflow, read back with their own libraries, over requeues, kills and failures."""

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

from clustertrain.config.job import ScriptSpec
from clustertrain.run import metrics
from clustertrain.run.run_dir import RunDir
from clustertrain.tracking import registry, run_facts, tracker
from clustertrain.tracking.row_follower import RowFollower
from clustertrain.tracking.tracker import Tracker, TrackerState, TrackerUploader
from tests.unit.tracking import reading_back
from tests.unit.tracking.tracked_runs import T0, loss, make, write

# SQLAlchemy 2.1 deprecates what MLflow 3.17 uses.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:The ``noload`` loader")]
ALL = ("tensorboard", "wandb", "mlflow")
READ: dict[str, Callable[..., reading_back.Points]] = {
    "tensorboard": reading_back.tensorboard, "wandb": reading_back.wandb, "mlflow": reading_back.mlflow
}  # fmt: skip


class Killed(BaseException):
    """In the place of SIGKILL: nothing behind it runs."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As MLflow makes it: dozens of migrations, which take seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``noload`` loader")
        from mlflow.tracking import MlflowClient

        MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(autouse=True)
def made_before(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """MLflow's database is there, empty, in the tests that use it."""
    if "mlflow" in request.node.name or "settings" in request.node.name:
        (tmp_path / "lm-abcdef" / "tracking").mkdir(parents=True)
        for place in (tmp_path / "lm-abcdef" / "tracking" / "mlflow.db", tmp_path / "later.db"):
            shutil.copy(request.getfixturevalue("empty_database"), place)


def tracked(folder: Path, to: str, **more: Any) -> RunDir:
    return make(folder, tracking={"to": [to], **more}, contract={"task": "words", "target": "research"})


def opened(run: RunDir, name: str, attempt: int = 1) -> Tracker:
    return registry.build_tracker(name, run, run_facts.load_run_metadata(run, attempt))


def hand_on(run: RunDir, name: str, attempt: int = 1, ending: str | None = "completed") -> list[str]:
    """All that is written, as the process does at an attempt's end; returns what it complained of."""
    said: list[str] = []
    one = TrackerUploader(
        run, opened(run, name, attempt), lambda _, why: said.append(why), get_ending=lambda: ending, retry=False
    )  # fmt: skip
    one.request_stop()
    one.thread.run()
    return said


@pytest.mark.parametrize("name", ALL)
def test_an_attempt_continues_what_the_one_before_began(tmp_path: Path, name: str) -> None:
    run = tracked(tmp_path, name)
    write(run, 1, 1, 20)
    assert hand_on(run, name, ending=None) == []
    write(run, 2, 11, 30)  # ten steps are run again
    assert hand_on(run, name, attempt=2) == []
    expected = [(s, loss(s, 1)) for s in range(1, 21)] + [(s, loss(s, 2)) for s in range(21, 31)]
    assert READ[name](run) == expected
    assert hand_on(run, name, attempt=2) == []  # by hand, once more
    assert READ[name](run) == expected


@pytest.mark.parametrize("name", ALL)
def test_an_evaluation_that_was_made_up_for_arrives_with_its_step(tmp_path: Path, name: str) -> None:
    run = tracked(tmp_path, name)
    write(run, 1, 1, 3, validation_loss=0.75)
    write(run, 1, 4, 4, **metrics.CUT_SHORT)
    assert hand_on(run, name, ending=None) == []
    write(run, 2, 4, 4, validation_loss=0.5)
    assert hand_on(run, name, attempt=2) == []
    assert READ[name](run, tag="validation_loss") == [(1, 0.75), (2, 0.75), (3, 0.75), (4, 0.5)]
    assert [step for step, _ in READ[name](run)] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_killed_at_any_moment_nothing_is_lost_or_there_twice(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked(tmp_path, name)
    write(run, 1, 1, 40)
    put, left = TrackerState.write, 0

    def dying(self: TrackerState, **values: Any) -> None:
        """Dies before or behind the word that counts the deed."""
        nonlocal left
        left -= 1
        if left == 0:
            put(self, **values)
        if left <= 0:
            raise Killed
        put(self, **values)

    monkeypatch.setattr(TrackerState, "write", dying)
    for moment in range(-1, 8):
        left = moment
        one = opened(run, name)
        try:
            follower = RowFollower(run, one.open())
            while rows := follower.read(6):
                one.log_rows(rows)
        except Killed:
            pass
        one.abandon()
    monkeypatch.undo()
    assert hand_on(run, name) == []
    assert READ[name](run) == [(s, loss(s)) for s in range(1, 41)]


def test_what_wandbs_service_had_not_written_when_it_was_killed_is_sent_again(tmp_path: Path) -> None:
    run = tracked(tmp_path, "wandb", offline=True)
    write(run, 1, 1, 900)  # several blocks of 32 KiB
    assert hand_on(run, "wandb", ending=None) == []
    (file,) = reading_back.wandb_files(run)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    held = reading_back.wandb(run)
    assert 100 < len(held) < 800 and held == [(s, loss(s)) for s in range(1, len(held) + 1)]
    assert hand_on(run, "wandb", attempt=1) == []
    assert reading_back.wandb(run) == [(s, loss(s)) for s in range(1, 901)]


def test_wandbs_service_ends_of_the_warning_of_a_preemption_and_the_rows_after_it_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked(tmp_path, "wandb", offline=True)
    write(run, 1, 1, 50)
    said: list[str] = []
    one = TrackerUploader(run, opened(run, "wandb"), lambda _, why: said.append(why), get_ending=lambda: None)

    def warned(wait_s: float) -> bool:
        (service,) = [c for c in psutil.Process().children() if "wandb-core" in c.name()]
        service.terminate()
        write(run, 1, 51, 60)
        one.request_stop()
        return False

    monkeypatch.setattr(one._stop, "wait", warned)
    one.thread.run()
    assert said == [] and not one.failed
    assert reading_back.wandb(run) == [(s, loss(s)) for s in range(1, 61)]
    # wandb keeps the handle of a service that has died, and never asks for its end.
    for process in [o for o in gc.get_objects() if issubclass(type(o), subprocess.Popen)]:
        process.wait(30)


def test_tensorboard_cuts_off_what_a_killed_process_left_half_written(tmp_path: Path) -> None:
    run = tracked(tmp_path, "tensorboard")
    write(run, 1, 1, 5)
    hand_on(run, "tensorboard")
    (file,) = (run.tracking / "tensorboard").iterdir()
    with file.open("ab") as f:
        f.write(file.read_bytes()[-30:-7])
    write(run, 1, 6, 9)
    assert hand_on(run, "tensorboard") == []
    assert reading_back.tensorboard(run) == [(s, loss(s)) for s in range(1, 10)]


@pytest.mark.parametrize("gone", ["state", "events"])
def test_tensorboard_is_made_anew_from_the_rows_where_a_part_is_gone(tmp_path: Path, gone: str) -> None:
    run = tracked(tmp_path, "tensorboard")
    write(run, 1, 1, 5)
    hand_on(run, "tensorboard")
    for file in (run.tracking / ("state" if gone == "state" else "tensorboard")).iterdir():
        file.unlink()
    foreign = run.tracking / "tensorboard" / "events.out.tfevents.1.of-somebody"
    foreign.write_bytes(b"")
    assert hand_on(run, "tensorboard") == []
    assert reading_back.tensorboard(run) == [(s, loss(s)) for s in range(1, 6)] and foreign.exists()


def test_mlflow_finds_its_run_where_the_state_is_gone(tmp_path: Path) -> None:
    run = tracked(tmp_path, "mlflow")
    write(run, 1, 1, 5)
    hand_on(run, "mlflow")
    (run.tracking / "state" / "mlflow.json").unlink()
    write(run, 1, 6, 8)
    assert hand_on(run, "mlflow") == []
    assert reading_back.mlflow(run) == [(s, loss(s)) for s in range(1, 9)]


def test_mlflow_into_a_folder_that_the_recipe_names(tmp_path: Path) -> None:
    run = tracked(tmp_path, "mlflow", uri=(tmp_path / "mlruns").as_uri())
    write(run, 1, 1, 5)
    assert hand_on(run, "mlflow") == []
    assert reading_back.mlflow(run, uri=(tmp_path / "mlruns").as_uri()) == [(s, loss(s)) for s in range(1, 6)]


def test_what_is_not_finite_arrives(tmp_path: Path) -> None:
    run = tracked(tmp_path, "tensorboard")
    write(run, 1, 1, 1, loss=float("nan"), grad_norm=float("inf"), huge=1e300)
    hand_on(run, "tensorboard")
    ((_, nan),) = reading_back.tensorboard(run)
    assert math.isnan(nan)
    assert [reading_back.tensorboard(run, tag) for tag in ("grad_norm", "huge")] == [[(1, float("inf"))]] * 2


def test_settings_contract_and_tags_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_SECRET_OF_MINE", "hunter2")
    run = make(
        tmp_path,
        tracking={"to": list(ALL), "project": "words"},
        contract={"task": "bytes", "metric": "loss"},
        telemetry={"alerts": {"webhook": "https://hooks.example/T0KEN"}},
    )
    write(run, 1, 1, 3)
    for name in ALL:
        assert hand_on(run, name) == []
    client = MlflowClient(f"sqlite:///{run.tracking}/mlflow.db")
    found = reading_back.of_mlflow(client)
    assert (found.info.run_name, found.info.status) == (run.id, "FINISHED")
    assert found.data.params["optim.lr"] == "0.0003" and found.data.params["contract.task"] == "bytes"
    tags = {k: v for k, v in found.data.tags.items() if k.startswith("clustertrain.")}
    assert tags["clustertrain.run"] == run.id and tags["clustertrain.commit"] == "c0ffee"
    assert (tags["clustertrain.job_id"], tags["clustertrain.attempt"]) == ("771", "1") and tags["clustertrain.host"]
    assert [m.timestamp for m in client.get_metric_history(found.info.run_id, "lr")] == [
        int(1000 * (T0 + s)) for s in (1, 2, 3)
    ]
    board = EventAccumulator(str(run.tracking / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {"loss", "lr"}
    recipe = board.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| optim.lr | `0.0003` |" in recipe and "| contract.metric | `loss` |" in recipe
    (of_wandb, *_) = [r.run for r in reading_back.wandb_records(run) if r.WhichOneof("record_type") == "run"]
    config = {u.key: u.value_json for u in of_wandb.config.update}
    assert (of_wandb.run_id, of_wandb.project) == (run.id, "words")
    assert (config["optim.lr"], config["run.job_id"]) == ("0.0003", '"771"')
    kept = b"".join(p.read_bytes() for p in run.tracking.rglob("*") if p.is_file())
    assert b"hunter2" not in kept and b"T0KEN" not in kept


def test_of_a_script_no_default_of_the_trainer_is_a_setting(tmp_path: Path) -> None:
    config = run_facts.load_run_metadata(make(tmp_path, script=ScriptSpec(path="train.py", cwd="/")), 0).config
    assert {"script.path", "train.seed", "job.gpus"} <= config.keys()
    assert not {"optim.lr", "model.dim", "train.steps"} & config.keys()


def test_no_tracker_imports_torch(tmp_path: Path) -> None:
    run = make(tmp_path, tracking={"to": list(ALL)})
    program = (
        "import sys\nfrom pathlib import Path\nfrom clustertrain.run.run_dir import RunDir\n"
        "from clustertrain.tracking import registry, run_facts, __main__\nrun = RunDir(Path(sys.argv[1]))\n"
        f"for name in {ALL}: registry.build_tracker(name, run, run_facts.load_run_metadata(run, 0))\n"
        "print({'torch', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_server_of_mlflow_that_is_away_is_said_once_and_the_rows_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(tracker, "RETRY_FIRST_S", 0.01)
    run = tracked(tmp_path, "mlflow", uri="http://127.0.0.1:9")
    write(run, 1, 1, 5)
    said: list[str] = []
    one = TrackerUploader(run, opened(run, "mlflow"), lambda _, why: said.append(why), get_ending=lambda: None)
    tries = 0

    def once_more(wait_s: float) -> bool:
        nonlocal tries
        tries += 1
        return tries == 3

    monkeypatch.setattr(one._stop, "wait", once_more)
    one.thread.run()
    assert tries == 3 and one.failed and len(said) == 1 and "127.0.0.1" in said[0]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/later.db")
    write_spec_without_uri(run)
    assert hand_on(run, "mlflow") == []
    assert reading_back.mlflow(run, f"sqlite:///{tmp_path}/later.db") == [(s, loss(s)) for s in range(1, 6)]


class Breaking:
    """Takes rows at some calls and breaks at the others; keeps those that it took."""

    name = "breaking"

    def __init__(self, *breaks: bool) -> None:
        self.breaks = list(breaks)
        self.taken: list[int] = []

    def open(self) -> int:
        return self.taken[-1] if self.taken else -1

    def log_rows(self, rows: Any) -> None:
        if self.breaks and self.breaks.pop(0):
            raise ConnectionResetError("Connection lost")
        self.taken.append(rows[0]["step"])

    def close(self, ending: str | None) -> None:
        if self.breaks:
            raise ConnectionResetError("Connection lost")

    def abandon(self) -> None:
        pass


@pytest.mark.parametrize(
    ("breaks", "complaints"),
    [((False, True), 0), ((False, True, False, True), 0), ((False, True, True), 1), ((True,), 0), ((True, True), 1)],
)
def test_what_breaks_is_opened_anew_once_before_it_is_called_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: tuple[bool, ...], complaints: int
) -> None:
    monkeypatch.setattr(tracker.RowFollower, "read", lambda self: one_row(run, self))
    run = tracked(tmp_path, "tensorboard")
    write(run, 1, 1, 6)
    place, said = Breaking(*breaks), []
    one = TrackerUploader(run, place, lambda _, why: said.append(why), get_ending=lambda: None)
    monkeypatch.setattr(one._stop, "wait", lambda wait_s: False)
    one.request_stop()
    one.thread.run()
    assert place.taken == [1, 2, 3, 4, 5, 6] and said == ["ConnectionResetError: Connection lost"] * complaints
    assert not one.failed


def one_row(run: RunDir, follower: RowFollower) -> list[Any]:
    """Of :meth:`RowFollower.read`, one at a time."""
    found = [] if follower.last_step >= 6 else [{"step": max(follower.last_step, 0) + 1}]
    follower.last_step += len(found) + (follower.last_step < 0)
    return found


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
)
def test_without_a_key_wandb_stays_offline(tmp_path: Path, environ: dict[str, str], offline: bool) -> None:
    from clustertrain.tracking.wandb import is_offline

    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    given = {k: v.format(tmp_path / "netrc") for k, v in {"NETRC": str(tmp_path / "none"), **environ}.items()}
    assert is_offline(False, given) == offline and is_offline(True, given)


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tracked(tmp_path, "wandb")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(Exception, match=r"clustertrain\[wandb\]"):
        opened(run, "wandb")
