"""What submit says about a command: where -- belongs, and which code has no snapshot."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from clustertrain.errors import UsageError
from clustertrain.submit.checks import check_target
from clustertrain.submit.prepare import prepare
from clustertrain.submit.request import SubmitRequest


@pytest.mark.parametrize(
    ("target", "args", "fix"),
    [
        ("python", ("train.py", "a b"), "clustertrain submit [OPTIONS] -- python train.py 'a b'"),
        ("torchrun", ("--standalone", "train.py"), "clustertrain submit [OPTIONS] -- torchrun --standalone train.py"),
        ("tool", ("x" * 100,), "clustertrain submit [OPTIONS] -- tool …"),
        ("./tool", (), "name a recipe"),
        ("missing", (), "name a recipe"),
    ],
)
def test_command_as_a_target_is_told_where_the_dashes_belong(
    target: str, args: tuple[str, ...], fix: str, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "tool").chmod(0o755)
    with pytest.raises(UsageError, match=f"{target}: no such file") as e:
        check_target(SubmitRequest(target=target, args=args, cwd=tmp_path, environ={"PATH": str(tmp_path / "bin")}))
    assert fix in str(e.value.fix)


def test_code_without_a_snapshot_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    (tmp_path / "train.py").touch()

    def find_note(*command: str) -> str:
        job = {"backend": "local", "device": "cpu"}
        warnings = prepare(SubmitRequest(command=command, cwd=tmp_path, job=job, environ=environ)).plan.warnings
        return next((warning for warning in warnings if "not copied" in warning), "")

    note = find_note("env", "-C", "/", "A=1", sys.executable, "train.py")
    assert note == (
        "The code is not copied, because clustertrain cannot see what env runs: if you edit train.py, the next attempt "
        "uses the edited file"
    )
    assert "cannot see what bash runs" in find_note("bash", "-c", "true", "train.py")
    assert not find_note("env", "A=1", sys.executable, "train.py")
    assert not find_note("env", "A=1", "true", "x.py")
