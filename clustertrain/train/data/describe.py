"""What rank 0 says of the data when a run begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from clustertrain.train.data.token_shards import PackedTokens, TokenWindows

PADDING_WARNING_FRACTION = 0.10  # more of the computation than this on nothing is worth a word
_MAX_SAMPLED_DOCUMENTS = 1_000_000  # documents whose lengths are sorted, evenly spread
EmitEvent = Callable[..., None]


class DocumentLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Of documents, in tokens."""

    documents: int
    smallest: int
    p5: float
    p50: float
    p95: float
    largest: int


def report_datasets(train: Any, validation: Any, emit: EmitEvent) -> None:
    """The event ``data_described`` and a line in the log, and a warning where packing wastes much."""
    lengths, padding = find_document_lengths(train), find_padding_fraction(train)
    emit(
        "data_described",
        data=getattr(train, "name", "") or type(train).__name__,
        samples=len(train),
        validation_samples=len(validation) if validation is not None else 0,
        version=getattr(train, "version", None),
        padding=padding,
        lengths=msgspec.to_builtins(lengths) if lengths is not None else None,
    )
    summary = [f"{len(train)} samples"]
    if validation is not None:
        summary.append(f"{len(validation)} to validate on")
    print("data: " + ", ".join([*summary, *format_documents(lengths, padding)]), flush=True)
    if padding is not None and padding > PADDING_WARNING_FRACTION:
        message = f"{padding:.0%} of each sample is padding: its documents do not fill data.seq_len"
        fix = "choose a data.seq_len that is a multiple of usual lengths, or leave data.pack out"
        emit(
            "training_warning",
            code="padding_waste",
            step=None,
            text=message,
            fix=fix,
            value=padding,
            limit=PADDING_WARNING_FRACTION,
        )
        print(f"warning: {message}\n  fix: {fix}", flush=True)


def format_documents(lengths: DocumentLengths | None, padding: float | None) -> list[str]:
    """Nothing of data that has none."""
    items = []
    if lengths is not None:
        items.append(
            f"{lengths.documents} documents of {lengths.p5:g} / {lengths.p50:g} / {lengths.p95:g} tokens (5th, 50th, "
            f"95th percentile), the longest {lengths.largest}"
        )
    return items + ([f"padding {padding:.1%}"] if padding is not None else [])


def find_document_lengths(dataset: Any) -> DocumentLengths | None:
    """Of the documents of token shards; None for other data."""
    corpus = getattr(_unwrap_split(dataset), "corpus", None)
    if corpus is None:
        return None
    lengths = corpus.documents()[1]
    sampled = lengths[:: max(1, len(lengths) // _MAX_SAMPLED_DOCUMENTS)]
    p5, p50, p95 = (float(v) for v in np.percentile(sampled, (5, 50, 95)))
    smallest, largest = int(lengths.min()), int(lengths.max())
    return DocumentLengths(documents=len(lengths), smallest=smallest, p5=p5, p50=p50, p95=p95, largest=largest)


def find_padding_fraction(dataset: Any) -> float | None:
    """The share of the places of packed samples that holds no token; None for other data."""
    base = _unwrap_split(dataset)
    return base.packing.padding if isinstance(base, PackedTokens) else 0.0 if isinstance(base, TokenWindows) else None


def _unwrap_split(dataset: Any) -> Any:
    return getattr(dataset, "whole", dataset)
