"""Which environments can be shipped, and what lies outside of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustertrain.errors import ConfigError
from clustertrain.submit.shipping.environment import find_environment
from tests.fakes.environments import VERSION, make_environment, write


def test_virtual_environment_with_its_base(tmp_path: Path) -> None:
    prefix = make_environment(tmp_path)
    environment = find_environment(prefix / "bin" / "python")
    assert (environment.prefix, environment.version) == (prefix, VERSION)
    assert environment.base_python == tmp_path / "python" / "bin" / VERSION
    assert environment.outside == () and not environment.has_system_packages


def test_environment_made_with_copies(tmp_path: Path) -> None:
    prefix = make_environment(tmp_path)
    (prefix / "bin" / "python").unlink()
    write(prefix / "bin" / "python", "a copy", 0o755)
    assert find_environment(prefix / "bin" / "python").base_python == tmp_path / "python" / "bin" / VERSION


def test_system_python_as_base_is_not_packed(tmp_path: Path) -> None:
    prefix = make_environment(tmp_path)
    write(prefix / "pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = true\n")
    (prefix / "bin" / "python3").unlink()
    (prefix / "bin" / "python3").symlink_to("/usr/bin/env")  # any program of the system
    environment = find_environment(prefix / "bin" / "python")
    assert environment.base_python is None and environment.outside == ("the packages of /usr/bin/env",)


@pytest.mark.parametrize("change", ["conda", "incomplete"])
def test_base_that_needs_more_than_its_own_files_stays(change: str, tmp_path: Path) -> None:
    prefix = make_environment(tmp_path)
    base = tmp_path / "python"
    if change == "conda":
        (base / "conda-meta").mkdir()
    else:
        (base / "lib" / VERSION / "os.py").unlink()
    environment = find_environment(prefix / "bin" / "python")
    assert environment.base_python is None and environment.outside == (f"{base} (the base interpreter)",)


def test_conda_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = tmp_path / "conda" / "envs" / "x"
    (prefix / "conda-meta").mkdir(parents=True)
    write(prefix / "lib" / VERSION / "os.py")
    python = write(prefix / "bin" / VERSION, mode=0o755)
    (tmp_path / "link").symlink_to(python)
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    for path in (python, tmp_path / "link"):
        environment = find_environment(path)
        assert (environment.prefix, environment.base_python, environment.outside) == (prefix, None, ())
    user_packages = write(tmp_path / "user" / "lib" / VERSION / "site-packages" / "x.py").parent
    assert find_environment(python).outside == (str(user_packages),)


def test_projects_outside_are_named(tmp_path: Path) -> None:
    prefix = make_environment(tmp_path)
    packages = prefix / "lib" / VERSION / "site-packages"
    projects = {name: tmp_path / name for name in ("by path", "editable")}
    for path in projects.values():
        path.mkdir()
    write(packages / "a.pth", f"# comment\nimport sys\n{projects['by path']}\n/no/such/folder\n{packages}/pkg\n")
    document = {"url": projects["editable"].as_uri(), "dir_info": {"editable": True}}
    write(packages / "b-1.dist-info" / "direct_url.json", json.dumps(document))
    write(packages / "c-1.dist-info" / "direct_url.json", json.dumps({"url": "file:///x", "dir_info": {}}))
    write(packages / "d-1.dist-info" / "direct_url.json", "[]")
    outside = find_environment(prefix / "bin" / "python").outside
    assert outside == tuple(f"{path} (linked from site-packages)" for path in projects.values())


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("system/bin/python", "is not in a virtual environment or a conda environment"),
        ("missing/bin/python", "does not exist on this machine"),
        ("empty/bin/python", r"lib/python3.\* is missing"),
    ],
)
def test_other_interpreters_are_refused(python: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "system" / "bin" / "python")
    write(tmp_path / "empty" / "pyvenv.cfg")
    with pytest.raises(ConfigError, match=message) as refusal:
        find_environment(tmp_path / python)
    assert refusal.value.fix
