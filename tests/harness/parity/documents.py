"""Text in packed samples of documents."""

from __future__ import annotations

import torch

from clustertrain.config.data import DataSpec
from clustertrain.train.data.text import ByteText

IGNORED = -100
LENGTHS = (5, 1, 7, 3)  # of the documents of a sample, in this order from another one on in each sample


class DocumentText:
    """Windows of a text as packed documents: ({"tokens", "document_starts"}, targets), each (seq_len,) int64."""

    def __init__(self, spec: DataSpec) -> None:
        self._text = ByteText(spec)

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, i: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tokens, targets = self._text[i]
        starts, targets = torch.empty_like(tokens), targets.clone()
        for start, end in document_spans(i, len(tokens)):
            starts[start:end] = start
            targets[end - 1] = IGNORED
        return {"tokens": tokens, "document_starts": starts}, targets


def build(seq_len: int, max_bytes: int) -> DocumentText:
    """Return the data; the entry of a recipe."""
    return DocumentText(DataSpec(seq_len=seq_len, max_bytes=max_bytes))


def document_spans(i: int, length: int) -> list[tuple[int, int]]:
    """Return (start, end) of each document of sample ``i``."""
    spans, start = [], 0
    while start < length:
        end = min(length, start + LENGTHS[(i + len(spans)) % len(LENGTHS)])
        spans.append((start, end))
        start = end
    return spans
