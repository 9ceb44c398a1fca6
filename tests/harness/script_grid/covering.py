"""Few rows in which every value of every factor meets every value of every other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

Row = tuple[int, ...]


def pairs_of(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """Each pair of factors with their values: (factor, value, later factor, its value)."""
    return {(f, row[f], g, row[g]) for f, g in itertools.combinations(range(len(row)), 2)}


def pairwise(sizes: Sequence[int]) -> list[Row]:
    """Rows of value numbers, one number below each of ``sizes``, that hold every pair; the same rows each time.

    Greedy, after AETG (Cohen et al., IEEE TSE 23(7), 1997) but without its random order: a row starts with a pair that
    is missing, and each other factor takes the value that brings the most missing pairs, of equals the rarest.
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
        chosen = {f: a, g: b}
        for factor in range(len(sizes)):
            if factor not in chosen:
                brings = [_brings(factor, value, chosen, missing) for value in ranges[factor]]
                _, _, chosen[factor] = min((-brings[value], used[factor, value], value) for value in ranges[factor])
        row = tuple(chosen[factor] for factor in range(len(sizes)))
        rows.append(row)
        used.update(enumerate(row))
        for pair in pairs_of(row):
            missing.pop(pair, None)
    return rows


def _brings(factor: int, value: int, chosen: dict[int, int], missing: dict[tuple[int, int, int, int], None]) -> int:
    """How many missing pairs ``value`` makes with the values that are chosen already."""
    return sum(
        ((factor, value, other, v) if factor < other else (other, v, factor, value)) in missing
        for other, v in chosen.items()
    )
