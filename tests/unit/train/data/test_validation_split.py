"""Split of datasets into training and validation samples."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from clustertrain.errors import ConfigError
from clustertrain.train.data import validation_split
from clustertrain.train.data.validation_split import MAX_SPANS, DatasetSplit, split, validation_spans


class Numbers(list[int]):
    """Dataset whose sample i is i."""

    name = "numbers"
    version = "1"


class Stream(Numbers):
    is_stream = True


class Labeled(Numbers):
    slice_names = ("even", "odd", "rare")

    def __init__(self, labels: list[int]) -> None:
        super().__init__(range(len(labels)))
        self.labels = np.array(labels)

    def slice_of(self, i: int) -> int:
        return int(self.labels[i])


def samples_of(part: DatasetSplit) -> list[int]:
    return [part[i] for i in range(len(part))]


@pytest.mark.parametrize("size", [7, 100, 1003])
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("dataset_type", [Numbers, Stream])
def test_each_sample_is_in_exactly_one_split(dataset_type: type[Numbers], size: int, fraction: float) -> None:
    train, validation = split(dataset_type(range(size)), fraction, "numbers")
    assert len(validation) == round(size * fraction)
    assert sorted(samples_of(train) + samples_of(validation)) == list(range(size))


def test_large_dataset_splits_alike_in_constant_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [samples_of(part) for part in split(Numbers(range(1000)), 0.2, "n")]
    monkeypatch.setattr(validation_split, "MAX_STORED_PERMUTATION", 999)
    assert [samples_of(part) for part in split(Numbers(range(1000)), 0.2, "n")] == listed


def test_text_is_split_in_spans_and_keeps_its_order() -> None:
    train, validation = split(Stream(range(1000)), 0.1, "text")
    selected = samples_of(validation)
    assert selected == sorted(selected) and samples_of(train) == sorted(samples_of(train))
    assert sum(b != a + 1 for a, b in itertools.pairwise(selected)) == MAX_SPANS - 1
    starts, ends = validation_spans(1000, 100)
    # Centered: each span lies in the middle of its sixteenth of the text.
    assert starts[0] == 28 and 1000 - ends[-1] == 28


def test_split_keeps_class_proportions() -> None:
    labels = [i % 2 for i in range(200)] + [2]
    train, validation = split(Labeled(labels), 0.2, "images")
    selected = samples_of(validation)
    assert [sum(labels[i] == c for i in selected) for c in range(3)] == [20, 20, 0]
    assert 200 in samples_of(train)
    assert validation.slice_names == ("even", "odd", "rare")
    assert [validation.slice_of(i) for i in range(len(validation))] == [labels[i] for i in selected]
    assert selected != list(range(selected[0], selected[0] + len(selected)))


@pytest.mark.parametrize("count", [2, 50, 200])
def test_wrong_number_of_labels_raises(count: int) -> None:
    data = Numbers(range(100))
    data.labels = np.arange(count) % 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=rf"mine has 100 samples and labels of shape \[{count}\]"):
        split(data, 0.2, "mine")


def test_split_keeps_proportions_of_string_labels() -> None:
    data = Numbers(range(100))
    data.labels = ["cat", "dog"] * 50  # type: ignore[attr-defined]
    _, validation = split(data, 0.2, "mine")
    assert [sum(i % 2 == c for i in samples_of(validation)) for c in (0, 1)] == [10, 10]


def test_version_contains_the_fraction() -> None:
    one, other = (split(Numbers(range(100)), fraction, "n")[0] for fraction in (0.1, 0.2))
    assert one.version == "1, validation 0.1" and other.version == "1, validation 0.2"
    assert split(list(range(100)), 0.1, "n")[0].version == "100 samples, validation 0.1"


@pytest.mark.parametrize("dataset_type", [Numbers, Stream])
def test_splits_survive_pickling(dataset_type: type[Numbers]) -> None:
    for part in split(dataset_type(range(100)), 0.3, "n"):
        assert samples_of(pickle.loads(pickle.dumps(part))) == samples_of(part)  # noqa: S301
    assert pickle.loads(pickle.dumps(split(Labeled([0, 1] * 9), 0.3, "n")[1]))[0] >= 0  # noqa: S301


def test_where_names_the_sample_in_the_unsplit_dataset() -> None:
    _, validation = split(Stream(range(100)), 0.1, "text")
    assert validation.where(0) == f"of the unsplit data sample {validation[0]}"
    with pytest.raises(IndexError):
        validation[len(validation)]


def test_too_few_samples_raise() -> None:
    with pytest.raises(ConfigError, match=r"validation = 0.1 of the 4 samples of few leaves 0 for validation"):
        split(Numbers(range(4)), 0.1, "few")
