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
from clustertrain.checkpoint.core.state_dict import CollectedState, LocalShard

_DIGEST_BYTES = 16
FINGERPRINT_BYTES = 2 * _DIGEST_BYTES


@dataclass(frozen=True)
class RankPlan:
    """The blocks that this rank writes, and on rank 0 the values of all ranks."""

    shards: list[LocalShard]
    values: dict[str, Any]


class LocalPlan:
    """What a rank holds, and a mark of it: two ranks with the same marks hold the same things."""

    def __init__(self, collected: CollectedState) -> None:
        self.collected = collected
        self.placements = _placements(collected.shards)
        self.fingerprint = _digest(self.placements) + _digest(collected.values)


class GlobalPlanner:
    """Who writes what, which is found out once and holds until a rank holds something else."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._placement_digests: list[bytes] = []
        self._writer_ranks: dict[str, int] = {}

    def create_rank_plan(
        self, local_plan: LocalPlan, fingerprints: Sequence[bytes], optimizers: Iterable[str]
    ) -> RankPlan:
        """Collective, but where all ranks hold the same: then each knows by itself what the others know.

        Args:
            marks: those of all ranks' offers.
            optimizers: the keys of the state that are optimizers.
        """
        placement_digests = [mark[:_DIGEST_BYTES] for mark in fingerprints]
        if placement_digests != self._placement_digests:
            self._writer_ranks = self._assign_writers(local_plan, placement_digests)
            self._placement_digests = placement_digests
        values = self._merge_values(
            local_plan.collected.values, [mark[_DIGEST_BYTES:] for mark in fingerprints], optimizers
        )
        return RankPlan(self._select_shards(local_plan), values)

    def cached_shards(self, local_plan: LocalPlan) -> list[LocalShard] | None:
        """What this rank will write if no rank holds anything else than the last time; None: this one does."""
        if (
            not self._placement_digests
            or self._placement_digests[self._ranks.rank] != local_plan.fingerprint[:_DIGEST_BYTES]
        ):
            return None
        return self._select_shards(local_plan)

    def is_unchanged(self, fingerprints: Sequence[bytes]) -> bool:
        """Whether no rank holds anything else than the last time."""
        return [mark[:_DIGEST_BYTES] for mark in fingerprints] == self._placement_digests

    def _select_shards(self, local_plan: LocalPlan) -> list[LocalShard]:
        shards, rank = local_plan.collected.shards, self._ranks.rank
        mine = [b for b in shards if not b.is_replica and self._writer_ranks[b.name] == _writer_key(b, rank)]
        return [*mine, *local_plan.collected.rank_shards]

    def _assign_writers(self, local_plan: LocalPlan, placement_digests: Sequence[bytes]) -> dict[str, int]:
        rank_groups = _group_ranks(placement_digests)
        if len(rank_groups) == 1:
            return assign_writers([local_plan.placements], list(rank_groups.values()))
        placements = self._gather_distinct(local_plan.placements, placement_digests)
        writer_ranks: dict[str, int] = (
            assign_writers(placements, list(rank_groups.values())) if self._ranks.rank == 0 else {}
        )
        writer_ranks = self._ranks.broadcast(writer_ranks)
        return writer_ranks

    def _merge_values(
        self, own_values: dict[str, Any], fingerprints: Sequence[bytes], optimizers: Iterable[str]
    ) -> dict[str, Any]:
        trees = [own_values] if len(set(fingerprints)) == 1 else self._gather_distinct(own_values, fingerprints)
        return merge_values(trees, optimizers) if self._ranks.rank == 0 else own_values

    def _gather_distinct(self, own_value: Any, fingerprints: Sequence[bytes]) -> list[Any]:
        """On rank 0 what the first rank of each kind has."""
        is_group_leader = fingerprints.index(fingerprints[self._ranks.rank]) == self._ranks.rank
        return [value for value in self._ranks.gather(own_value if is_group_leader else None) if value is not None]


def _group_ranks(fingerprints: Sequence[bytes]) -> dict[bytes, list[int]]:
    rank_groups: dict[bytes, list[int]] = {}
    for rank, mark in enumerate(fingerprints):
        rank_groups.setdefault(mark, []).append(rank)
    return rank_groups


def _digest(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.json.encode(value, order="deterministic"))


def _writer_key(shard: LocalShard, rank: int) -> int:
    return shard.mesh_root if shard.placement == "shard" else rank


def _placements(shards: Iterable[LocalShard]) -> dict[str, list[Any]]:
    """What tells how a tensor is held: the root of its mesh, or its size."""
    return {b.name: [b.placement, b.mesh_root if b.placement == "shard" else b.local_tensor.nbytes] for b in shards}


def assign_writers(
    placements: Sequence[Mapping[str, Sequence[Any]]], rank_groups: Sequence[Sequence[int]]
) -> dict[str, int]:
    """By name the rank that writes a tensor, for shards the lowest rank of the mesh that does.

    Equal copies are shared out by size over all ranks that have them. Of shards on two meshes (the embedding that the
    first and the last stage have in common) only one mesh's are written.

    Args:
        held: of each kind, ("shard", root) or ("equal" or "first", bytes) by name.
        members: the ranks of each kind.
    """
    writer_ranks: dict[str, int] = {}
    equal: dict[str, tuple[int, list[int]]] = {}
    for tensors, ranks in zip(placements, rank_groups, strict=True):
        for name, (placement, number) in tensors.items():
            if placement == "equal":
                equal[name] = (number, equal.get(name, (0, []))[1] + list(ranks))
            else:
                root = number if placement == "shard" else ranks[0]
                writer_ranks[name] = min(root, writer_ranks.get(name, root))
    bytes_per_rank = dict.fromkeys((r for ranks in rank_groups for r in ranks), 0)
    for name, (size, holders) in sorted(equal.items(), key=lambda item: (-item[1][0], item[0])):
        writer_ranks[name] = min(holders, key=lambda r: (bytes_per_rank[r], r))
        bytes_per_rank[writer_ranks[name]] += size
    return writer_ranks


def merge_values(trees: Sequence[Mapping[str, Any]], optimizers: Iterable[str]) -> dict[str, Any]:
    """One tree of all; where two have another value in the same place, the earlier one's stays."""
    merged: dict[str, Any] = {}
    for tree in trees:
        merged = _merge(merged, tree)
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
    assigned: set[str] = set()
    for group in groups:
        options = json.dumps({k: v for k, v in group.items() if k != "params"}, sort_keys=True)
        members.setdefault(options, []).extend(n for n in group["params"] if n not in assigned)
        assigned.update(group["params"])
    merged = [{**json.loads(options), "params": sorted(set(names))} for options, names in members.items() if names]
    return sorted(merged, key=lambda g: str(g["params"][0]))
