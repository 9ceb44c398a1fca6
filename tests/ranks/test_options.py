"""The options that change how two ranks reduce and gather, and not what they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from clustertrain.plan.layout import Layout
from tests.ranks.rank_pool import Ranks, make_run

pytestmark = pytest.mark.ranks

DDP = Layout(strategy="ddp", dp_replicate=2)
FSDP = Layout(strategy="fsdp", dp_shard=2)
# As the parity table's (tests/harness/parity/cells.py).
FP32, BF16 = (2e-6, 5e-6), (2e-3, 3e-2)


def losses(folder: Path, layout: Layout, **parallel: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, of two micro-batches a rank."""
    micro = 8 // layout.world_size
    run = make_run(
        folder, layout, layout.world_size, steps=4, global_batch=8, micro_batch=micro // 2, parallel=parallel
    )
    return list(Ranks(run, layout.world_size).expect(0).losses().values())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return losses(tmp_path_factory.mktemp("alone") / "run", Layout())


@pytest.mark.parametrize(
    ("layout", "parallel", "limit"),
    [
        (DDP, {"static_graph": True, "bucket_mib": 1}, FP32),
        (DDP, {"compress_gradients": True}, BF16),
        (msgspec.structs.replace(FSDP, defer_reduction=False), {"prefetch": 1}, FP32),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_two_ranks_equal_one_process(
    layout: Layout,
    parallel: dict[str, Any],
    limit: tuple[float, float],
    alone: list[tuple[float, float]],
    tmp_path: Path,
) -> None:
    found = losses(tmp_path / "run", layout, **parallel)
    assert len(found) == len(alone) == 4
    for i in (0, 1):
        assert [step[i] for step in found] == pytest.approx([step[i] for step in alone], rel=limit[i])
    if limit is BF16:
        # Within its limits fp32 would be too: that the gradients went in bf16 shows in the norm.
        assert [norm for _, norm in found] != pytest.approx([norm for _, norm in alone], rel=FP32[1])
