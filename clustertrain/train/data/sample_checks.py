"""Checks of samples on the host, which name the bad sample; a GPU would only report a failed assertion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clustertrain.errors import ConfigError
from clustertrain.train.core.step_types import DOCUMENT_STARTS

FINITE_CHECK_BATCHES = 4  # micro-batches per reader checked at the start of a run; later the loss shows NaN and Inf
MAX_LISTED, MAX_DESCRIBED = 64, 4  # samples listed by number, and described, per step


@dataclass(frozen=True)
class Limits:
    """Input limits of a model. None and 0 mean unknown and unchecked."""

    vocab_size: int | None = None
    """Upper bound (exclusive) of integer inputs; uint8 inputs are images and not checked."""
    classes: int | None = None
    """Upper bound (exclusive) of integer targets."""
    max_seq_len: int = 0
    """Maximum length of inputs (batch, length, ...) of integers."""
    ignore_index: int = -100
    """The one target value allowed outside the bounds."""
    needs_document_starts: bool = False
    """Whether inputs must be a dict with ``document_starts``."""
    names: tuple[str, str] = ("model.vocab_size", "the model's number of classes")
    """Recipe keys of ``vocab_size`` and ``classes``, for messages."""


def describe_sample(dataset: Any, sample: int) -> str:
    """Return a text that names the sample by its number and, if that method exists, ``dataset.where(sample)``."""
    describe = getattr(dataset, "where", None)
    return f"sample {sample} ({describe(sample)})" if callable(describe) else f"sample {sample}"


def format_samples(dataset: Any, samples: Sequence[int]) -> str:
    """Return the numbers of up to :data:`MAX_LISTED` samples, with descriptions for the first :data:`MAX_DESCRIBED`."""
    items = [describe_sample(dataset, sample) for sample in samples[:MAX_DESCRIBED]]
    items += [str(sample) for sample in samples[MAX_DESCRIBED:MAX_LISTED]]
    suffix = f" and {len(samples) - MAX_LISTED} more" if len(samples) > MAX_LISTED else ""
    return f"{', '.join(items)}{suffix}"


class SampleChecker:
    """Check of each micro-batch against the limits, and of the first ones for NaN and Inf."""

    def __init__(self, limits: Limits, *, check_finite: bool = True) -> None:
        """Check for NaN and Inf only with ``check_finite``, which is meant for the start of a run.

        After a resume, a bad sample must not end the run: its step is skipped and counted, as without the interruption.
        """
        self._limits = limits
        self._batches_checked = 0 if check_finite else FINITE_CHECK_BATCHES

    def __call__(self, batch: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        """Raise ConfigError for a bad sample, naming it, the value, the limit and a fix."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            self._check_document_starts(batch[0], keys, dataset)
            self._check_inputs(batch[0], keys, dataset)
            self._check_targets(batch[1], keys, dataset)
        if self._batches_checked < FINITE_CHECK_BATCHES:
            self._batches_checked += 1
            for name, tensor in named_tensors(batch):
                for row, value in _find_nonfinite(tensor):
                    raise ConfigError(
                        f"{describe_sample(dataset, keys[row][0])}: {name} holds {value}",
                        fix="correct or remove it: one such sample makes the loss of the whole step NaN or Inf",
                    )

    def _check_inputs(self, inputs: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        limits = self._limits
        tokens = {k: v for k, v in inputs.items() if k != DOCUMENT_STARTS} if isinstance(inputs, dict) else inputs
        for name, tensor in named_tensors(tokens, "inputs"):
            if tensor.is_floating_point() or tensor.dtype == torch.uint8 or not tensor.dim():
                continue
            if limits.max_seq_len and tensor.dim() > 1 and tensor.shape[1] > limits.max_seq_len:
                raise ConfigError(
                    f"{describe_sample(dataset, keys[0][0])}: {name} has length {tensor.shape[1]}, more than the "
                    f"model's max_seq_len = {limits.max_seq_len}",
                    fix="shorten the samples, or raise max_seq_len if the model supports it",
                )
            if limits.vocab_size is not None:
                _check_range(name, tensor, limits.vocab_size, limits.names[0], keys, dataset)

    def _check_document_starts(self, inputs: Any, keys: Sequence[tuple[int, int]], dataset: Any) -> None:
        """Raise ConfigError for starts with which a token would see another document, or nothing at all."""
        starts = inputs.get(DOCUMENT_STARTS) if isinstance(inputs, dict) else None
        if starts is None and self._limits.needs_document_starts:
            raise ConfigError(
                f'{describe_sample(dataset, keys[0][0])}: data.attention = "document", but its inputs are not a dict '
                f"with {DOCUMENT_STARTS}",
                fix=f'return ({{"tokens": tokens, "{DOCUMENT_STARTS}": starts}}, targets), where starts[i] is the '
                "position in the sample of the first token of token i's document",
            )
        if starts is None:
            return
        fix = "give each token the position in the sample of the first token of its document, as int64"
        if not isinstance(starts, torch.Tensor) or starts.dim() != 2 or starts.dtype != torch.int64:
            raise ConfigError(
                f"{describe_sample(dataset, keys[0][0])}: {DOCUMENT_STARTS} is not one int64 per token", fix=fix
            )
        before = torch.nn.functional.pad(starts[:, :-1], (1, 0))
        is_wrong = (starts != before) & (starts != torch.arange(starts.shape[1]))
        for row, position in is_wrong.nonzero()[:1].tolist():
            raise ConfigError(
                f"{describe_sample(dataset, keys[row][0])}: {DOCUMENT_STARTS} at {position} is "
                f"{int(starts[row, position])}: must be {position}, or {int(before[row, position])} as before",
                fix=fix,
            )

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
            f"{describe_sample(dataset, keys[row][0])}: {name}{f' at {tuple(index)}' if index else ''} is {value}:"
            f" must be between 0 and {end - 1} ({limit_key} = {end})",
            fix=(
                f"set {limit_key} to {value + 1} or more, or correct the data"
                if value >= end
                else (
                    f"correct the data; only targets of {ignore_index} are ignored"
                    if ignore_index is not None
                    else "correct the data"
                )
            ),
        )


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of ``batch`` with its name."""
    if isinstance(batch, torch.Tensor):
        yield name or "the tensor", batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(batch, (tuple, list)):
        names = ("inputs", "target") if not name and len(batch) == 2 else [f"{name}[{i}]" for i in range(len(batch))]
        for part_name, value in zip(names, batch, strict=True):
            yield from named_tensors(value, part_name)


def _find_nonfinite(tensor: torch.Tensor) -> Iterator[tuple[int, float]]:
    """Yield (row, value) of the first NaN or Inf in each row."""
    # The sum of finite terms is finite unless it overflows, and takes a fortieth of the time of checking each term.
    if not tensor.is_floating_point() or not tensor.dim() or bool(torch.isfinite(tensor.sum())):
        return
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
    bad = ~torch.isfinite(rows)
    for row in bad.any(1).nonzero().flatten().tolist():
        yield row, float(rows[row, int(bad[row].int().argmax())])
