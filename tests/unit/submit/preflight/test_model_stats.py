"""Model counts that fail or run elsewhere. Shell scripts replace the Python interpreter; see
tests/ranks/test_custom_model_count.py for real ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clustertrain.errors import ConfigError, UsageError
from clustertrain.submit.preflight import model_stats
from clustertrain.submit.prepare import prepare
from clustertrain.submit.prepared_run import PreparedRun
from clustertrain.submit.request import CountMode, SubmitRequest
from tests.fakes.slurm.fixture import FakeSlurm

RECIPE = '[model]\nentry = "nets:Net"\n[job]\ncluster = "site"\n[train]\nglobal_batch = 8\n'


@pytest.fixture
def folder(tmp_path: Path, fake_slurm: FakeSlurm) -> Path:
    profiles = tmp_path / "config" / "clustertrain" / "clusters"
    profiles.mkdir(parents=True)
    (profiles / "site.toml").write_text(f'python = "{tmp_path / "python"}"\n')
    (tmp_path / "own.toml").write_text(RECIPE)
    return tmp_path


def write_interpreter(folder: Path, command: str) -> None:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


def prepare_run(folder: Path, count: CountMode = "yes", **job: int) -> PreparedRun:
    return prepare(SubmitRequest(target="own.toml", cwd=folder, count_mode=count, job=job))


COUNT = (
    '{"stats": {"parameters": 4, "parameter_bytes": 16, "trainable": 4, "trainable_bytes": 16, '
    '"state_bytes": 32, "buffers": 0, "buffer_bytes": 0, "dtypes": {"float32": 4}, '
    '"largest": {"name": "a", "parameters": 4}}}'
)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1", "No module named 'torch'"),
        # Only the count hangs: submit waits longer for what it asks a Python before.
        (f'case "$*" in *model_stats*) exec sleep 60;; *) exec {sys.executable} "$@";; esac', "no answer in 0.2 s"),
    ],
    ids=["without torch", "hangs"],
)
def test_failed_count_warns_and_plans(
    command: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_interpreter(folder, command)
    monkeypatch.setattr(model_stats, "TIMEOUT_S", 0.2)
    (warning,) = (w for w in prepare_run(folder).plan.warnings if "could not be counted" in w)
    assert message in warning and "recipe" not in warning


def test_missing_interpreter_warns(folder: Path) -> None:
    assert any("python: command not found" in w for w in prepare_run(folder).plan.warnings)


def test_crashing_code_is_refused(folder: Path) -> None:
    write_interpreter(folder, "echo first >&2; echo 'double free or corruption' >&2; kill -ABRT $$")
    with pytest.raises(ConfigError, match=r"'nets:Net'.*exit code -6: double free") as e:
        prepare_run(folder)
    assert "--no-count-model" in str(e.value)


def test_package_is_imported_as_in_job(folder: Path) -> None:
    (folder / "nets.py").write_text("")
    write_interpreter(folder, f"echo \"$PYTHONPATH\" > {folder}/path; echo '{COUNT}'")
    assert prepare_run(folder).plan.model_stats is not None
    assert (folder / "path").read_text().strip().split(":")[0] == str(folder)


def test_trace_uses_planned_step_unless_model_is_split(folder: Path) -> None:
    write_interpreter(folder, f"echo \"$4\" > {folder}/request; echo '{COUNT}'")
    prepare_run(folder, "trace", gpus=4)
    assert '"step": {"micro_batch": 2, "precision": "bf16"' in (folder / "request").read_text()
    plan = prepare_run(folder, "trace", gpus=4, tp=2).plan
    assert '"step": null' in (folder / "request").read_text()
    assert any("activations are unknown: a trace covers one process" in w for w in plan.warnings)


def test_decoder_and_script_are_not_traced(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    with pytest.raises(UsageError, match="the built-in decoder is estimated"):
        prepare(SubmitRequest(cwd=tmp_path, count_mode="trace"))
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match="not known before it runs"):
        prepare(SubmitRequest(target="train.py", cwd=tmp_path, count_mode="trace"))
