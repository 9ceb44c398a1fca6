"""Folders and URLs for checkpoints that are refused before anything is created."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from clustertrain.errors import ConfigError
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.transaction import dry_run
from tests.fakes.slurm.fixture import FakeSlurm


def notes(tmp_path: Path, *assignments: str, **options: Any) -> tuple[str, ...]:
    return dry_run(SubmitRequest(cwd=tmp_path, assignments=assignments, **options)).notes


def test_remote_url_without_package_is_refused(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError) as e:
        notes(tmp_path, "checkpoint.remote=s3://bucket/x")
    assert "s3://bucket/x: the package for s3:// is not installed" in e.value.message
    assert "pip install 'clustertrain[object-storage]'" in str(e.value.fix)
    assert not any("s3" in note for note in notes(tmp_path, f"checkpoint.remote=file://{tmp_path}/x"))


def test_fsspec_is_not_imported_without_remote_url(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    notes(tmp_path)


def test_node_folder_is_checked_on_local_backend(
    fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    local: dict[str, Any] = {"job": {"backend": "local"}}
    assert not any("checkpoint.local" in n for n in notes(tmp_path, f"checkpoint.local={tmp_path}/x", **local))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"checkpoint.local = .*/file/x: .*/file is a file, not a folder"):
        notes(tmp_path, f"checkpoint.local={tmp_path}/file/x", **local)
    node_folder_notes = [
        n for n in notes(tmp_path, "checkpoint.local=$SLURM_TMPDIR/x", **local) if "checkpoint.local" in n
    ]
    assert node_folder_notes == [
        "checkpoint.local: $SLURM_TMPDIR/x: $SLURM_TMPDIR is not set here; it is used on nodes where it is available"
    ]
    # The environment of Slurm's nodes is unknown here.
    assert not any("checkpoint.local" in n for n in notes(tmp_path, "checkpoint.local=$SLURM_TMPDIR/x"))
