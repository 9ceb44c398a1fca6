"""Curves of a run: every row counts once, however long the file is and in whatever pieces it is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.run.run_dir import RunDir
from clustertrain.ui.run import metrics
from clustertrain.ui.run.metrics import MetricCurves


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "net-abc234")
    run.metrics.mkdir(parents=True)
    for n in (1, 2):
        run.attempt(n).path.mkdir(parents=True)
    return run


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    log = fsio.JsonlAppender(path)
    log.append(*rows)
    log.close()


def rows(first: int, last: int, **more: Any) -> list[dict[str, Any]]:
    return [{"step": s, "t": 1000.0 + s, "loss": float(s), **more} for s in range(first, last + 1)]


def load(run: RunDir) -> MetricCurves:
    curves = MetricCurves(run)
    curves.update()
    return curves


def test_rows_of_all_attempts_in_the_order_of_writing(run: RunDir) -> None:
    append(run.metrics_path(1), rows(1, 5))
    append(run.metrics_path(1, 1), rows(4, 6))  # after a rollback
    append(run.metrics_path(2), rows(6, 7, validation_loss=3))
    document = load(run).document()
    assert document["steps"] == [1, 2, 3, 4, 5, 4, 5, 6, 6, 7]
    assert document["attempts"] == [1] * 8 + [2] * 2
    assert document["curves"]["validation_loss"] == [None] * 8 + [3.0, 3.0]
    assert document["rows_per_point"] == 1 and document["ranges"] == {}


def test_only_what_is_new_is_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    append(run.metrics_path(1), rows(1, 5))
    curves = load(run)
    assert not curves.update()
    with run.metrics_path(1).open("a") as f:
        f.write(json.dumps(rows(6, 6)[0])[:10])
    assert not curves.update(), "the line is unfinished"
    with run.metrics_path(1).open("a") as f:
        f.write(json.dumps(rows(6, 6)[0])[10:] + "\n")
    assert curves.update()
    new = curves.rows_after(0, 5)
    assert new == [{"attempt": 1, "step": 6, "t": 1006.0, "scalars": {"loss": 6.0}}]
    assert curves.rows_after(0, 6) == [] and curves.document()["steps"] == [1, 2, 3, 4, 5, 6]


def test_long_run_has_few_points_that_count_every_row(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_BUCKETS", 20)
    monkeypatch.setattr(metrics.metrics_file, "CHUNK_BYTES", 999)
    spike = rows(1, 301)
    spike[150]["loss"] = 1e6
    append(run.metrics_path(1), spike)
    append(run.metrics_path(2), rows(200, 260))
    whole = load(run)
    pieces = MetricCurves(run)
    while pieces.update():
        pass
    for curves in (whole, pieces):
        document = curves.document(["loss"])
        width, points = document["rows_per_point"], len(document["steps"])
        assert 10 <= points <= 20 and width == 32
        assert document["steps"][:2] == [32, 64] and document["steps"][9:11] == [301, 231]
        assert document["attempts"] == [1] * 10 + [2] * 2, "a point never has rows of two attempts"
        low, high = document["ranges"]["loss"]
        assert max(high) == 1e6 and (low[0], high[0]) == (1, 32)
        assert document["curves"]["loss"][0] == pytest.approx(16.5)


def test_missing_and_odd_values(run: RunDir) -> None:
    append(run.metrics_path(1), [
        {"step": 1, "t": 1.0, "loss": float("nan"), "note": "text", "skipped": True, "sum_tokens": 5},
        {"step": 2, "t": 2.0, "loss": 2, "note": 3, "big": 10**400},
        {"step": "3", "t": 3.0}, {"step": 4}, {"t": 5.0}, {"step": 6, "t": "six"}, {"step": True, "t": 7.0},
    ])  # fmt: skip
    with run.metrics_path(1).open("a") as f:
        f.write("[1]\n{torn\n\n")
    document = load(run).document()
    assert document["steps"] == [1, 2] and document["curves"] == {"loss": [None, 2.0], "note": [None, 3.0]}


def test_unreadable_file_is_named_and_the_others_are_shown(run: RunDir) -> None:
    run.metrics_path(1).mkdir()
    append(run.metrics_path(2), rows(1, 3))
    document = load(run).document()
    assert document["steps"] == [1, 2, 3] and document["problems"] == [
        "attempt-1.jsonl: is a folder, not a regular file"
    ]


def test_number_of_scalars_is_limited(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_SCALARS", 3)
    append(run.metrics_path(1), rows(1, 2, a=1, b=2, c=3))
    document = load(run).document()
    assert document["names"] == ["loss", "a", "b"] and document["left_out"] == ["c"]


def test_replaced_file_begins_anew(run: RunDir) -> None:
    append(run.metrics_path(1), rows(1, 9))
    curves = load(run)
    run.metrics_path(1).unlink()
    append(run.metrics_path(1), rows(1, 2))
    assert curves.update() and curves.generation == 1
    assert curves.document()["steps"] == [1, 2] and curves.rows_after(0, 9) is None


def test_page_that_missed_many_rows_reads_the_curves_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_NEW_ROWS", 5)
    append(run.metrics_path(1), rows(1, 20))
    curves = load(run)
    assert curves.rows_after(0, 14) is None and curves.rows_after(0, 21) is None
    assert [r["step"] for r in curves.rows_after(0, 15) or ()] == [16, 17, 18, 19, 20]
