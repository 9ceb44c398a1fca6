"""The judge reports each kind of fault, each of which is planted once."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from clustertrain.errors import ClusterTrainError
from clustertrain.run.run_dir import RunDir
from tests.harness.fuzz import sandbox as sandboxes
from tests.harness.fuzz.catalog import CLASSES, shares
from tests.harness.fuzz.inputs import outputs, repositories, requeues, run_files
from tests.harness.fuzz.judge import FaultFound, watching
from tests.harness.fuzz.play import InputClass, play
from tests.harness.fuzz.sandbox import RAW, SECRET, CallResult, Sandbox, sandbox


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with sandbox() as made:
        yield made


def find_kind(act: Callable[[], object], root: Path, hang_s: float = 10.0) -> str:
    with pytest.raises(FaultFound) as raised, watching([root], hang_s):
        act()
    return raised.value.fault.kind


def spin() -> None:
    while True:
        pass


def spin_through_alarms() -> None:
    while True:
        try:
            spin()
        except Exception:
            continue


def test_exception_is_a_fault(tmp_path: Path) -> None:
    assert find_kind(lambda: int("x"), tmp_path) == "traceback"
    assert find_kind(lambda: sys.exit(9), tmp_path) == "traceback"


@pytest.mark.parametrize("act", [spin, spin_through_alarms])
def test_hang_is_a_fault(tmp_path: Path, act: Callable[[], None]) -> None:
    assert find_kind(act, tmp_path, hang_s=0.2) == "hang"


def test_write_outside_is_a_fault_and_is_prevented(tmp_path: Path) -> None:
    allowed, other = tmp_path / "own", tmp_path / "other"
    allowed.mkdir()
    other.mkdir()
    (allowed / "link").symlink_to(other)
    (other / "kept").touch()
    acts: tuple[Callable[[], object], ...] = (
        lambda: (other / "x").write_text(""),
        lambda: (allowed / "link" / "x").write_text(""),
        (allowed / ".." / "other" / "x").mkdir,
        lambda: os.rename(other / "kept", allowed / "x"),  # noqa: PTH104 - the function whose event is judge_call
        lambda: (allowed / "x").rename(other / "x"),
        lambda: shutil.rmtree(other),
        (other / "kept").unlink,
        lambda: (other / "kept").chmod(0o600),
    )
    for act in acts:
        (allowed / "x").touch()
        assert find_kind(act, allowed) == "outside"
        (allowed / "x").unlink(missing_ok=True)
    assert [p.name for p in other.iterdir()] == ["kept"]


def test_allowed_writes_are_not_faults(tmp_path: Path) -> None:
    with watching([tmp_path]):
        (tmp_path / "x").write_text((Path(__file__)).read_text())
        (tmp_path / "x").rename(tmp_path / "y")
        Path(os.devnull).write_text("")


def test_unpickling_and_a_shell_are_faults(tmp_path: Path) -> None:
    data = pickle.dumps(OrderedDict(a=1))
    assert find_kind(lambda: pickle.loads(data), tmp_path) == "pickle"  # noqa: S301 - the judge must stop it
    assert find_kind(lambda: os.system("true"), tmp_path) == "canary"  # noqa: S605 - as above


def plant_and_call(box: Sandbox, monkeypatch: pytest.MonkeyPatch, act: Callable[[], int]) -> str:
    monkeypatch.setattr(sandboxes, "main", act)
    with pytest.raises(FaultFound) as raised:
        box.call(["status"], terminal_safe=True)
    return raised.value.fault.kind


def test_faulty_output_and_exit_status_are_faults(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def prints(text: str, code: int = 0) -> Callable[[], int]:
        def act() -> int:
            print(text)
            return code

        return act

    assert plant_and_call(box, monkeypatch, prints("", code=9)) == "exit"
    assert plant_and_call(box, monkeypatch, prints("", code=2)) == "exit"
    assert plant_and_call(box, monkeypatch, prints("a\x1b]52;c;eA==\x07")) == "raw"
    assert plant_and_call(box, monkeypatch, prints("\x9b31m")) == "raw"
    assert plant_and_call(box, monkeypatch, prints("\udcff")) == "traceback"

    def escapes() -> int:
        raise ClusterTrainError("main lets this through")

    assert plant_and_call(box, monkeypatch, escapes) == "traceback"
    box.canary.touch()
    assert plant_and_call(box, monkeypatch, prints("")) == "canary"
    monkeypatch.setattr(sandboxes, "main", prints("a word\n\tand another\n"))
    assert box.call(["status"], terminal_safe=True).out == "a word\n\tand another\n\n"


def test_printable_text_is_not_raw() -> None:
    assert RAW.search("é漢🙂\n\t\r │█ –") is None


@pytest.mark.parametrize("plant", ["setuid", "secret"])
def test_leak_into_the_snapshot_is_a_fault(tmp_path: Path, plant: str) -> None:
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "x"
    path.write_text("fine")
    repositories._judge_snapshot(tmp_path)
    if plant == "setuid":
        path.chmod(0o4755)
    else:
        path.write_text(f"TOKEN={SECRET}")
    with pytest.raises(FaultFound, match="leak"):
        repositories._judge_snapshot(tmp_path)


def test_hidden_neighbor_is_a_fault() -> None:
    run_files._check_neighbor_is_listed(f"| {run_files.NEIGHBOR} |")
    with pytest.raises(FaultFound, match="hidden"):
        run_files._check_neighbor_is_listed("| llama-abc234 |")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--wrap=true", "job.sh"], 0),
        (["--qos=another", "job.sh"], 0),
        (["--qos=x", "job.sh"], 1),
    ],
)
def test_unrequested_sbatch_option_is_a_fault(tmp_path: Path, options: list[str], code: int) -> None:
    def judge_call(options: list[str], code: int) -> None:
        called = ["sbatch", "--parsable", f"--chdir={tmp_path}", *options[:-1], f"{tmp_path}/{options[-1]}"]
        requeues._judge(RunDir(tmp_path), CallResult(code, "", ""), called, {"qos": "x"}, accepted=True)

    judge_call(["--qos=x", "job.sh"], 0)
    with pytest.raises(FaultFound, match="argv"):
        judge_call(options, code)


def test_requeue_of_another_runs_job_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(FaultFound, match="neighbor"):
        requeues._judge(
            RunDir(tmp_path), CallResult(1, "", ""), ["scancel", requeues.NEIGHBOR_JOB_ID], {}, accepted=True
        )


def test_silently_lost_output_is_a_fault(box: Sandbox) -> None:
    with outputs.Failing(0, errno.ENOSPC) as out:
        with pytest.raises(OSError, match="No space"):
            out.write(b"x")
        for result in (CallResult(0, "", "told"), CallResult(1, "", "")):
            with pytest.raises(FaultFound, match="lost"):
                outputs._judge(box, ("list",), result, out, whole_stderr=True)
        outputs._judge(box, ("list",), CallResult(1, "", "told"), out, whole_stderr=True)
    with outputs.Failing(-1, 0) as out, pytest.raises(FaultFound, match="json"):
        outputs._judge(box, ("list", "--json"), CallResult(0, "[", ""), out, whole_stderr=True)


@pytest.mark.long
def test_play_continues_after_a_fault_and_reduces_its_input(box: Sandbox) -> None:
    def fail(_: Sandbox, number: int) -> None:
        with watching([box.site]):
            if number > 1000:
                raise ValueError(number)

    input_class = InputClass("numbers", lambda: st.integers(0, 1 << 40), fail)
    played = play(input_class, box, seed=1, inputs=600)
    assert played.inputs == 600
    assert [f.input for f in played.found] == [1001]  # reported once, although each chunk shows it
    replayed = play(input_class, box, seed=played.found[0].seed, inputs=250)
    assert [f.input for f in replayed.found] == [1001]


def test_each_class_gets_a_share_of_the_inputs() -> None:
    parts = shares(100_000, list(CLASSES))
    assert set(parts) == set(CLASSES) and min(parts.values()) > 1000
    assert 99_000 < sum(parts.values()) < 101_000
