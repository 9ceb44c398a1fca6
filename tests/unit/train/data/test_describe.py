"""Summary of the data at the start of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.data import DataSpec
from clustertrain.train.data.describe import find_document_lengths, find_padding_fraction, report_datasets
from clustertrain.train.data.token_shards import build_token_datasets
from clustertrain.train.data.tokenize import tokenize_bytes, write


def build_train_and_validation(folder: Path, lengths: list[int], **data: Any) -> Any:
    write(folder, [tokenize_bytes(b"abcdefgh"[:n]) for n in lengths], dtype="uint8")
    return build_token_datasets(DataSpec(kind="tokens", path=str(folder), **data), 256, -100)


def test_document_lengths_and_padding_fraction(tmp_path: Path) -> None:
    train, _ = build_train_and_validation(tmp_path / "s", [5] * 9 + [8], seq_len=8, pack=True)
    document_lengths = find_document_lengths(train)
    assert document_lengths is not None and (
        document_lengths.documents,
        document_lengths.smallest,
        document_lengths.p50,
        document_lengths.largest,
    ) == (10, 5, 5, 8)
    # Two documents of four predictions fill a sample; the one of seven and the last one do not.
    assert find_padding_fraction(train) == pytest.approx(1 - 43 / 48)


@pytest.mark.parametrize(("seq_len", "warned"), [(4, False), (7, True)])
def test_padding_above_limit_warns(tmp_path: Path, capsys: Any, seq_len: int, warned: bool) -> None:
    train, _ = build_train_and_validation(tmp_path / "s", [5] * 10, seq_len=seq_len, pack=True)
    events: list[dict[str, Any]] = []
    report_datasets(train, [1, 2], lambda name, **fields: events.append({"event": name, **fields}))
    assert events[0]["event"] == "data_described"
    assert (events[0]["samples"], events[0]["validation_samples"], events[0]["lengths"]["p50"]) == (10, 2, 5)
    codes = [e["code"] for e in events[1:]]
    assert codes == (["padding_waste"] if warned else [])
    output = capsys.readouterr().out
    assert output.startswith("data: 10 samples, 2 for validation, 10 documents of 5 / 5 / 5 tokens")
    assert ("warning: 43% of each sample is padding" in output) is warned
