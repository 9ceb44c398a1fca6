"""Partial reads of a long metrics file give the same rows as a full read."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from clustertrain.run import metrics_file


def write_rows(path: Path, count: int, *, every: int = 1, pad: int = 0) -> Path:
    rows = ({"step": n * every, "step_s": n / 8, "note": "x" * (n % (pad + 1))} for n in range(1, count + 1))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("pad", [0, 900])
def test_row_of_a_step_is_found_in_a_long_file(tmp_path: Path, pad: int) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 3000, every=3, pad=pad)
    for step in (3, 4, 5, 6, 1499, 1500, 4501, 8999, 9000, 10**9):
        row = metrics_file.find_row_at(path, step)
        assert row is not None and row["step"] == min(step, 9000) // 3 * 3
    assert metrics_file.find_row_at(path, 2) is None


def test_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert metrics_file.find_row_at(tmp_path / "none", 5) is None
    assert (
        metrics_file.read_first(tmp_path / "none")
        == metrics_file.read_last(tmp_path / "none")
        == metrics_file.sample_rows(tmp_path / "none")
        == []
    )
    assert list(metrics_file.read_columns(tmp_path / "none", ("step",))["step"]) == []


def test_torn_and_damaged_rows_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"step":1,"loss":NaN,"step_s":1.5}\n{"step":2,"loss":-Infinity,"step_s":1}\n[]\n{"step":"x"}\n\xff\xfe\n'
        b'{"step":3,"loss":"words","step_s":true}\n{"step":4,"loss":0.5}\n{"step":5,"lo'
    )
    assert [r["step"] for r in metrics_file.read_first(path)] == [1, 2, 3, 4]
    assert [r["step"] for r in metrics_file.read_last(path, 40)] == [4]
    columns = metrics_file.read_columns(path, ("step", "loss", "step_s"))
    known = [n for n in columns["step"] if not math.isnan(n)]
    assert known == [1, 2, 3, 4]
    assert [v for v in columns["loss"] if not math.isnan(v)] == [0.5]
    assert [v for v in columns["step_s"] if not math.isnan(v)] == [1.5, 1.0]


def test_columns_are_complete_across_chunk_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 500, pad=50)
    monkeypatch.setattr(metrics_file, "CHUNK_BYTES", 333)
    columns = metrics_file.read_columns(path, ("step", "step_s"))
    assert list(columns["step"]) == [*range(1, 501)]
    assert list(columns["step_s"]) == [n / 8 for n in range(1, 501)]


def test_sample_is_spread_over_the_whole_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 5000)
    assert [r["step"] for r in metrics_file.sample_rows(path, 5)] == [*range(6, 5001)]
    monkeypatch.setattr(metrics_file, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(metrics_file, "WINDOW_BYTES", 512)
    monkeypatch.setattr(metrics_file, "SAMPLE_WINDOWS", 10)
    steps = [r["step"] for r in metrics_file.sample_rows(path, 5)]
    assert steps == sorted(set(steps)) and steps[0] == 6 and steps[-1] == 5000
    assert 50 < len(steps) < 500
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps) < 700


# Longer than the window at the end of a file, than one window of rows, and than several.
@pytest.mark.long
@pytest.mark.parametrize("long", [4_300, 20_000, 70_000])
def test_rows_longer_than_a_window_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({'step': n, 'note': 'x' * long})}\n" for n in range(1, 101)) + '{"step":101,')
    assert [r["step"] for r in metrics_file.read_first(path)][:1] == [1]
    assert [r["step"] for r in metrics_file.read_first(path, min_rows=31)][:31] == [*range(1, 32)]
    assert [r["step"] for r in metrics_file.read_last(path)][-1:] == [100]
    assert [r["step"] for r in metrics_file.read_last(path, min_rows=8)][-8:] == [*range(93, 101)]
    assert len(metrics_file.read_last(path, min_rows=1000)) == 100
    rows = [metrics_file.find_row_at(path, n) for n in (1, 2, 49, 50, 99, 100, 1000)]
    assert [r and r["step"] for r in rows] == [1, 2, 49, 50, 99, 100, 100]
    assert metrics_file.find_row_at(path, 0) is None
    monkeypatch.setattr(metrics_file, "MAX_WHOLE_BYTES", 1000)
    steps = [r["step"] for r in metrics_file.sample_rows(path, 5)]
    assert steps == sorted(set(steps)) and steps[0] == 6 and steps[-1] == 100 and len(steps) > 30


def test_columns_may_be_named_after_slices_and_layers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1, "validation_accuracy/night": 0.5, "grad_norm/layers.0": 2.0}\n{"step": 2}\n')
    columns = metrics_file.read_columns(path, ["step", "validation_accuracy/night", "grad_norm/layers.0"])
    assert list(columns["step"]) == [1.0, 2.0]
    assert columns["validation_accuracy/night"][0] == 0.5 and math.isnan(columns["validation_accuracy/night"][1])
    assert columns["grad_norm/layers.0"][0] == 2.0
