"""What is said of data before and when a run begins."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from clustertrain.spec.data import DataSpec
from clustertrain.train.data_told import tell
from clustertrain.train.describe import describe
from clustertrain.train.samples import Limits
from clustertrain.train.tokenize import of_bytes, write
from clustertrain.train.tokens import tokens


class Points:
    name, version = "points", "1"

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([self.values[i]]), i % 3

    def where(self, i: int) -> str:
        return f"point {i}"


def test_what_is_wrong_is_listed_and_the_rest_counted() -> None:
    found = describe(Points([1.0, 2.0, 3.0, 1.0, math.nan, 5.0]), samples=2, limits=Limits(classes=3))
    assert (found.samples, found.looked_at, found.duplicates) == (6, 6, ((0, 3),))
    assert found.labels == {0: 2, 1: 1, 2: 2}
    assert found.not_finite == ("sample 4 (point 4): inputs holds nan",) and found.refused == ()
    assert [(s.sample, s.form, s.label) for s in found.shown] == [
        (0, "(float32 (1,), int64 ())", 0),
        (3, "(float32 (1,), int64 ())", 0),
    ]


def test_labels_out_of_range_are_listed() -> None:
    found = describe(Points([1.0, 2.0, 3.0]), limits=Limits(classes=2))
    assert len(found.refused) == 1 and "sample 2 (point 2): target is 2" in found.refused[0]


def test_a_look_at_a_large_data_set_is_a_look_at_some_of_it() -> None:
    found = describe(Points([float(i) for i in range(5000)]), samples=4)
    assert found.looked_at == 2048 and found.samples == 5000 and len(found.shown) == 4


def described(folder: Path, lengths: list[int], **data: Any) -> Any:
    write(folder, [of_bytes(b"abcdefgh"[:n]) for n in lengths], dtype="uint8")
    return tokens(DataSpec(kind="tokens", path=str(folder), **data), 256, -100)


def test_documents_have_lengths_and_packed_ones_padding(tmp_path: Path) -> None:
    train, _ = described(tmp_path / "s", [5] * 9 + [8], seq_len=8, pack=True)
    found = describe(train, samples=1)
    assert found.lengths is not None and (found.lengths.documents, found.lengths.largest) == (10, 8)
    assert found.lengths.p50 == 5 and found.lengths.smallest == 5
    assert found.padding == pytest.approx(1 - 43 / 48)  # four and four fill a sample; seven, and the last four, do not
    assert found.shown[0].text is not None and found.shown[0].text.startswith("abcd")


@pytest.mark.parametrize(("seq_len", "warned"), [(4, False), (7, True)])
def test_much_padding_is_a_warning(tmp_path: Path, capsys: Any, seq_len: int, warned: bool) -> None:
    train, _ = described(tmp_path / "s", [5] * 10, seq_len=seq_len, pack=True)
    events: list[dict[str, Any]] = []
    tell(train, [1, 2], lambda name, **fields: events.append({"event": name, **fields}))
    assert events[0]["event"] == "data_described"
    assert (events[0]["samples"], events[0]["validation_samples"], events[0]["lengths"]["p50"]) == (10, 2, 5)
    codes = [e["code"] for e in events[1:]]
    assert codes == (["padding_waste"] if warned else [])
    said = capsys.readouterr().out
    assert said.startswith("data: 10 samples, 2 to validate on, 10 documents of 5 / 5 / 5 tokens")
    assert ("warning: 43% of each sample is padding" in said) is warned
