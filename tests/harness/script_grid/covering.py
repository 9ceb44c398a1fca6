"""A small set of rows that contains every pair of values of any two factors."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

Row = tuple[int, ...]


def pairs_of(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """Return all pairs of values in ``row``: (factor, value, later factor, its value)."""
    return {(f, row[f], g, row[g]) for f, g in itertools.combinations(range(len(row)), 2)}


def pairwise(sizes: Sequence[int]) -> list[Row]:
    """Return rows of value numbers, each below its entry of ``sizes``, that contain every pair; deterministic.

    Greedy, after AETG (Cohen et al., IEEE TSE 23(7), 1997) but without its random order: a row starts with a missing
    pair, and each other factor takes the value that adds the most missing pairs, and the rarest value of equal ones.
    """
    ranges = [range(size) for size in sizes]
    missing = {
        (f, a, g, b): None
        for f, g in itertools.combinations(range(len(sizes)), 2)
        for a, b in itertools.product(ranges[f], ranges[g])
    }
    used: Counter[tuple[int, int]] = Counter()
    rows: list[Row] = []
    while missing:
        f, a, g, b = next(iter(missing))
        row_values = {f: a, g: b}
        for factor in range(len(sizes)):
            if factor not in row_values:
                gains = [_count_new_pairs(factor, value, row_values, missing) for value in ranges[factor]]
                _, _, row_values[factor] = min((-gains[value], used[factor, value], value) for value in ranges[factor])
        row = tuple(row_values[factor] for factor in range(len(sizes)))
        rows.append(row)
        used.update(enumerate(row))
        for pair in pairs_of(row):
            missing.pop(pair, None)
    return rows


def _count_new_pairs(
    factor: int, value: int, row_values: dict[int, int], missing: dict[tuple[int, int, int, int], None]
) -> int:
    """Return how many missing pairs ``value`` adds to the values in ``row_values``."""
    return sum(
        ((factor, value, other, v) if factor < other else (other, v, factor, value)) in missing
        for other, v in row_values.items()
    )
