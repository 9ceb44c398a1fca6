"""What rank 0 says of the data when a run begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from clustertrain.train.describe import lengths_of, padding_of

PADDING = 0.10  # more of the computation than this on nothing is worth a word
Event = Callable[..., None]


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
    if lengths is not None:
        words.append(
            f"{lengths.documents} documents of {lengths.p5:g} / {lengths.p50:g} / {lengths.p95:g} tokens (5th, 50th, "
            f"95th percentile), the longest {lengths.largest}"
        )
    if padding is not None:
        words.append(f"padding {padding:.1%}")
    print("data: " + ", ".join(words), flush=True)
    if padding is not None and padding > PADDING:
        text = f"{padding:.0%} of each sample is padding: its documents do not fill data.seq_len"
        fix = "choose a data.seq_len that is a multiple of usual lengths, or leave data.pack out"
        event("training_warning", code="padding_waste", step=None, text=text, fix=fix, value=padding, limit=PADDING)
        print(f"warning: {text}\n  fix: {fix}", flush=True)
