"""global_batch = micro_batch x grad_accum x data_parallel, in sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Batch, pluralize


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of ``unit`` around ``value``, in words."""
    low, high = value // unit * unit, -(-value // unit) * unit
    return f"{low} or {high}" if low else str(high)


DEFAULT_GLOBAL_BATCH = 32


def default_global_batch(unit: int, minimum: int = DEFAULT_GLOBAL_BATCH) -> int:
    """For a recipe that names none: the smallest multiple of ``unit``, what all ranks do in one pass, that is at least
    ``minimum`` sequences."""
    return -(-minimum // unit) * unit


def rank_sample_range(global_batch: int, data_parallel: int, rank: int) -> tuple[int, int]:
    """(first, count) of the samples of one data-parallel rank in each global batch. Where it does not divide, the first
    ranks take one more.

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
    """Sequences of one rank and step. Raises ConfigError when the global batch does not divide."""
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
    """Raises ConfigError with the arithmetic when the global batch does not divide over ranks and micro-batches."""
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

    ``micro_batch`` 0 takes the largest one that divides, for which ``fits`` is true and of which there are
    ``min_micro_batches``,
    else the smallest: fewer and larger passes keep the device busier. The result never changes what is learned, only
    how it is computed.

    Args:
        why_not: says of a number of micro-batches why the pipeline's schedule does not run it, or nothing.
        way_out: what would run them.

    Raises:
        ConfigError: the numbers do not divide, or make a number of micro-batches that the schedule does not run; shows
            the arithmetic and the nearest values that do.
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
        f"{pluralize(rank_batch // size, 'micro-batch')} of {size} a step: {unsupported_reason(rank_batch // size)}",
        fix="use " + ", or ".join(fixes),
    )


def divisors(value: int) -> list[int]:
    """All divisors, largest first."""
    low = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return sorted({*low, *(value // d for d in low)}, reverse=True)
