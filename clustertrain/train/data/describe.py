"""What rank 0 says of the data when a run begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from clustertrain.train.data.token_shards import Packed, Windows

PADDING = 0.10  # more of the computation than this on nothing is worth a word
_MEASURED = 1_000_000  # documents whose lengths are sorted, evenly spread
Event = Callable[..., None]


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Of documents, in tokens."""

    documents: int
    smallest: int
    p5: float
    p50: float
    p95: float
    largest: int


def tell(train: Any, validation: Any, event: Event) -> None:
    """The event ``data_described`` and a line in the log, and a warning where packing wastes much."""
    lengths, padding = lengths_of(train), padding_of(train)
    event(
        "data_described",
        data=getattr(train, "name", "") or type(train).__name__,
        samples=len(train),
        validation_samples=len(validation) if validation is not None else 0,
        version=getattr(train, "version", None),
        padding=padding,
        lengths=msgspec.to_builtins(lengths) if lengths is not None else None,
    )
    words = [f"{len(train)} samples"]
    if validation is not None:
        words.append(f"{len(validation)} to validate on")
    print("data: " + ", ".join([*words, *words_of_documents(lengths, padding)]), flush=True)
    if padding is not None and padding > PADDING:
        text = f"{padding:.0%} of each sample is padding: its documents do not fill data.seq_len"
        fix = "choose a data.seq_len that is a multiple of usual lengths, or leave data.pack out"
        event("training_warning", code="padding_waste", step=None, text=text, fix=fix, value=padding, limit=PADDING)
        print(f"warning: {text}\n  fix: {fix}", flush=True)


def words_of_documents(lengths: Lengths | None, padding: float | None) -> list[str]:
    """Nothing of data that has none."""
    words = []
    if lengths is not None:
        words.append(
            f"{lengths.documents} documents of {lengths.p5:g} / {lengths.p50:g} / {lengths.p95:g} tokens (5th, 50th, "
            f"95th percentile), the longest {lengths.largest}"
        )
    return words + ([f"padding {padding:.1%}"] if padding is not None else [])


def lengths_of(dataset: Any) -> Lengths | None:
    """Of the documents of token shards; None for other data."""
    corpus = getattr(_whole(dataset), "corpus", None)
    if corpus is None:
        return None
    lengths = corpus.documents()[1]
    some = lengths[:: max(1, len(lengths) // _MEASURED)]
    p5, p50, p95 = (float(v) for v in np.percentile(some, (5, 50, 95)))
    smallest, largest = int(lengths.min()), int(lengths.max())
    return Lengths(documents=len(lengths), smallest=smallest, p5=p5, p50=p50, p95=p95, largest=largest)


def padding_of(dataset: Any) -> float | None:
    """The share of the places of packed samples that holds no token; None for other data."""
    whole = _whole(dataset)
    return whole.packing.padding if isinstance(whole, Packed) else 0.0 if isinstance(whole, Windows) else None


def _whole(dataset: Any) -> Any:
    return getattr(dataset, "whole", dataset)
