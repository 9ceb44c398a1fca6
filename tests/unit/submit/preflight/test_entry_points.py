"""Search for the modules and functions that a recipe names, at submission."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clustertrain.errors import ConfigError
from clustertrain.submit.preflight import entry_points
from clustertrain.submit.prepare import prepare
from clustertrain.submit.request import SubmitRequest

pytestmark = pytest.mark.usefixtures("fake_slurm")

NETS = """
raise RuntimeError("nobody may run this")
if True:
    from collections import OrderedDict as Kept
try:
    class Net: ...
except ImportError:
    Net = other = None
def make():
    def inner(): ...
    later = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('nobody may run this')")
    (tmp_path / "package" / "net.py").write_text("from elsewhere import *")
    (tmp_path / "package" / "lazy.py").write_text("def __getattr__(name): ...")
    (tmp_path / "package" / "torn.py").write_text("def make(:\n")
    (tmp_path / "loose").mkdir()
    return tmp_path


def notes(folder: Path, entry: str, **job_env: str) -> list[str]:
    return entry_points.check_entries(
        prepare(
            SubmitRequest(cwd=folder, assignments=(f"model.entry={entry}",), env=job_env, job={"cluster": site(folder)})
        )
    )


def site(folder: Path) -> str:
    return "site" if (folder / "config" / "clustertrain" / "clusters" / "site.toml").exists() else ""


@pytest.mark.parametrize(
    "entry",
    [
        "nets:make", "nets:Net", "nets:Net.of", "nets:Kept", "nets:other", "package.net:whatever", "package.lazy:Net",
        "json:loads", "json.decoder:JSONDecoder", "math:sqrt",
    ],
)  # fmt: skip
def test_entry_is_found_without_running_it(entry: str, folder: Path) -> None:
    assert notes(folder, entry) == []


@pytest.mark.parametrize(
    ("entry", "message", "fix"),
    [
        ("mine:make", "no module 'mine' in {folder}, and none is installed for ", "next to the recipe"),
        ("package.nets:make", "no module 'package.nets' in {folder}, and none", "next to the recipe"),
        ("json.nothing:make", "no module 'json.nothing' in {folder}, and none", "next to the recipe"),
        ("nets:mkae", "{folder}/nets.py has no 'mkae'", "did you mean make?"),
        ("nets:later", "{folder}/nets.py has no 'later'", "did you mean other?"),
        ("package:make", "{folder}/package/__init__.py has no 'make'", "define a function make in it"),
        (
            "package.torn:make",
            "{folder}/package/torn.py is not Python: invalid syntax (torn.py, line 1)",
            "syntax error",
        ),
        ("loose:make", "{folder}/loose is a folder of modules", "name the module in it"),
    ],
)
def test_missing_entry_is_refused_with_search_path(entry: str, message: str, fix: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        notes(folder, entry)
    assert caught.value.message.startswith(f"model.entry = {entry!r}: {message.format(folder=folder)}")
    assert fix in str(caught.value.fix)


def test_ignored_entry_is_refused(folder: Path) -> None:
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / ".gitignore").write_text("package/\nnets.py\n")
    with pytest.raises(ConfigError, match=r"git ignores .*/package/net.py, so the snapshot of the code would lack it"):
        notes(folder, "package.net:make")
    assert notes(folder, "nets:make") == []  # a single module is copied even if git ignores it


def test_data_entry_is_checked(folder: Path) -> None:
    assignments = ("model.entry=nets:Net", "data.kind=custom", "data.entry=sets:make")
    with pytest.raises(ConfigError, match=r"data.entry = 'sets:make': no module 'sets'"):
        entry_points.check_entries(prepare(SubmitRequest(cwd=folder, assignments=assignments)))


def test_job_pythonpath_is_searched(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.py").write_text("make = dict\n")
    assert notes(folder, "mine:make", PYTHONPATH=f"/nowhere:{tmp_path / 'more'}") == []


@pytest.mark.parametrize("profile", ['python = "/cluster/python"', 'setup = ["module load nets"]'])
def test_entry_for_other_python_is_noted(profile: str, folder: Path) -> None:
    clusters = folder / "config" / "clustertrain" / "clusters"
    clusters.mkdir(parents=True)
    (clusters / "site.toml").write_text(profile)
    (note,) = notes(folder, "mine:make")
    assert note.startswith("model.entry = 'mine:make': no module 'mine' here; it must")
