"""Whether a resume is like the start: what differs, on which nodes, and that all ranks hear of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.config.job import RunSpec
from clustertrain.config.parsing.documents import build
from clustertrain.errors import ConfigError
from clustertrain.run.run_dir import RunDir
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.result import RankResult
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.session import resume_check
from clustertrain.train.session.checkpointing import SessionCheckpointer, build_about
from tests.unit.train.alone import ALONE


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    (run.code / "model").mkdir(parents=True)
    for name in ("train.py", "model/net.py", "model/sizes.toml"):
        (run.code / name).write_text("lr = 1\n")
    fsio.write_json(run.record, {"git": {"commit": "c" * 40, "diff": ""}})
    return run


def context_of(run: RunDir, resume: str = "exact") -> RankContext:
    tables = {"contract": {"resume": resume}, "checkpoint": {"background": False}}
    return dataclasses.replace(ALONE, run=run, spec=build({"recipe": tables}, RunSpec, "spec.toml"))


def attempt(run: RunDir, step: int) -> int:
    """Restore, save after ``step`` steps; returns the step that was restored."""
    told: dict[str, Any] = {"emit_event": lambda name, **fields: None, "get_deadline": lambda: None}
    keeping = SessionCheckpointer(
        context_of(run), ProcessGroups(None, None, None, None), None, 1, RankResult({}), **told
    )
    keeping.open(1, None, None)
    try:
        state = {"note": 1}
        found = keeping.restore(state, seed=1)
        keeping.save(step, state, "end", {})
    finally:
        keeping.close()
    return found


def test_a_changed_file_of_the_snapshot_is_noticed_though_git_is_the_same(run: RunDir) -> None:
    assert attempt(run, 4) == 0
    (run.code / "__pycache__").mkdir()
    (run.code / "__pycache__" / "train.cpython-312.pyc").write_bytes(b"what an import leaves")
    (run.code / "losses.txt").write_text("what the script writes")
    assert attempt(run, 8) == 4
    (run.code / "train.py").write_text("lr = 2\n")
    with pytest.raises(ConfigError, match=r"contract\.resume = 'exact'.*code/ of the run was changed: train\.py"):
        attempt(run, 12)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({"model/sizes.toml": "dim = 3\n"}, "model/sizes.toml"),
        ({"model/numpy.py": "import os\n"}, "model/numpy.py"),
        ({"model/net.py": None}, "model/net.py"),
        (dict.fromkeys(("a.py", "b.py", "model/net.py", "train.py"), "x"), "a.py, b.py, model/net.py and 1 more"),
    ],
)
def test_the_files_that_differ_are_named(run: RunDir, change: dict[str, str | None], told: str) -> None:
    before = resume_check.checksum_files(run.code)
    for name, text in change.items():
        (run.code / name).write_text(text) if text is not None else (run.code / name).unlink()
    found = resume_check.find_changed_files(before, resume_check.checksum_files(run.code))
    assert found == ([f"code/ of the run was changed: {told}"] if told else [])


def test_only_an_exact_resume_reads_the_files_and_only_one_rank_does(run: RunDir) -> None:
    assert build_about(context_of(run))["code"].keys() == {"train.py", "model/net.py", "model/sizes.toml"}
    assert build_about(context_of(run, "elastic"))["code"] is None
    assert build_about(dataclasses.replace(context_of(run), rank=1))["code"] is None
    assert resume_check.find_changed_files({"train.py": "1"}, None) == resume_check.find_changed_files(None, {}) == []


def test_what_ranks_have_found_is_told_once_with_the_nodes_where_not_all_have() -> None:
    python = "python 3.12.1 then, 3.11.9 now"
    both = "4 ranks then, 3 now"
    assert resume_check.merge_differences([("a", [both]), ("b", [both, python]), ("b", [both, python])]) == [
        both,
        f"{python} (node b; rank 1, 2)",
    ]
    assert resume_check.merge_differences([None, ("b", [python]), None]) == [f"{python} (node b; rank 1)"]
    assert resume_check.merge_differences([]) == []
