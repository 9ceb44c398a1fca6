"""Filesystem types from mountinfo, and folders that are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clustertrain.errors import ConfigError
from clustertrain.submit.preflight import filesystem

MOUNTS = """\
27 1 254:0 / / rw,relatime - overlay overlay rw
28 27 0:25 / /home rw,nosuid shared:1 - nfs4 server:/home rw
29 28 0:26 / /home/with\\040space rw - lustre mds@tcp:/fs rw
30 27 0:27 / /dev/shm rw - tmpfs tmpfs rw
31 27 0:28 / /data rw - ext4 /dev/sda1 rw
32 31 0:29 / /data rw master:2 - xfs /dev/sdb1 rw
torn line
"""


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/home/me/ct", "nfs4"),
        ("/home", "nfs4"),
        ("/homework", "overlay"),
        ("/home/with space/ct", "lustre"),
        ("/dev/shm/x", "tmpfs"),
        ("/data/x", "xfs"),  # the later mount covers the earlier
        ("/anything", "overlay"),
    ],
)
def test_longest_mount_point_wins(path: str, fstype: str) -> None:
    assert filesystem.find_filesystem_type(Path(path), MOUNTS) == fstype


def mock_filesystem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fstype: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"27 1 254:0 / / rw - {fstype} dev rw\n")
    monkeypatch.setattr(filesystem, "_MOUNTINFO", mounts)


@pytest.mark.parametrize("fstype", ["tmpfs", "ramfs", "overlay"])
def test_private_filesystems_are_refused_on_slurm(fstype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mock_filesystem(monkeypatch, tmp_path, fstype)
    with pytest.raises(ConfigError) as e:
        filesystem.check_folder(tmp_path / "new" / "home", "CLUSTERTRAIN_HOME", shared=True)
    assert e.value.exit_code == 78
    assert fstype in str(e.value) and str(tmp_path / "new" / "home") in str(e.value)
    assert filesystem.check_folder(tmp_path, "CLUSTERTRAIN_HOME", shared=False) is None


def test_local_disk_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mock_filesystem(monkeypatch, tmp_path, "ext4")
    assert "local disk (ext4)" in (filesystem.check_folder(tmp_path, "CLUSTERTRAIN_HOME", shared=True) or "")


@pytest.mark.parametrize(
    "fstype", ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph", "fuse.something", "new"]
)
def test_network_and_unknown_filesystems_pass(fstype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mock_filesystem(monkeypatch, tmp_path, fstype)
    assert filesystem.check_folder(tmp_path, "CLUSTERTRAIN_HOME", shared=True) is None


def test_file_in_place_of_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is a file, not a folder"):
        filesystem.check_folder(tmp_path / "file" / "home", "CLUSTERTRAIN_HOME", shared=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable") as e:
        filesystem.check_folder(tmp_path / "home", "CLUSTERTRAIN_HOME", shared=False)
    assert e.value.exit_code == 78
