"""The plan of a save over all ranks: one tree of values, and for each tensor the rank that writes it.

Ranks with the same tensors and values form a group, and only the group's lowest rank reports them. A thousand replicas
or shards are one group; a pipeline has one group per stage, ZeRO-1 one per rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import xxhash

from clustertrain.checkpoint.core import json_tree
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import CollectedState, LocalShard

_DIGEST_BYTES = 16
FINGERPRINT_BYTES = 2 * _DIGEST_BYTES

T = TypeVar("T")  # a JSON value


@dataclass(frozen=True)
class RankPlan:
    """The part of a save that this rank writes."""

    shards: list[LocalShard]
    values: dict[str, Any]
    """On rank 0 the merged JSON values of all ranks, on the others only their own."""


class LocalPlan:
    """The state that this rank holds. Ranks with the same ``fingerprint`` hold the same tensors and values."""

    def __init__(self, collected: CollectedState) -> None:
        self.collected = collected
        self.placements = _placements(collected.shards)
        self.fingerprint = _digest(self.placements) + _digest(collected.values)


class GlobalPlanner:
    """Assignment of tensors to the ranks that write them. It is kept until the tensors of some rank change."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._placement_digests: list[bytes] = []
        self._writer_ranks: dict[str, int] = {}

    def create_rank_plan(
        self, local_plan: LocalPlan, fingerprints: Sequence[bytes], optimizers: Iterable[str]
    ) -> RankPlan:
        """Return the plan of this rank. Collective, except that ranks which all hold the same need no exchange.

        Args:
            fingerprints: the fingerprints of all ranks, in rank order.
            optimizers: the keys of the state that are optimizers.
        """
        placement_digests = [f[:_DIGEST_BYTES] for f in fingerprints]
        if placement_digests != self._placement_digests:
            self._writer_ranks = self._assign_writers(local_plan, placement_digests)
            self._placement_digests = placement_digests
        value_digests = [f[_DIGEST_BYTES:] for f in fingerprints]
        values = self._merge_values(local_plan.collected.values, value_digests, optimizers)
        return RankPlan(self._select_shards(local_plan), values)

    def cached_shards(self, local_plan: LocalPlan) -> list[LocalShard] | None:
        """Return the shards that this rank writes if no rank's tensors have changed since the last plan.

        Return None if its own tensors have changed.
        """
        if (
            not self._placement_digests
            or self._placement_digests[self._ranks.rank] != local_plan.fingerprint[:_DIGEST_BYTES]
        ):
            return None
        return self._select_shards(local_plan)

    def is_unchanged(self, fingerprints: Sequence[bytes]) -> bool:
        """Return whether no rank's tensors have changed since the last plan."""
        return [f[:_DIGEST_BYTES] for f in fingerprints] == self._placement_digests

    def _select_shards(self, local_plan: LocalPlan) -> list[LocalShard]:
        shards, rank = local_plan.collected.shards, self._ranks.rank
        assigned = [s for s in shards if not s.is_replica and self._writer_ranks[s.name] == _writer_key(s, rank)]
        return [*assigned, *local_plan.collected.rank_shards]

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
        self, own_values: dict[str, Any], digests: Sequence[bytes], optimizers: Iterable[str]
    ) -> dict[str, Any]:
        trees = [own_values] if len(set(digests)) == 1 else self._gather_distinct(own_values, digests)
        return merge_values(trees, optimizers) if self._ranks.rank == 0 else own_values

    def _gather_distinct(self, own_value: T, digests: Sequence[bytes]) -> list[T]:
        """Return the value of each group's lowest rank, on rank 0; an empty list on the others."""
        is_group_leader = digests.index(digests[self._ranks.rank]) == self._ranks.rank
        return [value for value in self._ranks.gather(own_value if is_group_leader else None) if value is not None]


def _group_ranks(digests: Sequence[bytes]) -> dict[bytes, list[int]]:
    rank_groups: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        rank_groups.setdefault(digest, []).append(rank)
    return rank_groups


def _digest(value: object) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.json.encode(value, order="deterministic"))


def _writer_key(shard: LocalShard, rank: int) -> int:
    return shard.mesh_root if shard.placement == "shard" else rank


def _placements(shards: Iterable[LocalShard]) -> dict[str, list[Any]]:
    """Return, by name, the placement of each tensor, and the root of its mesh (shards) or its bytes (copies)."""
    return {s.name: [s.placement, s.mesh_root if s.placement == "shard" else s.local_tensor.nbytes] for s in shards}


def assign_writers(
    placements: Sequence[Mapping[str, Sequence[Any]]], rank_groups: Sequence[Sequence[int]]
) -> dict[str, int]:
    """Return, by name, the rank that writes a tensor; for shards, the lowest rank of the mesh that writes them.

    Equal copies are distributed by size over all ranks that have them. If two meshes have shards of the same tensor
    (the embedding that the first and the last stage share), only one mesh writes it.

    Args:
        placements: by name, for each group: ("shard", root) or ("equal" or "first", bytes).
        rank_groups: the ranks of each group.
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
    """Return the trees merged into one; if two differ at the same place, the earlier one wins."""
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
    """Return the parameter groups of several ranks, with groups of the same options merged.

    Names and groups are sorted, so that the result does not depend on the layout.
    """
    members: dict[str, list[str]] = {}
    assigned: set[str] = set()
    for group in groups:
        options = json.dumps({k: v for k, v in group.items() if k != "params"}, sort_keys=True)
        members.setdefault(options, []).extend(n for n in group["params"] if n not in assigned)
        assigned.update(group["params"])
    merged = [{**json.loads(options), "params": sorted(set(names))} for options, names in members.items() if names]
    return sorted(merged, key=lambda g: str(g["params"][0]))
