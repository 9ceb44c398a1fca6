"""What can be wrong with samples, told on the host and by the sample's number, before a device has only an assertion
to offer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clustertrain.errors import ConfigError

FINITE_BATCHES = 4  # micro-batches of each reader where a run begins, whose numbers are looked at; then the loss tells
LISTED, DESCRIBED = 64, 4  # samples of a step


@dataclass(frozen=True)
class Limits:
    """What a model takes. ``None`` and 0: not known, and not checked.

    Args:
        vocab_size: whole numbers in the inputs (not bytes, which are images) are below it.
        classes: and so are whole numbers in the target.
        max_seq_len: inputs (batch, length, ...) of whole numbers are no longer.
        ignore_index: the one value that a target may have besides.
        names: the recipe's keys of the first two, for the messages.
    """

    vocab_size: int | None = None
    classes: int | None = None
    max_seq_len: int = 0
    ignore_index: int = -100
    names: tuple[str, str] = ("model.vocab_size", "the model's number of classes")


def where(dataset: Any, sample: int) -> str:
    """A sample in words that a person can look up: what the data set's own ``where(i)`` says, else its number."""
    own = getattr(dataset, "where", None)
    return f"sample {sample} ({own(sample)})" if callable(own) else f"sample {sample}"


def listed(dataset: Any, samples: Sequence[int]) -> str:
    """The numbers of :data:`LISTED` of ``samples``, of the first few with what the data set calls them."""
    words = [where(dataset, sample) for sample in samples[:DESCRIBED]]
    words += [str(sample) for sample in samples[DESCRIBED:LISTED]]
    more = f" and {len(samples) - LISTED} more" if len(samples) > LISTED else ""
    return f"{', '.join(words)}{more}"


class Check:
    """Looks at each micro-batch, and at the first ones for numbers that are not finite."""

    def __init__(self, limits: Limits, *, finite: bool = True) -> None:
        """``finite``: whether to look for those at all. Only where the run begins: after a resume a sample whose step
        would have been skipped, and counted, must not end the run."""
        self._limits = limits
        self._looked = 0 if finite else FINITE_BATCHES

    def __call__(self, batch: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        """Raises ConfigError; names the sample, the value, the limit and what to do."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            self._inputs(batch[0], keys, dataset)
            self._targets(batch[1], keys, dataset)
        if self._looked < FINITE_BATCHES:
            self._looked += 1
            for name, tensor in tensors(batch):
                for row, value in _not_finite(tensor):
                    raise ConfigError(
                        f"{where(dataset, keys[row][0])}: {name} holds {value}",
                        fix="mend it or leave it out: one such sample makes the loss of the whole step so",
                    )

    def _inputs(self, inputs: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        limits = self._limits
        for name, tensor in tensors(inputs, "inputs"):
            if tensor.is_floating_point() or tensor.dtype == torch.uint8 or not tensor.dim():
                continue
            if limits.max_seq_len and tensor.dim() > 1 and tensor.shape[1] > limits.max_seq_len:
                raise ConfigError(
                    f"{where(dataset, keys[0][0])}: {name} is {tensor.shape[1]} long, and the model takes "
                    f"{limits.max_seq_len} (max_seq_len)",
                    fix="cut the samples, or raise the model's max_seq_len if it can do more",
                )
            if limits.vocab_size is not None:
                _within(name, tensor, limits.vocab_size, limits.names[0], keys, dataset)

    def _targets(self, target: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        classes = self._limits.classes
        if classes is None:
            return
        for name, tensor in tensors(target, "target"):
            if not tensor.is_floating_point() and tensor.dim():
                _within(name, tensor, classes, self._limits.names[1], keys, dataset, self._limits.ignore_index)


def _within(
    name: str,
    tensor: torch.Tensor,
    end: int,
    limit: str,
    keys: Sequence[tuple[int, int]],
    dataset: Any,
    ignored: int | None = None,
) -> None:
    low, high = torch.aminmax(tensor)
    if low >= 0 and high < end:
        return
    outside = (tensor < 0) | (tensor >= end)
    if ignored is not None:
        outside &= tensor != ignored
    found = outside.nonzero()
    if len(found):
        row, *at = found[0].tolist()
        value = int(tensor[row][tuple(at)]) if at else int(tensor[row])
        raise ConfigError(
            f"{where(dataset, keys[row][0])}: {name}{f' at {tuple(at)}' if at else ''} is {value}, and must lie "
            f"between 0 and {end - 1} ({limit} = {end})",
            fix=f"set {limit} to {value + 1} or more, or mend the data"
            if value >= end
            else f"mend the data; targets of {ignored} count nothing"
            if ignored is not None
            else "mend the data",
        )


def tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of ``batch`` with its name."""
    if isinstance(batch, torch.Tensor):
        yield name or "it", batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from tensors(value, f"{name}[{key!r}]")
    elif isinstance(batch, (tuple, list)):
        parts = ("inputs", "target") if not name and len(batch) == 2 else [f"{name}[{i}]" for i in range(len(batch))]
        for part, value in zip(parts, batch, strict=True):
            yield from tensors(value, part)


def _not_finite(tensor: torch.Tensor) -> Iterator[tuple[int, float]]:
    """(row, value) of the first such number of each row."""
    # A sum is finite unless a term is not (or it overflows), and 40 times as fast as looking at each.
    if not tensor.is_floating_point() or not tensor.dim() or bool(torch.isfinite(tensor.sum())):
        return
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
    bad = ~torch.isfinite(rows)
    for row in bad.any(1).nonzero().flatten().tolist():
        yield row, float(rows[row, int(bad[row].int().argmax())])
