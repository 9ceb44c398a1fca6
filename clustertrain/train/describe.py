"""What a data set is made of, as far as a look at some of its samples tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from clustertrain.errors import ConfigError
from clustertrain.train.augment import Augmented
from clustertrain.train.reading import MapStyle, Reader, form
from clustertrain.train.samples import Check, Limits, tensors, where
from clustertrain.train.tokens import Packed, Windows

LOOKED_AT = 2048  # samples for duplicates, labels and numbers that are not finite, evenly spread
MOST_LABELS = 1000  # more values than that are no classes
_CHARACTERS = 64
_MEASURED = 1_000_000  # documents whose lengths are sorted, evenly spread


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Of documents, in tokens."""

    documents: int
    smallest: int
    p5: float
    p50: float
    p95: float
    largest: int


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """``form``: types and shapes. ``text``: its first tokens as characters, where they are bytes."""

    sample: int
    place: str
    form: str
    label: int | None = None
    text: str | None = None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """``labels`` counts those of the samples that were looked at, None where targets are no classes; ``duplicates`` are
    pairs of equal samples; ``not_finite`` and ``refused`` what cannot be trained on, in words."""

    name: str
    samples: int
    version: str | None
    looked_at: int
    shown: tuple[Shown, ...]
    labels: dict[int, int] | None
    duplicates: tuple[tuple[int, int], ...]
    not_finite: tuple[str, ...]
    refused: tuple[str, ...]
    lengths: Lengths | None
    padding: float | None  # share of all places that holds no token


def describe(dataset: MapStyle, *, samples: int = 8, limits: Limits | None = None, seed: int = 0) -> Description:
    """Look at ``samples`` of them closely and at :data:`LOOKED_AT` for what is wrong; what cannot be read is listed.
    Augmented images are looked at as they are before.

    Args:
        limits: what the model takes.
    """
    # What is drawn anew each time says nothing of the data.
    dataset = dataset.images if isinstance(dataset, Augmented) else dataset
    size = len(dataset)
    rows = sorted({i * size // LOOKED_AT for i in range(LOOKED_AT)}) if size > LOOKED_AT else list(range(size))
    shown, labels = [], Counter[int]()
    seen: dict[str, int] = {}
    duplicates, refused = [], []
    closely = {rows[i * len(rows) // samples] for i in range(samples)} if rows else set()
    for i in rows:
        try:
            # A check of its own for each: it looks for what is not finite in its first micro-batches only.
            batch = Reader(dataset, seed, Check(limits or Limits())).read([(i, i)])
        except ConfigError as e:
            refused.append(e.message)
            continue
        label = _label(batch)
        labels.update([label] if label is not None else [])
        first = seen.setdefault(_digest(batch), i)
        if first != i:
            duplicates.append((first, i))
        if i in closely:
            place = where(dataset, i)
            shown.append(Shown(sample=i, place=place, form=_form(batch), label=label, text=_text(batch)))
    return Description(
        name=getattr(dataset, "name", "") or type(dataset).__name__,
        samples=size,
        version=getattr(dataset, "version", None),
        looked_at=len(rows),
        shown=tuple(shown),
        labels=dict(sorted(labels.items())) if labels and len(labels) <= MOST_LABELS else None,
        duplicates=tuple(duplicates),
        not_finite=tuple(r for r in refused if " holds " in r),
        refused=tuple(r for r in refused if " holds " not in r),
        lengths=lengths_of(dataset),
        padding=padding_of(dataset),
    )


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


def _digest(batch: Any) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in tensors(batch[0] if isinstance(batch, (tuple, list)) else batch):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _label(batch: Any) -> int | None:
    """Of a target that is one whole number."""
    target = batch[1] if isinstance(batch, Sequence) and len(batch) == 2 else None
    one = isinstance(target, torch.Tensor) and target.shape == (1,) and not target.is_floating_point()
    return int(target[0]) if one and isinstance(target, torch.Tensor) else None


def _form(batch: Any) -> str:
    """Of the sample and not of the batch of one that it is in."""
    alone = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t[0], batch)
    return form(alone)


def _text(batch: Any) -> str | None:
    """Tokens below 256 as the bytes of UTF-8."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    first = next((t for _, t in tensors(inputs)), None)
    if first is None or first.dtype != torch.int64 or first.dim() != 2:
        return None
    tokens = first[0, :_CHARACTERS]
    if int(tokens.max()) > 255 or int(tokens.min()) < ord("\t"):
        return " ".join(map(str, tokens[:16].tolist()))
    return bytes(tokens.tolist()).decode(errors="replace")
