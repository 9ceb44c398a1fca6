"""torch.compile per block and 8-bit matmuls: they change how a block is computed, and its result only by rounding."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain.plan.layout import Layout
from tests.ranks.rank_pool import Ranks, make_run

pytestmark = pytest.mark.ranks
FSDP = Layout(strategy="fsdp", dp_shard=2, activation_checkpointing="selective")


def losses(
    folder: Path, layout: Layout, setup: Callable[[], None] | None = None, **options: Any
) -> list[tuple[float, float]]:
    run = make_run(folder, layout, layout.world_size, steps=4, **options)
    return list(Ranks(run, layout.world_size, setup=setup).expect(0).losses().values())


def expect_compiled() -> None:
    """Setup: fail the rank if the session ends without a compiled graph. All blocks may share one graph."""
    from torch._dynamo.utils import counters
    from torch._inductor import config

    from clustertrain.train.session.session import Session

    config.cpp.simdlen = 1  # no vector instructions: g++ is faster

    original = Session.__exit__

    def leave(self: Session, *error: Any) -> None:
        original(self, *error)
        graphs = counters["stats"]["unique_graphs"]
        assert graphs >= 1, "nothing was compiled"

    Session.__exit__ = leave  # type: ignore[method-assign]


@pytest.mark.skipif(
    shutil.which("g++") is None and "CLUSTERTRAIN_REQUIRE_SLURM" not in os.environ,
    reason="torch.compile needs g++ on the CPU",
)
def test_compiled_blocks_train_like_eager_blocks(tmp_path: Path) -> None:
    compiled = losses(tmp_path / "compiled", FSDP, expect_compiled, parallel={"compile": True})
    plain = losses(tmp_path / "plain", Layout())
    for (loss, norm), (plain_loss, plain_norm) in zip(compiled, plain, strict=True):
        assert loss == pytest.approx(plain_loss, rel=2e-6) and norm == pytest.approx(plain_norm, rel=5e-6)


def test_fp8_loss_differs_from_bf16_but_is_close(tmp_path: Path) -> None:
    fp8, bf16 = (losses(tmp_path / p, FSDP, precision=p) for p in ("fp8", "bf16"))
    assert fp8 != bf16
    for (loss, norm), (bf16_loss, bf16_norm) in zip(fp8, bf16, strict=True):
        assert loss == pytest.approx(bf16_loss, rel=0.01) and norm == pytest.approx(bf16_norm, rel=0.2)
    assert fp8[-1][0] < fp8[0][0]
