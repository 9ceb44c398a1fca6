"""Batch split: global_batch = micro_batch x grad_accum x data_parallel, in sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Batch, pluralize


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` next to ``value`` as text."""
    low, high = value // unit * unit, -(-value // unit) * unit
    return f"{low} or {high}" if low else str(high)


DEFAULT_GLOBAL_BATCH = 32


def default_global_batch(unit: int, minimum: int = DEFAULT_GLOBAL_BATCH) -> int:
    """Return the global batch for a recipe without one: the smallest multiple of ``unit`` of at least ``minimum``.

    ``unit`` is the number of sequences that all ranks process in one pass.
    """
    return -(-minimum // unit) * unit


def rank_sample_range(global_batch: int, data_parallel: int, rank: int) -> tuple[int, int]:
    """Return (first, count) of the samples of one data-parallel rank in each global batch.

    If the batch does not divide evenly, the first ranks take one more.

    Raises:
        ConfigError: there are fewer samples than ranks.
    """
    if global_batch < data_parallel:
        raise ConfigError(
            f"train.global_batch = {global_batch} is less than one sample for each of {data_parallel} data-parallel "
            "ranks",
            fix=f"use a global batch of at least {data_parallel}, or fewer ranks",
        )
    base, remainder = divmod(global_batch, data_parallel)
    return rank * base + min(rank, remainder), base + (rank < remainder)


def samples_per_rank(global_batch: int, data_parallel: int) -> int:
    """Return the sequences per rank and step. Raise ConfigError if the global batch does not divide evenly."""
    if global_batch % data_parallel:
        raise ConfigError(
            f"train.global_batch = {global_batch} does not divide over {data_parallel} data-parallel ranks: "
            f"{global_batch} / {data_parallel} = {global_batch / data_parallel:g}",
            fix=(
                f"use a global batch of {nearest_multiples(global_batch, data_parallel)}, "
                f"or a number of ranks that divides {global_batch}"
            ),
        )
    return global_batch // data_parallel


def check_divides(global_batch: int, data_parallel: int, micro_batch: int | None = None) -> None:
    """Raise ConfigError, with the arithmetic, unless the global batch divides over ranks and micro-batches."""
    rank_batch = samples_per_rank(global_batch, data_parallel)
    if micro_batch and rank_batch % micro_batch:
        unit = micro_batch * data_parallel
        raise ConfigError(
            f"train.global_batch = {global_batch} does not divide into micro-batches of {micro_batch} on "
            f"{pluralize(data_parallel, 'data-parallel rank')}: {global_batch} / ({micro_batch} x {data_parallel}) = "
            f"{global_batch / unit:g}",
            fix=(
                f"use a global batch of {nearest_multiples(global_batch, unit)}, a micro_batch that divides"
                f" {rank_batch}, or micro_batch = 0 (the plan chooses)"
            ),
        )


def split_batch(
    global_batch: int,
    data_parallel: int,
    seq_len: int,
    *,
    micro_batch: int = 0,
    fits: Callable[[int], bool],
    unsupported_reason: Callable[[int], str] = lambda micro_batches: "",
    min_micro_batches: int = 1,
    alternative: str = "",
) -> Batch:
    """Split the global batch over the ranks.

    The result changes how a step is computed, never its outcome.

    Args:
        micro_batch: 0 for the largest one that divides, ``fits`` and leaves ``min_micro_batches``, otherwise the
            smallest: fewer and larger passes keep the device busier.
        unsupported_reason: returns why the pipeline's schedule does not support a number of micro-batches, or ''.
        alternative: a setting that would support it.

    Raises:
        ConfigError: the numbers do not divide, or the schedule does not support the number of micro-batches; the
            message has the arithmetic and the nearest valid values.
    """
    check_divides(global_batch, data_parallel, micro_batch)
    rank_batch = global_batch // data_parallel
    valid_sizes = [m for m in divisors(rank_batch) if not unsupported_reason(rank_batch // m)]
    if not valid_sizes or (micro_batch and micro_batch not in valid_sizes):
        raise _schedule_error(global_batch, data_parallel, micro_batch, valid_sizes, unsupported_reason, alternative)
    size = micro_batch or next(
        (m for m in valid_sizes if rank_batch // m >= min_micro_batches and fits(m)), valid_sizes[-1]
    )
    return Batch(
        micro_batch=size,
        grad_accum=rank_batch // size,
        global_batch=global_batch,
        tokens_per_step=global_batch * seq_len,
    )


def _schedule_error(
    global_batch: int,
    data_parallel: int,
    micro_batch: int,
    valid_sizes: list[int],
    unsupported_reason: Callable[[int], str],
    alternative: str,
) -> ConfigError:
    rank_batch = global_batch // data_parallel
    size = micro_batch or 1
    larger_batch = (
        next(n for n in itertools.count(rank_batch // size) if not unsupported_reason(n)) * size * data_parallel
    )
    fixes = [f"train.micro_batch = {' or '.join(map(str, valid_sizes))}"] if valid_sizes else []
    fixes += [f"a global batch of {larger_batch}", *([alternative] if alternative else [])]
    return ConfigError(
        f"train.global_batch = {global_batch} over {pluralize(data_parallel, 'data-parallel rank')} makes "
        f"{pluralize(rank_batch // size, 'micro-batch')} of {size} per step: {unsupported_reason(rank_batch // size)}",
        fix="use " + ", or ".join(fixes),
    )


def divisors(value: int) -> list[int]:
    """Return all divisors of ``value``, largest first."""
    low = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return sorted({*low, *(value // d for d in low)}, reverse=True)
