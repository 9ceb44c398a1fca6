"""``clustertrain checkpoint`` with checkpoints at a URL."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from clustertrain.checkpoint.format import storage_errors
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.cli.main import main
from tests.unit.checkpoint.saved import decoder, make_run, recipe_of

Call = Callable[..., tuple[int, str, str]]
URL = "memory://bucket/net-abcdef"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clustertrain", "checkpoint", *map(str, args)])
        code = main()
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The checkpoint folder of a run with two checkpoints, which are copied to URL."""
    run = make_run(tmp_path / "home" / "runs" / "net-abcdef", decoder(recipe_of(layers=1)), (3, 6), layers=1)
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)
    memory.put(str(run / "checkpoints"), "/bucket/net-abcdef", recursive=True)
    return run / "checkpoints"


def test_list_verify_and_digest_match_those_of_the_run(call: Call, root: Path) -> None:
    for args in (["verify"], ["digest"], ["digest", "--step", "3"], ["digest", "--of", "model"]):
        command, *options = args
        assert call(command, URL, *options)[:2] == call(command, "net-abcdef", *options)[:2]
    assert call("digest", f"{URL}@3")[1] == call("digest", f"{URL}/step-00000003")[1] == call("digest", "net@3")[1]
    rows = json.loads(call("list", URL, "--verify", "--json")[1])["checkpoints"]
    assert [(r["step"], r["path"], r["verified"]) for r in rows] == [
        (step, f"{URL}/step-{step:08d}", True) for step in (3, 6)
    ]
    assert "6" in call("list", URL)[1]


def test_diff_and_export_read_from_the_url(call: Call, root: Path, tmp_path: Path) -> None:
    code, out, _ = call("diff", URL, "net-abcdef")
    assert code == 0 and f"A  {URL}/step-00000006" in out
    assert call("diff", f"{URL}@3", "net-abcdef@6")[0] == 1
    for name, target in ((URL, "there"), ("net-abcdef", "here")):
        assert call("export", name, "--output", tmp_path / target)[0] == 0
    files = [{p.name: p.read_bytes() for p in (tmp_path / t).iterdir()} for t in ("there", "here")]
    assert files[0] == files[1]


def test_damage_at_the_url_is_reported(call: Call, root: Path) -> None:
    (RemoteFolder(URL) / "step-00000006" / "rank-0.bin").write_bytes(b"x")
    code, out, err = call("verify", URL)
    assert (code, "step 3: ok" in out, "step 6: DAMAGED" in out) == (1, True, True)
    assert f"{URL}/step-00000006/rank-0.bin: has 1 bytes" in err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["list", "memory://bucket/nothing"], 1, "memory://bucket/nothing does not exist"),
        (["digest", f"{URL}@5"], 1, "no committed checkpoint of step 5; existing steps: 3, 6"),
        (["list", "nosuch://bucket/x"], 78, "fsspec does not know the protocol nosuch://"),
        (["prune", URL, "--keep", "1"], 2, "the run itself deletes remote copies"),
    ],
    ids=["missing", "step", "protocol", "prune"],
)
def test_errors_are_reported_without_a_traceback(
    call: Call, root: Path, args: list[str], code: int, message: str
) -> None:
    exit_code, _, err = call(*args)
    assert (exit_code, message in err) == (code, True)
    assert "Traceback" not in err


def test_store_without_permission_is_reported(call: Call, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_errors, "RETRY_TIMEOUT_S", 0.0)

    def fail(self: RemoteFolder) -> bool:
        raise PermissionError(13, "access denied: Forbidden")

    monkeypatch.setattr(RemoteFolder, "is_dir", fail)
    code, _, err = call("list", URL)
    assert (code, f"{URL}: access denied: Forbidden" in err) == (1, True)
