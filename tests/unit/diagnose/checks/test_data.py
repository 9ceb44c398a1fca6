"""The data check on single samples and labels."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from clustertrain.config.recipe import Recipe
from clustertrain.diagnose.checks.data import (
    SampleStats,
    add_sample,
    assess_labels,
    assess_scale,
    assess_values,
    format_sample,
)
from clustertrain.diagnose.subject import Subject
from clustertrain.plan.layout import Batch
from clustertrain.run.run_dir import RunDir

SUBJECT = Subject(Recipe(), Batch(), RunDir(Path("nowhere")), torch.device("cpu"))


def collect_stats(*samples: object) -> SampleStats:
    stats = SampleStats(list(range(len(samples))))
    for i, sample in enumerate(samples):
        add_sample(stats, i, sample)
    return stats


def label_stats(*labels: int) -> SampleStats:
    return collect_stats(*((torch.tensor([float(i)]), label) for i, label in enumerate(labels)))


def test_nan_sample_fails_with_its_index() -> None:
    samples = [(torch.tensor([1.0, i]), i) for i in (0.0, 1.0, float("nan"), 3.0)]
    [(verdict, text, _)] = assess_values(collect_stats(*samples), samples)
    assert verdict == "fail" and text.endswith(": sample 2")


def test_duplicates_and_ambiguous_targets_are_reported() -> None:
    x = torch.arange(3.0)
    notes = assess_values(collect_stats((x, 0), (x, 1), (x + 1, 0), (x + 2, 0)), [])
    assert [n[0] for n in notes] == ["warn", "warn"] and "different targets" in notes[1][1]
    notes = assess_values(collect_stats((x, 0), (x, 1), (x + 1, 0), (x + 2, 0)), [], has_unique_target=False)
    assert [n[0] for n in notes] == ["warn"]
    [(verdict, text, _)] = assess_values(collect_stats((x, 0), (x, 0)), [])
    assert verdict == "fail" and "same inputs" in text
    assert assess_values(collect_stats((x, 0), (x + 1, 0)), []) == []


def test_inputs_that_are_not_normalized_are_reported() -> None:
    pixels = torch.arange(0.0, 256.0).view(1, 16, 16)
    [(verdict, text, _)] = assess_scale(collect_stats((pixels, 0), (pixels, 1)))
    assert verdict == "warn" and text.startswith("the inputs have mean 128 and standard deviation 73.9")
    assert [n[0] for n in assess_scale(collect_stats((pixels / 1e6, 0)))] == ["warn"]
    times = torch.arange(1_700_000_000, 1_700_000_020).double()  # the sum of their squares has lost the deviation
    (note,) = assess_scale(collect_stats((times, 0), (times, 1)))
    assert "mean 1.7e+09 and standard deviation 5.77" in note[1]
    for inputs in ((pixels - 127.5) / 73.9, pixels / 255, pixels.byte(), torch.ones(3), torch.tensor([1.0, math.nan])):
        assert assess_scale(collect_stats((inputs, 0))) == []


@pytest.mark.parametrize(
    ("labels", "verdict", "expected_fix"),
    [((0, 1, 2), None, ""), ((1, 2, 3), "fail", "from 0 to 2"), ((-1, 0, 1), "fail", "ignore_index"),
     ((1, 1, 1), "fail", "nothing to learn"), ((0,) * 19 + (1,), "warn", "accuracy")],
    ids=["correct", "out-of-range", "negative", "single-class", "imbalanced"],
)  # fmt: skip
def test_labels(labels: tuple[int, ...], verdict: str | None, expected_fix: str) -> None:
    notes = assess_labels(label_stats(*labels), 3, SUBJECT)
    assert [n[0] for n in notes] == ([verdict] if verdict else [])
    assert all(expected_fix in n[2] for n in notes)


def test_masked_targets_are_not_labels() -> None:
    stats = collect_stats((torch.arange(4), torch.tensor([-100, 1, 2, 0])))
    assert assess_labels(stats, 3, SUBJECT) == []


def test_sample_is_formatted_as_one_line() -> None:
    text = torch.tensor(list(b"def main():\n"))
    assert format_sample((text[:-1], text[1:]), SUBJECT) == "'def main():' -> 'ef main():\\n'"
    image = (torch.zeros(8, 8, 3, dtype=torch.uint8), 4)
    assert format_sample(image, SUBJECT) == "uint8 (8, 8, 3) from 0 to 0, mean 0 -> 4"
    assert format_sample(({"ids": torch.arange(9)}, torch.tensor(0.5)), SUBJECT).endswith("-> 0.5")
