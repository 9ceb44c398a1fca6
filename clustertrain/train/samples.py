"""What can be wrong with samples, told on the host and by the sample's number, before a device has only an assertion
to offer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clustertrain.errors import ConfigError

FINITE_BATCHES = 4  # micro-batches of each reader whose numbers are looked at one by one; later `blame` is asked


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


class Check:
    """Looks at each micro-batch, and at the first ones for numbers that are not finite."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._looked = 0

    def __call__(self, batch: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        """Raises ConfigError; names the sample, the value, the limit and what to do."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            self._inputs(batch[0], keys, dataset)
            self._targets(batch[1], keys, dataset)
        if self._looked < FINITE_BATCHES:
            self._looked += 1
            for name, tensor in tensors(batch):
                for row, _, value in _not_finite(tensor):
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


# -- after a step that was not finite


@dataclass(frozen=True)
class Suspect:
    """A sample whose own numbers are not finite. ``place`` is its position in the run, ``sample`` its number in the
    data set; None where it cannot be told."""

    micro_batch: int
    row: int
    place: int | None
    sample: int | None
    what: str

    def __str__(self) -> str:
        name = (
            f"sample {self.sample}" if self.sample is not None else f"row {self.row} of micro-batch {self.micro_batch}"
        )
        return f"{name}: {self.what}"


def blame(
    batch: Any, places: Sequence[torch.Tensor] | None, sample_at: Callable[[int], int] | None = None
) -> list[Suspect]:
    """The samples of ``batch`` that are not finite themselves, for a step whose loss was not. Waits for the device.

    None is found where the model made the number, and then the whole batch is what was being learned from.

    Args:
        batch: (inputs, target), or a list of such micro-batches, as given to ``train_step``.
        places: of each micro-batch the position of its samples in the run; those below 0 are nobody's.
        sample_at: the sample at a position: ``Loader.sample_at``.
    """
    found = []
    for m, part in enumerate(batch if isinstance(batch, list) else [batch]):
        of_rows = places[m].tolist() if places is not None else None
        seen: set[int] = set()
        for name, tensor in tensors(part):
            for row, at, value in _not_finite(tensor):
                place = of_rows[row] if of_rows is not None and row < len(of_rows) else None
                if row in seen or (place is not None and place < 0):
                    continue
                seen.add(row)
                sample = sample_at(place) if sample_at is not None and place is not None else None
                found.append(Suspect(m, row, place, sample, f"{name}{f' at {at}' if at else ''} is {value}"))
    return found


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


def _not_finite(tensor: torch.Tensor) -> Iterator[tuple[int, tuple[int, ...], float]]:
    """(row, place in it, value) of the first such number of each row."""
    # A sum is finite unless a term is not (or it overflows), and 40 times as fast as looking at each.
    if not tensor.is_floating_point() or not tensor.dim() or bool(torch.isfinite(tensor.sum())):
        return
    bad = ~torch.isfinite(tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None])
    for row in bad.any(1).nonzero().flatten().tolist():
        first = int(bad[row].int().argmax())
        at = tuple(int(i) for i in np.unravel_index(first, tensor.shape[1:])) if tensor.dim() > 1 else ()
        yield row, at, float(tensor[row].flatten()[first])
