"""Node-local folders in recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.config.checks.storage_paths import check_node_folder, resolve_node_folder
from clustertrain.errors import UnsuitableEnvironment


@pytest.mark.parametrize(
    ("text", "environ", "path"),
    [
        ("/local/me", {}, "/local/me"),
        ("$TMPDIR/x", {"TMPDIR": "/tmp/a b"}, "/tmp/a b/x"),
        ("${SLURM_TMPDIR}/x", {"SLURM_TMPDIR": "/scratch"}, "/scratch/x"),
        ("/tmp/{job}", {"SLURM_JOB_ID": "12"}, "/tmp/12"),
        ("/tmp/{job}", {"CLUSTERTRAIN_LOCAL_JOB": "/home/jobs/7"}, "/tmp/local-7"),
        ("/tmp/$A/{job}", {"A": "{job}$B", "SLURM_JOB_ID": "12"}, "/tmp/12$B/12"),
    ],
)
def test_node_variables_are_substituted(text: str, environ: dict[str, str], path: str) -> None:
    check_node_folder("local", text)
    assert resolve_node_folder(text, environ) == Path(path)


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("$SLURM_TMPDIR/x", {}, r"\$SLURM_TMPDIR is not set here"),
        ("$TMPDIR", {"TMPDIR": ""}, r"\$TMPDIR is not set here"),
        ("$TMPDIR", {"TMPDIR": "tmp"}, "tmp is not an absolute path"),
    ],
)
def test_unset_variable_is_named(text: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(UnsuitableEnvironment, match=message):
        resolve_node_folder(text, environ)


def test_tilde_expands_to_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve_node_folder("~/x", {}) == Path("/home/me/x")
