"""Requests that cannot run fail immediately, with a message that has the reason and the fix, and no traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertrain.cli.main import main
from clustertrain.submit.preflight import filesystem
from tests.fakes.slurm.fixture import FakeSlurm

LONG = "a" * 256
RunCli = Callable[..., tuple[int, str]]
LOCAL = ("submit", "--dry-run", "--backend", "local")
SLURM = ("submit", "--dry-run", "--backend", "slurm")


@pytest.fixture
def run_cli(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCli:
    monkeypatch.chdir(tmp_path)

    def run_cli(*argv: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *argv])
        code = main()
        return code, capsys.readouterr().err

    return run_cli


@pytest.mark.parametrize(
    "argv",
    [
        ("plan", "--checkpoint-dir", "~nouser/x"),
        ("plan", "--set", "data.path=~nouser/x"),
        (*LOCAL, "--set", "data.validation_path=~nouser/x"),
        ("checkpoint", "verify", "~nouser/x"),
    ],
    ids=" ".join,
)
def test_home_of_unknown_user_is_named(argv: tuple[str, ...], run_cli: RunCli) -> None:
    code, err = run_cli(*argv)
    assert code in (1, 78) and "'~nouser/x': ~nouser has no home folder" in err and "fix: write an absolute path" in err


@pytest.mark.parametrize("name", ["CLUSTERTRAIN_HOME", "CLUSTERTRAIN_CLUSTER_PATH", "XDG_CONFIG_HOME"])
def test_home_of_unknown_user_in_environment_is_named(
    name: str, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "~nouser/x")
    code, err = run_cli(*LOCAL, "--cluster", "x") if name != "CLUSTERTRAIN_HOME" else run_cli("list")
    assert code == 78 and f"{name} = '~nouser/x'" in err


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ((*LOCAL, f"{LONG}.toml"), 2),
        ((*LOCAL, f"{LONG}.py"), 2),
        ((*LOCAL, "--set", f"data.path={LONG}"), 78),
        ((*LOCAL, "--set", f"model.entry={LONG}:f"), 78),
        ((*LOCAL, "--set", f"data.entry={LONG}:f", "--set", "data.kind=custom"), 78),
        ((*LOCAL, "--checkpoint-dir", LONG), 78),
        ((*LOCAL, "--cluster", LONG), 78),
        (("status", LONG), 1),
        (("checkpoint", "verify", f"./{LONG}"), 78),
    ],
    ids=lambda value: " ".join(value).replace(LONG, "LONG") if isinstance(value, tuple) else str(value),
)
def test_too_long_name_is_refused(argv: tuple[str, ...], code: int, run_cli: RunCli) -> None:
    assert run_cli(*argv)[0] == code


def test_long_run_name_is_cut(run_cli: RunCli) -> None:
    assert run_cli(*LOCAL, "--name", LONG)[0] == 0


@pytest.mark.parametrize("assignment", ["model.kind=\udcff", "train.st\udcff=3", "model.args.x=[1, '\udcff']"])
def test_non_utf8_argument_is_named(assignment: str, run_cli: RunCli) -> None:
    code, err = run_cli("plan", "--set", assignment)
    assert code == 2 and "is not UTF-8" in err


@pytest.mark.parametrize("url", ["memory://x", "simplecache::memory://x", "http://host/x", "data://x"])
def test_remote_without_storage_is_refused(url: str, run_cli: RunCli) -> None:
    code, err = run_cli("plan", "--set", f"checkpoint.remote={url}")
    assert code == 78 and f"checkpoint.remote = '{url}'" in err and "fix: give an object store" in err


@pytest.mark.parametrize("options", [("--device", "cuda"), ("--gpu-type", "h100")])
def test_cuda_needs_gpu_on_local_backend(
    options: tuple[str, ...], run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clustertrain.submit.preflight.machine.has_gpu", lambda: False)
    code, err = run_cli(*LOCAL, *options)
    assert code == 78 and "this machine has no GPU" in err and "--device cpu" in err
    assert run_cli(*SLURM, *options)[0] == 0
    monkeypatch.setattr("clustertrain.submit.preflight.machine.has_gpu", lambda: True)
    assert run_cli(*LOCAL, *options)[0] == 0


def profile(tmp_path: Path, python: Path) -> None:
    folder = tmp_path / "config" / "clustertrain" / "clusters"
    folder.mkdir(parents=True)
    (folder / "site.toml").write_text(f'python = "{python}"\n')


def test_missing_profile_python(run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile(tmp_path, tmp_path / "env" / "bin" / "python")
    code, err = run_cli(*LOCAL, "--cluster", "site")
    assert (
        code == 78 and "env/bin/python' of the cluster profile does not exist" in err and "fix: name another one" in err
    )
    code, err = run_cli(*SLURM, "--cluster", "site")  # the nodes may have it on a local disk
    assert code == 0 and "does not exist on this machine" in err
    # But not on a filesystem that the nodes share.
    mounts = f"1 0 0:1 / / rw - ext4 disk rw\n2 1 0:2 / {tmp_path} rw - nfs4 server:/home rw\n"
    (tmp_path / "mountinfo").write_text(mounts)
    monkeypatch.setattr(filesystem, "_MOUNTINFO", tmp_path / "mountinfo")
    code, err = run_cli(*SLURM, "--cluster", "site")
    assert code == 78 and "does not exist, and nfs4 is the same on all nodes" in err


def test_profile_python_not_executable(run_cli: RunCli, tmp_path: Path) -> None:
    profile(tmp_path, tmp_path / "python")
    (tmp_path / "python").write_text("")
    code, err = run_cli(*LOCAL, "--cluster", "site")
    assert code == 78 and "cannot be executed" in err
    (tmp_path / "python").chmod(0o755)
    assert run_cli(*LOCAL, "--cluster", "site")[0] == 0


def test_home_below_file_is_refused(run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "file" / "x"))
    code, err = run_cli(*LOCAL)
    assert code == 78 and f"{tmp_path / 'file'} is a file, not a folder" in err


def test_only_python_files_are_scripts(run_cli: RunCli, tmp_path: Path) -> None:
    for name, text in (("conf.yaml", "a: 1"), ("data.json", "{}"), ("run.sh", "#!/bin/sh\n"), ("empty", "")):
        (tmp_path / name).write_text(text)
        code, err = run_cli(*LOCAL, name)
        assert code == 2 and f"{name}: " in err and "neither a recipe nor a Python script" in err
    for name, text in (("train.py", ""), ("train", "#!/usr/bin/env python3\n")):
        (tmp_path / name).write_text(text)
        assert run_cli(*LOCAL, name)[0] == 0


def test_gpu_range_with_too_many_digits_is_refused(run_cli: RunCli) -> None:
    for text in ("1-" + "9" * 5000, "9" * 5000, "٣-٤"):
        code, err = run_cli("plan", "--gpus-range", text)
        assert code == 2 and "is not LOW-HIGH" in err
