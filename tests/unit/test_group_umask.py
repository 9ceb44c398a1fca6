"""New files and folders are as open to the group as their parent folder, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertrain import fsio

MODES = [(0o750, 0o750), (0o700, 0o700), (0o755, 0o750), (0o2750, 0o2750)]


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("parent", "created"), [(0o750, 0o750), (0o700, 0o700), (0o755, 0o750), (0o2750, 0o2750)], ids=oct
)
def test_new_folder_is_as_open_as_its_parent(tmp_path: Path, umask: int, parent: int, created: int) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(parent)
    fsio.make_folder(run / "a" / "b")
    assert fsio.claim_folder(run / "c")
    for path in (run / "a", run / "a" / "b", run / "c"):
        assert mode(path) == created
    assert fsio.claim_folder(run / "d", mode=0o700) and mode(run / "d") & 0o777 == 0o700
    assert not fsio.claim_folder(run / "d", mode=0o750) and mode(run / "d") & 0o777 == 0o700


def test_file_in_a_group_folder_is_readable_by_the_group(tmp_path: Path, umask: int) -> None:
    tmp_path.chmod(0o750)
    with fsio.group_umask(tmp_path):
        fsio.write_text(tmp_path / "a", "")
        fsio.write_text(tmp_path / "secret", "", mode=0o600)
    assert (mode(tmp_path / "a"), mode(tmp_path / "secret")) == (0o640, 0o600)
    assert os.umask(umask) == umask, "the umask is restored"


def test_private_folder_does_not_change_the_umask(tmp_path: Path, umask: int) -> None:
    tmp_path.chmod(0o700)
    with fsio.group_umask(tmp_path):
        assert os.umask(umask) == umask
