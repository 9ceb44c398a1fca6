"""Differences between the start and the resume of a run, and the nodes that have them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clustertrain import fsio
from clustertrain.config.adapter import AdapterSpec
from clustertrain.config.job import RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.errors import ConfigError
from clustertrain.run.run_dir import RunDir
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.result import RankResultWriter
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.session import resume_check
from clustertrain.train.session.checkpointing import SessionCheckpointer
from clustertrain.train.session.checkpointing_config import build_about
from tests.unit.train.single_process import ALONE


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    (run.code / "model").mkdir(parents=True)
    for name in ("train.py", "model/net.py", "model/sizes.toml"):
        (run.code / name).write_text("lr = 1\n")
    fsio.write_json(run.record, {"git": {"commit": "c" * 40, "diff": ""}})
    return run


def make_context(run: RunDir, resume: str = "exact") -> RankContext:
    tables = {"contract": {"resume": resume}, "checkpoint": {"async_save": False}}
    return dataclasses.replace(ALONE, run=run, spec=build({"recipe": tables}, RunSpec, "spec.toml"))


def attempt(run: RunDir, step: int) -> int:
    """Restore, save at ``step``, and return the restored step."""
    options: dict[str, Any] = {"emit_event": lambda name, **fields: None, "get_deadline": lambda: None}
    checkpointer = SessionCheckpointer(
        make_context(run), ProcessGroups(None, None, None, None), None, 1, RankResultWriter({}), **options
    )
    checkpointer.open(1, None, None)
    try:
        state = {"note": 1}
        restored_step = checkpointer.restore(state, seed=1)
        checkpointer.save(step, state, "end", {})
    finally:
        checkpointer.close()
    return restored_step


def test_changed_snapshot_file_is_detected_with_same_commit(run: RunDir) -> None:
    assert attempt(run, 4) == 0
    (run.code / "__pycache__").mkdir()
    (run.code / "__pycache__" / "train.cpython-312.pyc").write_bytes(b"bytecode of an import")
    (run.code / "losses.txt").write_text("written by the script")
    assert attempt(run, 8) == 4
    (run.code / "train.py").write_text("lr = 2\n")
    with pytest.raises(ConfigError, match=r"contract\.resume = 'exact'.*code/ of the run was changed: train\.py"):
        attempt(run, 12)


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ({}, ""),
        ({"model/sizes.toml": "dim = 3\n"}, "model/sizes.toml"),
        ({"model/numpy.py": "import os\n"}, "model/numpy.py"),
        ({"model/net.py": None}, "model/net.py"),
        (dict.fromkeys(("a.py", "b.py", "model/net.py", "train.py"), "x"), "a.py, b.py, model/net.py and 1 more"),
    ],
    ids=["unchanged", "edited", "new-module", "deleted", "four-files"],
)
def test_changed_files_are_named(run: RunDir, edits: dict[str, str | None], expected: str) -> None:
    before = resume_check.checksum_files(run.code)
    for name, text in edits.items():
        (run.code / name).write_text(text) if text is not None else (run.code / name).unlink()
    changes = resume_check.find_changed_files(before, resume_check.checksum_files(run.code))
    assert changes == ([f"code/ of the run was changed: {expected}"] if expected else [])


def test_code_checksums_only_for_exact_resume_on_rank_0(run: RunDir) -> None:
    assert build_about(make_context(run))["code"].keys() == {"train.py", "model/net.py", "model/sizes.toml"}
    assert build_about(make_context(run, "elastic"))["code"] is None
    assert build_about(dataclasses.replace(make_context(run), rank=1))["code"] is None
    assert resume_check.find_changed_files({"train.py": "1"}, None) == resume_check.find_changed_files(None, {}) == []


def test_every_setting_of_an_adapter_that_changes_the_run_is_compared() -> None:
    before = {"spec": msgspec.to_builtins(AdapterSpec(kind="lora"))}
    after = {"spec": msgspec.to_builtins(AdapterSpec(kind="lora", rank=8, base_precision="nf4", dropout=0.1))}
    messages = resume_check._compare_adapters(before, after)
    assert [m.split()[1] for m in messages] == ["rank", "dropout", "base_precision"]
    assert resume_check._compare_adapters(before, before) == []


def test_merged_differences_name_affected_nodes() -> None:
    python = "python 3.12.1 then, 3.11.9 now"
    ranks_differ = "4 ranks then, 3 now"
    assert resume_check.merge_differences(
        [("a", [ranks_differ]), ("b", [ranks_differ, python]), ("b", [ranks_differ, python])]
    ) == [
        ranks_differ,
        f"{python} (node b; rank 1, 2)",
    ]
    assert resume_check.merge_differences([None, ("b", [python]), None]) == [f"{python} (node b; rank 1)"]
    assert resume_check.merge_differences([]) == []
