"""What is kept apart to validate on."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from clustertrain.errors import ConfigError
from clustertrain.train.data import validation_split
from clustertrain.train.data.validation_split import MAX_SPANS, DatasetSplit, split, validation_spans


class Numbers(list[int]):
    """Sample i is i."""

    name = "numbers"
    version = "1"


class Stream(Numbers):
    is_stream = True


class Labelled(Numbers):
    slice_names = ("even", "odd", "rare")

    def __init__(self, labels: list[int]) -> None:
        super().__init__(range(len(labels)))
        self.labels = np.array(labels)

    def slice_of(self, i: int) -> int:
        return int(self.labels[i])


def rows(part: DatasetSplit) -> list[int]:
    return [part[i] for i in range(len(part))]


@pytest.mark.parametrize("size", [7, 100, 1003])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_every_sample_is_in_one_of_the_two(kind: type[Numbers], size: int, share: float) -> None:
    train, validation = split(kind(range(size)), share, "numbers")
    assert len(validation) == round(size * share)
    assert sorted(rows(train) + rows(validation)) == list(range(size))


def test_a_large_data_set_is_parted_alike_without_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [rows(part) for part in split(Numbers(range(1000)), 0.2, "n")]
    monkeypatch.setattr(validation_split, "LISTED", 999)
    assert [rows(part) for part in split(Numbers(range(1000)), 0.2, "n")] == listed


def test_a_text_is_parted_in_stretches_and_keeps_its_order() -> None:
    train, validation = split(Stream(range(1000)), 0.1, "text")
    kept = rows(validation)
    assert kept == sorted(kept) and rows(train) == sorted(rows(train))
    assert sum(b != a + 1 for a, b in itertools.pairwise(kept)) == MAX_SPANS - 1
    begins, ends = validation_spans(1000, 100)
    # Evenly spread: the first and the last sixteenth of the text are as far from a stretch as any other.
    assert begins[0] == 28 and 1000 - ends[-1] == 28


def test_each_class_has_the_same_share_and_one_image_is_learned_from() -> None:
    labels = [i % 2 for i in range(200)] + [2]
    train, validation = split(Labelled(labels), 0.2, "images")
    kept = rows(validation)
    assert [sum(labels[i] == c for i in kept) for c in range(3)] == [20, 20, 0]
    assert 200 in rows(train)
    assert validation.slice_names == ("even", "odd", "rare")
    assert [validation.slice_of(i) for i in range(len(validation))] == [labels[i] for i in kept]
    assert kept != list(range(kept[0], kept[0] + len(kept)))


@pytest.mark.parametrize("count", [2, 50, 200])
def test_labels_that_are_not_one_for_each_sample(count: int) -> None:
    data = Numbers(range(100))
    data.labels = np.arange(count) % 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=rf"mine has 100 samples, and its labels are \[{count}\]"):
        split(data, 0.2, "mine")


def test_classes_that_are_words_have_the_same_share_too() -> None:
    data = Numbers(range(100))
    data.labels = ["cat", "dog"] * 50  # type: ignore[attr-defined]
    _, validation = split(data, 0.2, "mine")
    assert [sum(i % 2 == c for i in rows(validation)) for c in (0, 1)] == [10, 10]


def test_the_version_tells_another_share() -> None:
    one, other = (split(Numbers(range(100)), share, "n")[0] for share in (0.1, 0.2))
    assert one.version == "1, validation 0.1" and other.version == "1, validation 0.2"
    assert split(list(range(100)), 0.1, "n")[0].version == "100 samples, validation 0.1"


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_worker_that_is_not_forked_gets_the_same(kind: type[Numbers]) -> None:
    for part in split(kind(range(100)), 0.3, "n"):
        assert rows(pickle.loads(pickle.dumps(part))) == rows(part)  # noqa: S301
    assert pickle.loads(pickle.dumps(split(Labelled([0, 1] * 9), 0.3, "n")[1]))[0] >= 0  # noqa: S301


def test_a_sample_is_named_by_its_number_in_the_whole() -> None:
    _, validation = split(Stream(range(100)), 0.1, "text")
    assert validation.where(0) == f"of the whole data sample {validation[0]}"
    with pytest.raises(IndexError):
        validation[len(validation)]


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"validation = 0.1 of the 4 samples of few leaves 0 to validate on"):
        split(Numbers(range(4)), 0.1, "few")
