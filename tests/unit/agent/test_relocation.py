"""Files and variables that name the folder of an environment, for another folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain.agent.relocation import RankPython, relocate_files, relocate_script
from clustertrain.run.shipped_environment import ShippedEnvironment
from tests.fakes.environments import VERSION, make_environment, write

PYTHON = RankPython(("/home/me/venv", "/gpfs/me/venv"), Path("/tmp/copy"))


def test_variables() -> None:
    env = {
        "PATH": "/usr/bin:/home/me/venv/bin:/home/me/venv2/bin", "VIRTUAL_ENV": "/gpfs/me/venv",
        "OUT": "/home/me/venv/out", "LD_LIBRARY_PATH": "/home/me/venv/lib", "PYTHONPATH": "",
    }  # fmt: skip
    assert PYTHON.relocate_variables(env) == {
        "PATH": "/usr/bin:/tmp/copy/environment/bin:/home/me/venv2/bin", "VIRTUAL_ENV": "/tmp/copy/environment",
        "OUT": "/home/me/venv/out", "LD_LIBRARY_PATH": "/tmp/copy/environment/lib", "PYTHONPATH": "",
        "CLUSTERTRAIN_ENVIRONMENT_FOLDERS": '["/tmp/copy/environment", "/home/me/venv", "/gpfs/me/venv"]',
    }  # fmt: skip
    assert RankPython().relocate_variables(env) == env and RankPython().python == ""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (b"#!/home/me/venv/bin/python3\nx", b"#!/tmp/copy/environment/bin/python3\nx"),
        (b"#! /gpfs/me/venv/bin/python -I\nx", b"#!/tmp/copy/environment/bin/python -I\nx"),
        (b"#!/home/me/venv2/bin/python\nx", None),
        (b"#!/usr/bin/env python\n# /home/me/venv/bin/python\n", None),
        (b"#!/bin/bash\n'''exec' is no command\n", None),
        (b"\x7fELF /home/me/venv/bin/python", None),
        (b"#!", None),
        (
            b"#!/bin/sh\n'''exec' \"/home/me/venv/bin/python\" \"$0\" \"$@\"\n' '''\nx",
            b"#!/bin/sh\n'''exec' \"/tmp/copy/environment/bin/python\" \"$0\" \"$@\"\n' '''\nx",
        ),
    ],
)
def test_scripts(script: bytes, expected: bytes | None) -> None:
    assert relocate_script(script, PYTHON) == (script if expected is None else expected)


@pytest.mark.parametrize("name", ["a b", "it's", "x" * 120])
def test_script_for_a_path_that_the_kernel_does_not_take(name: str, tmp_path: Path) -> None:
    copy = tmp_path / name
    (copy / "environment" / "bin").mkdir(parents=True)
    (copy / "environment" / "bin" / "python").symlink_to(sys.executable)
    text = relocate_script(b"#!/home/me/venv/bin/python -I\nimport sys\nprint(sys.argv[1:], sys.flags.isolated)\n",
                           RankPython(PYTHON.prefixes, copy))  # fmt: skip
    script = tmp_path / "script"
    script.write_bytes(text)
    script.chmod(0o755)
    output = subprocess.run([script, "a b", "$HOME"], capture_output=True, text=True, check=True).stdout
    assert output == "['a b', '$HOME'] 1\n"


def test_path_files_and_other_files(tmp_path: Path) -> None:
    prefix = make_environment(tmp_path).rename(tmp_path / "environment")
    packages = prefix / "lib" / VERSION / "site-packages"
    write(packages / "a.pth", f"{tmp_path}/venv/src\n/elsewhere\nimport x  # {tmp_path}/venv\n")
    activate = write(prefix / "bin" / "activate", f"VIRTUAL_ENV={tmp_path}/venv\n").read_text()
    config = (prefix / "pyvenv.cfg").read_text()
    shipped = ShippedEnvironment(hash="x", prefixes=(f"{tmp_path}/venv",), archive="")
    relocate_files(tmp_path, shipped, Path("/tmp/copy"))
    assert (packages / "a.pth").read_text().splitlines()[:2] == ["/tmp/copy/environment/src", "/elsewhere"]
    assert (packages / "a.pth").read_text().endswith(f"import x  # {tmp_path}/venv\n")
    assert (prefix / "bin" / "activate").read_text() == activate
    assert (prefix / "pyvenv.cfg").read_text() == config  # the base interpreter was not packed
