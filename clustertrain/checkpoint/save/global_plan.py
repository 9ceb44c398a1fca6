"""What the ranks hold together: one tree of values, and for each tensor who writes it.

Ranks that hold the same things are of one kind, and the first of them speaks for all: a job of a thousand replicas or
shards has one kind, a pipeline one a stage, ZeRO-1 one a rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from clustertrain.checkpoint.core import json_tree
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.state_dict import Block, Collected

_DIGEST_BYTES = 16
MARK_BYTES = 2 * _DIGEST_BYTES


@dataclass(frozen=True)
class Share:
    """The blocks that this rank writes, and on rank 0 the values of all ranks."""

    blocks: list[Block]
    values: dict[str, Any]


class Offer:
    """What a rank holds, and a mark of it: two ranks with the same marks hold the same things."""

    def __init__(self, collected: Collected) -> None:
        self.collected = collected
        self.held = _held(collected.blocks)
        self.mark = _digest(self.held) + _digest(collected.values)


class Union:
    """Who writes what, which is found out once and holds until a rank holds something else."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._holding: list[bytes] = []
        self._chosen: dict[str, int] = {}

    def share(self, offer: Offer, marks: Sequence[bytes], optimizers: Iterable[str]) -> Share:
        """Collective, but where all ranks hold the same: then each knows by itself what the others know.

        Args:
            marks: those of all ranks' offers.
            optimizers: the keys of the state that are optimizers.
        """
        holding = [mark[:_DIGEST_BYTES] for mark in marks]
        if holding != self._holding:
            self._chosen = self._choose(offer, holding)
            self._holding = holding
        values = self._values(offer.collected.values, [mark[_DIGEST_BYTES:] for mark in marks], optimizers)
        return Share(self._blocks(offer), values)

    def expected(self, offer: Offer) -> list[Block] | None:
        """What this rank will write if no rank holds anything else than the last time; None: this one does."""
        if not self._holding or self._holding[self._ranks.rank] != offer.mark[:_DIGEST_BYTES]:
            return None
        return self._blocks(offer)

    def agrees(self, marks: Sequence[bytes]) -> bool:
        """Whether no rank holds anything else than the last time."""
        return [mark[:_DIGEST_BYTES] for mark in marks] == self._holding

    def _blocks(self, offer: Offer) -> list[Block]:
        blocks, rank = offer.collected.blocks, self._ranks.rank
        mine = [b for b in blocks if not b.replica and self._chosen[b.name] == _writes_as(b, rank)]
        return [*mine, *offer.collected.private]

    def _choose(self, offer: Offer, holding: Sequence[bytes]) -> dict[str, int]:
        kinds = _kinds(holding)
        if len(kinds) == 1:
            return writers([offer.held], list(kinds.values()))
        found = self._of_each_kind(offer.held, holding)
        chosen: dict[str, int] = writers(found, list(kinds.values())) if self._ranks.rank == 0 else {}
        chosen = self._ranks.broadcast(chosen)
        return chosen

    def _values(self, mine: dict[str, Any], marks: Sequence[bytes], optimizers: Iterable[str]) -> dict[str, Any]:
        found = [mine] if len(set(marks)) == 1 else self._of_each_kind(mine, marks)
        return merge_values(found, optimizers) if self._ranks.rank == 0 else mine

    def _of_each_kind(self, mine: Any, marks: Sequence[bytes]) -> list[Any]:
        """On rank 0 what the first rank of each kind has."""
        first = marks.index(marks[self._ranks.rank]) == self._ranks.rank
        return [told for told in self._ranks.gather(mine if first else None) if told is not None]


def _kinds(marks: Sequence[bytes]) -> dict[bytes, list[int]]:
    kinds: dict[bytes, list[int]] = {}
    for rank, mark in enumerate(marks):
        kinds.setdefault(mark, []).append(rank)
    return kinds


def _digest(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.json.encode(value, order="deterministic"))


def _writes_as(block: Block, rank: int) -> int:
    return block.root if block.held == "shard" else rank


def _held(blocks: Iterable[Block]) -> dict[str, list[Any]]:
    """What tells how a tensor is held: the root of its mesh, or its size."""
    return {b.name: [b.held, b.root if b.held == "shard" else b.local.nbytes] for b in blocks}


def writers(held: Sequence[Mapping[str, Sequence[Any]]], members: Sequence[Sequence[int]]) -> dict[str, int]:
    """By name the rank that writes a tensor, for shards the lowest rank of the mesh that does.

    Equal copies are shared out by size over all ranks that have them. Of shards on two meshes (the embedding that the
    first and the last stage have in common) only one mesh's are written.

    Args:
        held: of each kind, ("shard", root) or ("equal" or "first", bytes) by name.
        members: the ranks of each kind.
    """
    chosen: dict[str, int] = {}
    equal: dict[str, tuple[int, list[int]]] = {}
    for tensors, ranks in zip(held, members, strict=True):
        for name, (how, number) in tensors.items():
            if how == "equal":
                equal[name] = (number, equal.get(name, (0, []))[1] + list(ranks))
            else:
                root = number if how == "shard" else ranks[0]
                chosen[name] = min(root, chosen.get(name, root))
    load = dict.fromkeys((r for ranks in members for r in ranks), 0)
    for name, (size, holders) in sorted(equal.items(), key=lambda item: (-item[1][0], item[0])):
        chosen[name] = min(holders, key=lambda r: (load[r], r))
        load[chosen[name]] += size
    return chosen


def merge_values(trees: Sequence[Mapping[str, Any]], optimizers: Iterable[str]) -> dict[str, Any]:
    """One tree of all; where two have another value in the same place, the earlier one's stays."""
    merged: dict[str, Any] = {}
    for each in trees:
        merged = _merge(merged, each)
    for key in optimizers:
        merged[key] = {**merged[key], "groups": merge_groups(g for t in trees for g in t[key]["groups"])}
    return merged


def _merge(a: Any, b: Any) -> Any:
    if not (json_tree.is_plain_map(a) and json_tree.is_plain_map(b)):
        return a
    return {**{k: _merge(v, b[k]) if k in b else v for k, v in a.items()}, **{k: b[k] for k in b.keys() - a.keys()}}


def merge_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of several ranks as groups of the whole: those with the same options are one, the names in it
    are sorted, and so are the groups by them, so that the layout cannot be told from it."""
    members: dict[str, list[str]] = {}
    seen: set[str] = set()
    for group in groups:
        options = json.dumps({k: v for k, v in group.items() if k != "params"}, sort_keys=True)
        members.setdefault(options, []).extend(n for n in group["params"] if n not in seen)
        seen.update(group["params"])
    merged = [{**json.loads(options), "params": sorted(set(names))} for options, names in members.items() if names]
    return sorted(merged, key=lambda g: str(g["params"][0]))
