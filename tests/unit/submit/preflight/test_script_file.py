"""Files that `submit` accepts as scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.errors import UsageError
from clustertrain.submit.checks import check_target
from clustertrain.submit.recipe import parse_recipe
from clustertrain.submit.request import SubmitRequest


@pytest.mark.parametrize(
    ("name", "content", "description", "fix"),
    [
        ("conf.yaml", b"lr: 0.1\n", "a YAML file", ".toml"),
        ("conf.json", b"{}\n", "a JSON file", ".toml"),
        ("conf.ini", b"[a]\n", "a configuration file", ".toml"),
        ("run.sh", b"echo\n", "a shell script", "clustertrain submit -- bash run.sh"),
        ("run", b"#!/usr/bin/env bash\necho\n", "a shell script", "clustertrain submit -- bash run"),
        ("job.sbatch", b"#SBATCH -N 1\n", "a batch script", "clustertrain adopt job.sbatch"),
        ("run.pl", b"#!/usr/bin/perl -w\n", "a script for '/usr/bin/perl -w'", "clustertrain submit -- ./run.pl"),
        ("train", b"\x7fELF\2\1\1\0\0", "a binary file", "clustertrain submit -- ./train"),
        ("train.py", b"print()\0\0", "a binary file", "clustertrain submit -- ./train.py"),
        ("notebook.ipynb", b"{}", "a notebook", "nbconvert"),
        ("README", b"read me\n", "an unknown file type", "#!/usr/bin/env python3"),
        ("empty", b"", "an unknown file type", ".py"),
        ("notes.txt", b"\xff\xfe", "an unknown file type", ".py"),
    ],
)
def test_non_python_file_is_refused(name: str, content: bytes, description: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as e:
        check_target(SubmitRequest(target=name, cwd=tmp_path))
    assert e.value.message.startswith(f"{name}: {description}") and fix in (e.value.fix or "")


@pytest.mark.parametrize(
    ("name", "content"),
    [("train.py", b""), ("train", b"#!/usr/bin/env python3\n"), ("train.task", b"#!/opt/venv/bin/python3.12 -u\n")],
)
def test_python_scripts_pass(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    request = SubmitRequest(target=name, cwd=tmp_path)
    check_target(request)
    script = parse_recipe(request).script
    assert script is not None and script.path == str(tmp_path / name)
