"""What can be wrong with samples, told on the host and by the sample's number, before a device has only an assertion
to offer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clustertrain.errors import ConfigError

FINITE_CHECK_BATCHES = (
    4  # micro-batches of each reader where a run begins, whose numbers are looked at; then the loss tells
)
MAX_LISTED, MAX_DESCRIBED = 64, 4  # samples of a step


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


def describe_sample(dataset: Any, sample: int) -> str:
    """A sample in words that a person can look up: what the data set's own ``describe_sample(i)`` says, else its
    number."""
    describe = getattr(dataset, "where", None)
    return f"sample {sample} ({describe(sample)})" if callable(describe) else f"sample {sample}"


def format_samples(dataset: Any, samples: Sequence[int]) -> str:
    """The numbers of :data:`MAX_LISTED` of ``samples``, of the first few with what the data set calls them."""
    items = [describe_sample(dataset, sample) for sample in samples[:MAX_DESCRIBED]]
    items += [str(sample) for sample in samples[MAX_DESCRIBED:MAX_LISTED]]
    suffix = f" and {len(samples) - MAX_LISTED} more" if len(samples) > MAX_LISTED else ""
    return f"{', '.join(items)}{suffix}"


class SampleChecker:
    """Looks at each micro-batch, and at the first ones for numbers that are not finite."""

    def __init__(self, limits: Limits, *, check_finite: bool = True) -> None:
        """``check_finite``: whether to look for those at all. Only where the run begins: after a resume a sample whose
        step would have been skipped, and counted, must not end the run."""
        self._limits = limits
        self._batches_checked = 0 if check_finite else FINITE_CHECK_BATCHES

    def __call__(self, batch: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        """Raises ConfigError; names the sample, the value, the limit and what to do."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            self._check_inputs(batch[0], keys, dataset)
            self._check_targets(batch[1], keys, dataset)
        if self._batches_checked < FINITE_CHECK_BATCHES:
            self._batches_checked += 1
            for name, tensor in named_tensors(batch):
                for row, value in _find_nonfinite(tensor):
                    raise ConfigError(
                        f"{describe_sample(dataset, keys[row][0])}: {name} holds {value}",
                        fix="mend it or leave it out: one such sample makes the loss of the whole step so",
                    )

    def _check_inputs(self, inputs: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        limits = self._limits
        for name, tensor in named_tensors(inputs, "inputs"):
            if tensor.is_floating_point() or tensor.dtype == torch.uint8 or not tensor.dim():
                continue
            if limits.max_seq_len and tensor.dim() > 1 and tensor.shape[1] > limits.max_seq_len:
                raise ConfigError(
                    f"{describe_sample(dataset, keys[0][0])}: {name} is {tensor.shape[1]} long, and the model takes "
                    f"{limits.max_seq_len} (max_seq_len)",
                    fix="cut the samples, or raise the model's max_seq_len if it can do more",
                )
            if limits.vocab_size is not None:
                _check_range(name, tensor, limits.vocab_size, limits.names[0], keys, dataset)

    def _check_targets(self, target: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        classes = self._limits.classes
        if classes is None:
            return
        for name, tensor in named_tensors(target, "target"):
            if not tensor.is_floating_point() and tensor.dim():
                _check_range(name, tensor, classes, self._limits.names[1], keys, dataset, self._limits.ignore_index)


def _check_range(
    name: str,
    tensor: torch.Tensor,
    end: int,
    limit_key: str,
    keys: Sequence[tuple[int, int]],
    dataset: Any,
    ignore_index: int | None = None,
) -> None:
    low, high = torch.aminmax(tensor)
    if low >= 0 and high < end:
        return
    outside = (tensor < 0) | (tensor >= end)
    if ignore_index is not None:
        outside &= tensor != ignore_index
    violations = outside.nonzero()
    if len(violations):
        row, *index = violations[0].tolist()
        value = int(tensor[row][tuple(index)]) if index else int(tensor[row])
        raise ConfigError(
            f"{describe_sample(dataset, keys[row][0])}: {name}{f' at {tuple(index)}' if index else ''} is {value}, and"
            f" must lie between 0 and {end - 1} ({limit_key} = {end})",
            fix=(
                f"set {limit_key} to {value + 1} or more, or mend the data"
                if value >= end
                else (
                    f"mend the data; targets of {ignore_index} count nothing"
                    if ignore_index is not None
                    else "mend the data"
                )
            ),
        )


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of ``batch`` with its name."""
    if isinstance(batch, torch.Tensor):
        yield name or "it", batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(batch, (tuple, list)):
        names = ("inputs", "target") if not name and len(batch) == 2 else [f"{name}[{i}]" for i in range(len(batch))]
        for part_name, value in zip(names, batch, strict=True):
            yield from named_tensors(value, part_name)


def _find_nonfinite(tensor: torch.Tensor) -> Iterator[tuple[int, float]]:
    """(row, value) of the first such number of each row."""
    # A sum is finite unless a term is not (or it overflows), and 40 times as fast as looking at each.
    if not tensor.is_floating_point() or not tensor.dim() or bool(torch.isfinite(tensor.sum())):
        return
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
    bad = ~torch.isfinite(rows)
    for row in bad.any(1).nonzero().flatten().tolist():
        yield row, float(rows[row, int(bad[row].int().argmax())])
