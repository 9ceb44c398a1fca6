"""global_batch = micro_batch x grad_accum x data_parallel, in sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Batch, counted


def nearest(value: int, unit: int) -> str:
    """The multiples of ``unit`` around ``value``, in words."""
    low, high = value // unit * unit, -(-value // unit) * unit
    return f"{low} or {high}" if low else str(high)


DEFAULT_GLOBAL_BATCH = 32


def default_global_batch(unit: int, least: int = DEFAULT_GLOBAL_BATCH) -> int:
    """For a recipe that names none: the smallest multiple of ``unit``, what all ranks do in one pass, that is at least
    ``least`` sequences."""
    return -(-least // unit) * unit


def share_of(global_batch: int, data_parallel: int, rank: int) -> tuple[int, int]:
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
    even, more = divmod(global_batch, data_parallel)
    return rank * even + min(rank, more), even + (rank < more)


def per_rank(global_batch: int, data_parallel: int) -> int:
    """Sequences of one rank and step. Raises ConfigError when the global batch does not divide."""
    if global_batch % data_parallel:
        raise ConfigError(
            f"train.global_batch = {global_batch} does not divide over {data_parallel} data-parallel ranks: "
            f"{global_batch} / {data_parallel} = {global_batch / data_parallel:g}",
            fix=f"use a global batch of {nearest(global_batch, data_parallel)}, "
            f"or a number of ranks that divides {global_batch}",
        )
    return global_batch // data_parallel


def check_divides(global_batch: int, data_parallel: int, micro_batch: int | None = None) -> None:
    """Raises ConfigError with the arithmetic when the global batch does not divide over ranks and micro-batches."""
    share = per_rank(global_batch, data_parallel)
    if micro_batch and share % micro_batch:
        unit = micro_batch * data_parallel
        raise ConfigError(
            f"train.global_batch = {global_batch} does not divide into micro-batches of {micro_batch} on "
            f"{counted(data_parallel, 'data-parallel rank')}: {global_batch} / ({micro_batch} x {data_parallel}) = "
            f"{global_batch / unit:g}",
            fix=f"use a global batch of {nearest(global_batch, unit)}, a micro_batch that divides {share}, "
            "or micro_batch = 0 (the plan chooses)",
        )


def split(
    global_batch: int,
    data_parallel: int,
    seq_len: int,
    *,
    micro_batch: int = 0,
    fits: Callable[[int], bool],
    why_not: Callable[[int], str] = lambda micro_batches: "",
    enough: int = 1,
    way_out: str = "",
) -> Batch:
    """Split the global batch over the ranks.

    ``micro_batch`` 0 takes the largest one that divides, for which ``fits`` is true and of which there are ``enough``,
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
    share = global_batch // data_parallel
    possible = [m for m in divisors(share) if not why_not(share // m)]
    if not possible or (micro_batch and micro_batch not in possible):
        raise _not_run(global_batch, data_parallel, micro_batch, possible, why_not, way_out)
    micro = micro_batch or next((m for m in possible if share // m >= enough and fits(m)), possible[-1])
    return Batch(
        micro_batch=micro,
        grad_accum=share // micro,
        global_batch=global_batch,
        tokens_per_step=global_batch * seq_len,
    )


def _not_run(
    global_batch: int,
    data_parallel: int,
    micro_batch: int,
    possible: list[int],
    why_not: Callable[[int], str],
    way_out: str,
) -> ConfigError:
    share = global_batch // data_parallel
    micro = micro_batch or 1
    larger = next(n for n in itertools.count(share // micro) if not why_not(n)) * micro * data_parallel
    fixes = [f"train.micro_batch = {' or '.join(map(str, possible))}"] if possible else []
    fixes += [f"a global batch of {larger}", *([way_out] if way_out else [])]
    return ConfigError(
        f"train.global_batch = {global_batch} over {counted(data_parallel, 'data-parallel rank')} makes "
        f"{counted(share // micro, 'micro-batch')} of {micro} a step: {why_not(share // micro)}",
        fix="use " + ", or ".join(fixes),
    )


def divisors(value: int) -> list[int]:
    """All divisors, largest first."""
    low = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return sorted({*low, *(value // d for d in low)}, reverse=True)
