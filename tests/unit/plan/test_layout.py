"""Inference of degrees from the request, and coordinates of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.errors import ConfigError
from clustertrain.plan.layout import Layout, Strategy, resolve_dp_degrees


def degrees(strategy: Strategy, world: int, gpus: int = 8, **requested: int) -> tuple[int, int]:
    return resolve_dp_degrees(
        strategy, world, gpus, **{"tp": 1, "cp": 1, "pp": 1, "dp_replicate": 0, "dp_shard": 0, **requested}
    )


@pytest.mark.parametrize(
    ("strategy", "world", "requested", "expected"),
    [
        ("ddp", 16, {}, (16, 1)),
        ("zero1", 16, {}, (16, 1)),
        ("fsdp", 16, {}, (1, 16)),
        ("fsdp-grad-op", 16, {"tp": 2}, (1, 8)),
        ("hybrid-shard", 32, {}, (4, 8)),
        ("hybrid-shard", 32, {"tp": 2}, (4, 4)),
        ("hybrid-shard", 32, {"dp_shard": 16}, (2, 16)),
        ("hybrid-shard", 32, {"dp_replicate": 8}, (8, 4)),
        ("hybrid-shard", 8, {"dp_replicate": 2, "dp_shard": 4}, (2, 4)),
        ("ddp", 8, {"tp": 2, "pp": 2}, (2, 1)),
        ("fsdp", 8, {"tp": 2, "cp": 2, "pp": 2}, (1, 1)),
        # The largest group that fits inside a node; a stage has 12 ranks, one node and a half.
        ("hybrid-shard", 24, {"pp": 2}, (3, 4)),
        ("hybrid-shard", 21, {"gpus": 7}, (3, 7)),
        # Parameters are also sharded over the ranks that share a sequence.
        ("hybrid-shard", 16, {"tp": 4, "cp": 2}, (2, 1)),
        ("hybrid-shard", 1, {"gpus": 1}, (1, 1)),
        ("hybrid-shard", 8, {"tp": 8}, (1, 1)),
    ],
    ids=str,
)
def test_unset_degrees_are_inferred(
    strategy: Strategy, world: int, requested: dict[str, int], expected: tuple[int, int]
) -> None:
    assert degrees(strategy, world, **requested) == expected


@pytest.mark.parametrize(
    ("strategy", "world", "requested", "message"),
    [
        ("ddp", 16, {"tp": 3}, "tp 3 x cp 1 x pp 1 = 3 does not divide the 16 ranks: 16 / 3 = 5.33"),
        ("fsdp", 4, {"tp": 8}, "4 / 8 = 0.5"),
        ("hybrid-shard", 16, {"dp_shard": 3}, "= 15, but there are 16 ranks"),
        ("hybrid-shard", 4, {"dp_shard": 8}, "dp_replicate 1 x dp_shard 8"),
        ("fsdp", 16, {"dp_shard": 4}, "must be 16 / 1 = 16"),
        ("ddp", 16, {"dp_shard": 2, "dp_replicate": 8}, "does not shard parameters"),
        ("ddp", 16, {"dp_shard": 4}, "ddp does not shard parameters, but dp_shard is 4"),
        ("fsdp", 16, {"dp_replicate": 3}, "dp_replicate is 3"),
        ("hybrid-shard", 16, {"gpus": 8, "tp": 8}, "dp_replicate 2 x dp_shard 1 equals ddp"),
        ("hybrid-shard", 8, {"dp_shard": 1}, "dp_replicate 8 x dp_shard 1 equals ddp"),
        ("hybrid-shard", 16, {"cp": 16}, "dp_replicate 1 x dp_shard 1 equals fsdp"),
        ("fsdp", 16, {"dp_replicate": 2}, "use --layout hybrid-shard"),
        ("hybrid-shard", 8, {}, "cannot replicate"),
        ("hybrid-shard", 16, {"pp": 2}, "dp_replicate 1 x dp_shard 8 equals fsdp"),
    ],
)
def test_wrong_degree_product_is_refused(
    strategy: Strategy, world: int, requested: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError) as e:
        degrees(strategy, world, **requested)
    assert message in str(e.value) and "fix: " in str(e.value)


def test_innermost_dimension_is_tp() -> None:
    layout = Layout(strategy="hybrid-shard", dp_replicate=2, dp_shard=2, tp=2, cp=2, pp=2, schedule="1f1b")
    assert layout.world_size == 32
    assert layout.coordinates(0) == (0, 0, 0, 0, 0)
    assert layout.coordinates(1).tp == 1 and layout.coordinates(2).cp == 1 and layout.coordinates(16).pp == 1
    assert len({layout.coordinates(rank) for rank in range(32)}) == 32
    assert [layout.data_rank(rank) for rank in (0, 1, 3, 4, 8, 12, 16)] == [0, 0, 0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("fields", "description", "product"),
    [
        ({}, "single", "1 rank = 1"),
        ({"strategy": "ddp", "dp_replicate": 4}, "ddp", "4 ranks = dp_replicate 4"),
        (
            {"strategy": "hybrid-shard", "dp_replicate": 2, "dp_shard": 4, "tp": 2, "sequence_parallel": True},
            "hybrid-shard 2 x 4, tp 2 + sp",
            "16 ranks = dp_replicate 2 x dp_shard 4 x tp 2",
        ),
        ({"tp": 2, "pp": 2, "schedule": "zbv"}, "tp 2, pp 2 (zbv)", "4 ranks = pp 2 x tp 2"),
        ({"strategy": "fsdp", "dp_shard": 2, "cp": 4}, "fsdp 2, cp 4", "8 ranks = dp_shard 2 x cp 4"),
    ],
    ids=["single", "ddp", "hybrid-shard with tp", "pipeline with tp", "fsdp with cp"],
)
def test_describe(fields: dict[str, Any], description: str, product: str) -> None:
    assert (Layout(**fields).describe(), Layout(**fields).format_degrees()) == (description, product)
