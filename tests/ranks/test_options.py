"""Options that change how ranks reduce and gather, but not the result."""

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
# Limits of the parity table (tests/harness/parity/cells.py).
FP32, BF16 = (2e-6, 5e-6), (2e-3, 3e-2)


def losses(folder: Path, layout: Layout, **parallel: Any) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step, with two micro-batches per rank."""
    per_rank = 8 // layout.world_size
    run = make_run(
        folder, layout, layout.world_size, steps=4, global_batch=8, micro_batch=per_rank // 2, parallel=parallel
    )
    return list(Ranks(run, layout.world_size).expect(0).losses().values())


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return losses(tmp_path_factory.mktemp("single") / "run", Layout())


@pytest.mark.parametrize(
    ("layout", "parallel", "limit"),
    [
        (DDP, {"static_graph": True, "bucket_mib": 1}, FP32),
        (DDP, {"compress_gradients": True}, BF16),
        (FSDP, {"compress_gradients": True}, BF16),
        (msgspec.structs.replace(FSDP, defer_reduction=False), {"prefetch": 1}, FP32),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_two_ranks_train_like_one_process(
    layout: Layout,
    parallel: dict[str, Any],
    limit: tuple[float, float],
    single: list[tuple[float, float]],
    tmp_path: Path,
) -> None:
    steps = losses(tmp_path / "run", layout, **parallel)
    assert len(steps) == len(single) == 4
    for i in (0, 1):
        assert [step[i] for step in steps] == pytest.approx([step[i] for step in single], rel=limit[i])
    if limit is BF16:
        # fp32 would also be within these limits; the norm shows that the gradients were reduced in bf16.
        assert [norm for _, norm in steps] != pytest.approx([norm for _, norm in single], rel=FP32[1])
