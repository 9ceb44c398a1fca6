"""Profiling of a window of steps on one process."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.train.core import step_timer
from clustertrain.train.core.step_timer import STEP_PARTS
from clustertrain.train.profiling.profiler import Profiler

CPU = torch.device("cpu")


def train_profiled(session: ct.Session, profiler: Profiler, steps: range) -> None:
    model = session.parallelize(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)))
    session.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    points = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    data = session.loader(torch.utils.data.TensorDataset(points, points[:, 0].gt(0).long()), global_batch=16)
    for step in steps:
        profiler.begin(step)
        session.train_step(next(data), nn.functional.cross_entropy)
        profiler.end(step)


@pytest.mark.long
def test_profiled_window_writes_trace_table_and_parts(
    session: ct.Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emitted: list[dict[str, Any]] = []
    profiler = Profiler(
        range(2, 5), tmp_path / "profiles", 1, CPU, lambda name, **f: emitted.append({"event": name, **f})
    )
    train_profiled(session, profiler, range(8))
    profile = json.loads((tmp_path / "profiles" / "attempt-1-steps-2-4.json").read_text())
    assert profile["traced_steps"] == [2, 3] and profile["step"] == 4
    parts = profile["parts_s"]
    assert list(parts) == [*STEP_PARTS, "other"]
    assert sum(parts.values()) == pytest.approx(profile["step_s"])
    assert all(parts[name] > 0 for name in ("data", "forward", "backward", "optimizer"))
    assert 0 < len(profile["top"]) <= 10
    times = [row["self_cpu_s"] for row in profile["top"]]
    assert times == sorted(times, reverse=True)
    with gzip.open(tmp_path / "profiles" / "attempt-1-steps-2-4.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [e.get("name") for e in events]
    (first, *_) = [e["args"] for e in events if e.get("name") == "aten::addmm"]
    assert [64, 64] in first["Input Dims"] and "[memory]" in names
    assert names.count("forward") >= 2 and names.count("optimizer") >= 2
    assert "aten::addmm" in names
    table = (tmp_path / "profiles" / "attempt-1-steps-2-4.txt").read_text()
    assert "step 4:" in table and "forward" in table and "Self CPU" in table
    assert "step 4:" in capsys.readouterr().out
    assert [(e["event"], e["steps"]) for e in emitted] == [("profiled", [2, 4])]


@pytest.mark.long
def test_run_ending_inside_the_window_keeps_the_trace(session: ct.Session, tmp_path: Path) -> None:
    emitted: list[str] = []
    profiler = Profiler(range(2, 50), tmp_path / "profiles", 3, CPU, lambda name, **_: emitted.append(name))
    train_profiled(session, profiler, range(4))
    profiler.close()
    profiler.close()
    assert json.loads((tmp_path / "profiles" / "attempt-3-steps-2-3.json").read_text())["traced_steps"] == [2, 3]
    assert emitted == ["profiled"]


def test_one_step_window_has_no_trace(session: ct.Session, tmp_path: Path) -> None:
    train_profiled(session, Profiler(range(1, 2), tmp_path / "profiles", 1, CPU, lambda *_, **__: None), range(3))
    assert {p.name for p in (tmp_path / "profiles").iterdir()} == {
        "attempt-1-steps-1-1.json",
        "attempt-1-steps-1-1.txt",
    }


def test_record_part_is_a_null_context_outside_the_window() -> None:
    assert type(step_timer.record_part("forward")).__name__ == "nullcontext"
