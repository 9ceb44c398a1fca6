"""The record of the ranks' Python: packages by the names of their folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clustertrain.run import rank_python
from clustertrain.run.run_dir import RunDir


def test_unreadable_folder_on_sys_path_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, archive, site = tmp_path / "closed", tmp_path / "code.zip", tmp_path / "site"
    closed.mkdir()
    archive.write_bytes(b"PK")
    (site / "numpy-9.9.dist-info").mkdir(parents=True)
    scandir = os.scandir

    def closed_scandir(folder: Any = ".") -> Any:
        if str(folder) == str(closed):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", closed_scandir)
    folders = [str(closed), str(archive), str(tmp_path / "none"), str(site)]
    assert rank_python.list_packages(folders) == {"numpy": "9.9"}


def test_first_version_counts_and_origins_are_named_without_passwords(tmp_path: Path) -> None:
    for name in (
        "a/Big_Tool-1.0.dist-info",
        "b/big_tool-2.0.dist-info",
        "b/mine-0.1.dist-info",
        "b/old-3-py3.11.egg-info",
        "b/path__x-1.dist-info",
    ):
        (tmp_path / name).mkdir(parents=True)
    origin = {"url": "https://me:secret@host/mine.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}
    (tmp_path / "b/mine-0.1.dist-info/direct_url.json").write_text(json.dumps(origin))
    (tmp_path / "b/old-3-py3.11.egg-info/direct_url.json").write_text("no JSON")
    (tmp_path / "b/path__x-1.dist-info/direct_url.json").write_text(json.dumps({"url": "file:///home/a@b/x"}))
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    expected = {"big-tool": "1.0", "mine": "0.1 from https://host/mine.git@abc123", "old": "3"}
    expected["path-x"] = "1 from file:///home/a@b/x"
    assert rank_python.list_packages(folders) == expected
    assert rank_python.list_packages(folders, ("old",)) == {"old": "3"}


def test_newest_attempt_with_a_record_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert rank_python.load_newest(run) == {}
    for n in (1, 2, 3):
        run.attempt(n).path.mkdir(parents=True)
    run.attempt(1).rank_python.write_text(json.dumps(rank_python.describe_python("image.sif")))
    run.attempt(2).rank_python.write_text("torn {")
    record = rank_python.load_newest(run)
    assert record["container"] == "image.sif" and "torch" in record["packages"]
