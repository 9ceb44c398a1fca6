"""What is published: the sdist, the wheel built from it, and the commands of that wheel in an empty environment."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from tests.base_environment import build_base_environment
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


def test_version_is_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == VERSION
    assert f"\n## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()


def test_changelog_has_one_line_per_change() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].splitlines()
    assert [line for line in lines if line.startswith("  ") or len(line) > 160] == []


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it, as in a release."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in folder.iterdir()) == [
        f"clustertrain-{VERSION}-py3-none-any.whl", f"clustertrain-{VERSION}.tar.gz"
    ]  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def wheel(packages: Path) -> Path:
    return next(packages.glob("*.whl"))


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout, to list its files")
def test_sdist_has_what_a_packager_needs(packages: Path) -> None:
    with tarfile.open(next(packages.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = {name for name in tracked.splitlines() if (ROOT / name).exists()} - names
    assert {name.split("/")[0] for name in missing} <= {".ci"}
    assert not {name for name in names if "__pycache__" in name or name.endswith((".whl", ".pyc"))}


@pytest.mark.long
def test_wheel_has_its_metadata_and_data_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"clustertrain-{VERSION}.dist-info"
        metadata = Metadata.from_email(archive.read(f"{info}/METADATA"), validate=True)
    assert metadata.license_expression == "Apache-2.0 AND MIT"
    assert set(metadata.project_urls or {}) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert metadata.description_content_type == "text/markdown" and "clustertrain" in (metadata.description or "")
    templates = {f"clustertrain/{p.relative_to(ROOT)}" for p in (ROOT / "templates").rglob("*") if p.is_file()}
    assert templates <= names and "clustertrain/py.typed" in names
    others = {name for name in names if name.split("/")[0] not in ("clustertrain", info)}
    assert {name.rpartition("/")[0] for name in others} == {f"clustertrain-{VERSION}.data/data/share/man/man1"}


@pytest.mark.long
def test_commands_of_the_wheel_work_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    python = build_base_environment(tmp_path / "venv", wheel)
    done = subprocess.run(
        [ROOT / "tests" / "wheel_smoke", python.parent], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("--- all passed\n")
