"""Summary of the data that rank 0 reports at the start of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from clustertrain.train.data.packing import CutDocuments
from clustertrain.train.data.preferences import PreferencePairs
from clustertrain.train.data.streams.source import StreamSource
from clustertrain.train.data.token_shards import PackedTokens, TokenWindows

PADDING_WARNING_FRACTION = 0.10  # warn when padding takes more of the computation than this
CUT_WARNING_FRACTION = 0.10  # warn when more of the conversations are cut or left out
_MAX_SAMPLED_DOCUMENTS = 1_000_000  # evenly spaced documents used for the percentiles
EmitEvent = Callable[..., None]


class DocumentLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of document lengths, in tokens."""

    documents: int
    """Number of documents."""
    smallest: int
    p5: float
    p50: float
    p95: float
    largest: int


def report_datasets(train: Any, validation: Any, emit: EmitEvent, attention: str | None = None) -> None:
    """Emit the event ``data_described`` and log a line; warn about much padding and many cut conversations.

    For a stream, emit ``stream_described`` instead, and log how exact a resume is.

    Args:
        attention: how attention stays inside documents; None: it does not.
    """
    if isinstance(train, StreamSource):
        text = train.describe()
        emit(
            "stream_described",
            data=train.name,
            version=train.version,
            sharded=train.is_sharded,
            own_state=train.has_state,
            text=text,
            validation_samples=len(validation) if validation is not None else 0,
        )
        print(f"data: {text}", flush=True)
        return
    lengths, padding = find_document_lengths(train), find_padding_fraction(train)
    cut, answer_share = find_cut_documents(train), find_answer_share(train)
    emit(
        "data_described",
        data=getattr(train, "name", "") or type(train).__name__,
        samples=len(train),
        validation_samples=len(validation) if validation is not None else 0,
        version=getattr(train, "version", None),
        padding=padding,
        lengths=msgspec.to_builtins(lengths) if lengths is not None else None,
        answer_share=answer_share,
        cut=cut.cut if cut is not None else None,
        left_out=cut.left_out if cut is not None else None,
        attention=attention,
    )
    summary = [f"{len(train)} samples"]
    if validation is not None:
        summary.append(f"{len(validation)} for validation")
    summary += format_documents(lengths, padding)
    if answer_share is not None:
        summary.append(f"{answer_share:.0%} of the tokens are answers")
    if cut is not None and (cut.cut or cut.left_out):
        summary.append(f"{cut.cut} conversations cut, {cut.left_out} left out")
    print("data: " + ", ".join(summary), flush=True)
    if attention is not None:
        print(f"attention within documents: {attention}", flush=True)
    if padding is not None and padding > PADDING_WARNING_FRACTION:
        message = f"{padding:.0%} of each sample is padding: documents do not fill data.seq_len"
        fix = "set data.seq_len to a multiple of typical document lengths"
        if isinstance(_unwrap_split(train), PreferencePairs):
            fix = "lower data.seq_len to the length of most answers with their prompts"
        elif cut is None:
            fix += ", or remove data.pack"
        elif not _unwrap_split(train).packing.has_several:
            fix = "set data.pack = true"
        _warn("padding_waste", message, fix, padding, PADDING_WARNING_FRACTION, emit)
    if cut is not None and lengths is not None:
        share = (cut.cut + cut.left_out) / lengths.documents
        if share > CUT_WARNING_FRACTION:
            message = f"{share:.0%} of the conversations are longer than data.seq_len: they lack their end"
            _warn("conversations_cut", message, "raise data.seq_len", share, CUT_WARNING_FRACTION, emit)


def _warn(code: str, message: str, fix: str, value: float, limit: float, emit: EmitEvent) -> None:
    emit("training_warning", code=code, step=None, text=message, fix=fix, value=value, limit=limit)
    print(f"warning: {message}\n  fix: {fix}", flush=True)


def format_documents(lengths: DocumentLengths | None, padding: float | None) -> list[str]:
    """Return summary items for the values that are not None."""
    items = []
    if lengths is not None:
        items.append(
            f"{lengths.documents} documents of {lengths.p5:g} / {lengths.p50:g} / {lengths.p95:g} tokens (5th, 50th, "
            f"95th percentile), longest {lengths.largest}"
        )
    return items + ([f"padding {padding:.1%}"] if padding is not None else [])


def find_document_lengths(dataset: Any) -> DocumentLengths | None:
    """Return the length distribution of the documents in token shards; None for other data."""
    corpus = getattr(_unwrap_split(dataset), "corpus", None)
    if corpus is None:
        return None
    lengths = corpus.documents()[1]
    sampled = lengths[:: max(1, len(lengths) // _MAX_SAMPLED_DOCUMENTS)]
    p5, p50, p95 = (float(v) for v in np.percentile(sampled, (5, 50, 95)))
    smallest, largest = int(lengths.min()), int(lengths.max())
    return DocumentLengths(documents=len(lengths), smallest=smallest, p5=p5, p50=p50, p95=p95, largest=largest)


def find_padding_fraction(dataset: Any) -> float | None:
    """Return the fraction of positions in packed samples without a token; None for data other than token shards."""
    base = _unwrap_split(dataset)
    if isinstance(base, PreferencePairs):
        return base.padding
    return base.packing.padding if isinstance(base, PackedTokens) else 0.0 if isinstance(base, TokenWindows) else None


def find_cut_documents(dataset: Any) -> CutDocuments | None:
    """Return what became of conversations that are longer than a sample; None for other data."""
    base = _unwrap_split(dataset)
    return base.cut if isinstance(base, (PackedTokens, PreferencePairs)) else None


def find_answer_share(dataset: Any) -> float | None:
    """Return the share of the tokens that are answers; None where they are not marked or were not counted."""
    share: float | None = getattr(getattr(_unwrap_split(dataset), "corpus", None), "answer_share", None)
    return share


def _unwrap_split(dataset: Any) -> Any:
    """Return the dataset that a train/validation split was taken from."""
    return getattr(dataset, "unsplit", dataset)
