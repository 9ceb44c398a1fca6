"""Recorded predictions: what each sample's line has, and which files are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clustertrain.train.evaluation.dataset_pass import EvalBatch
from clustertrain.train.evaluation.predictions import MAX_VALUES, PredictionRecorder


def record(output: object, target: object, samples: int = 100, **options: bool) -> PredictionRecorder:
    recorder = PredictionRecorder(samples, ignore_index=-100, **{"counts": True, "confusion": True, **options})
    recorder.add(EvalBatch(None, (3, 4)), output, target)
    return recorder


def lines(recorder: PredictionRecorder, folder: Path) -> list[dict[str, object]]:
    assert recorder.write(folder, 0, (), 7)
    return [json.loads(line) for line in (folder / "step-00000007" / "rank-00000.jsonl").read_text().splitlines()]


def test_classes_have_a_confidence_and_a_confusion_matrix(tmp_path: Path) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0], [5.0, 0.0, 0.0], [9.0, 9.0, 9.0]])  # the last row is padding
    rows = lines(record(logits, torch.tensor([1, 2, 0])), tmp_path)
    assert [(r["sample"], r["target"], r["prediction"]) for r in rows] == [(3, 1, 1), (4, 2, 0)]
    assert rows[0]["confidence"] == pytest.approx(0.5761169)
    document = json.loads((tmp_path / "step-00000007" / "confusion.json").read_text())
    assert document["counts"] == [[0, 0, 0], [0, 1, 0], [1, 0, 0]]


def test_values_and_sequences_are_recorded_without_confidence(tmp_path: Path) -> None:
    (row, _) = lines(record(torch.tensor([[0.1234567], [float("nan")]]), torch.tensor([[1.0], [2.0]])), tmp_path)
    assert row == {"sample": 3, "target": [1.0], "prediction": [0.123457]}
    tokens = torch.zeros(2, 2 * MAX_VALUES, dtype=torch.int64)
    (row, _) = lines(record(torch.zeros(2, 2 * MAX_VALUES, 5), tokens), tmp_path)
    assert row == {"sample": 3, "target": [0] * MAX_VALUES, "prediction": [0] * MAX_VALUES}


def test_number_of_samples_is_bounded_and_other_outputs_are_not_recorded(tmp_path: Path) -> None:
    outputs, targets = torch.zeros(2, 3), torch.tensor([0, -100])
    assert [r["sample"] for r in lines(record(outputs, targets, 4), tmp_path)] == [3]
    assert not record((outputs, outputs), targets).write(tmp_path, 0, (), 8)
    assert not record(outputs, targets, counts=False, confusion=False).write(tmp_path, 0, (), 8)


def test_predictions_of_other_steps_are_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        assert record(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)).write(tmp_path, 0, (1,), step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
