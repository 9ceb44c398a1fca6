"""The order of collectives in the traces of all ranks.

NCCL matches collectives of a group by their order, and those of groups that share ranks can block each other, so every
two ranks must start the collectives that they share in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.cuda_emulation.trace import Event


@dataclass(frozen=True)
class Mismatch:
    """The first collective at which two ranks differ; None: the rank has no more."""

    ranks: tuple[int, int]
    first: Event | None
    second: Event | None

    def __str__(self) -> str:
        sides = (f"{e.name} ({e.place})" if e else "none" for e in (self.first, self.second))
        return f"ranks {self.ranks[0]} and {self.ranks[1]} differ: {' against '.join(sides)}"


def check_order(traces: Mapping[int, Sequence[Event]], groups: Mapping[str, Sequence[int]]) -> list[Mismatch]:
    """Return where two ranks start the collectives of their common groups in different orders.

    Args:
        traces: the events of each rank.
        groups: the ranks of each group by its name.
    """
    mismatches = []
    for a, b in itertools.combinations(sorted(traces), 2):
        shared = {name for name, ranks in groups.items() if a in ranks and b in ranks}
        sides = [[e for e in traces[r] if e.kind == "collective" and _is_shared(e, shared)] for r in (a, b)]
        for first, second in itertools.zip_longest(*sides):
            if first is None or second is None or _signature(first) != _signature(second):
                mismatches.append(Mismatch((a, b), first, second))
                break
    return mismatches


def _signature(event: Event) -> str:
    """Return group, operation and tensors; of an all-to-all without the tensors, whose sizes may differ by rank."""
    group, operation, tensors = event.name.split("|")
    return f"{group}|{operation}" if operation == "all_to_all_single" else f"{group}|{operation}|{tensors}"


def _is_shared(event: Event, groups: set[str]) -> bool:
    """Return whether ``event`` is a collective of one of ``groups``; transfers between two ranks are none."""
    return event.value < 0 and event.name.partition("|")[0] in groups
