"""Adapters train alike under every layout, and their runs resume exactly and under other layouts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import Ranks, digest, make_run
from tests.ranks.test_pretrained import QWEN2, write_weights
from tests.ranks.test_tensor_parallel import assert_equal_up_to_rounding, one_thread, start

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "ddp": Layout(strategy="ddp", dp_replicate=2),
    "fsdp": Layout(strategy="fsdp", dp_shard=2),
    "tp": Layout(tp=2),
    "tp + sp, fsdp": Layout(strategy="fsdp", dp_shard=2, tp=2, sequence_parallel=True),
    "pp": Layout(pp=2, schedule="1f1b"),
}
ADAPTER = {"rank": 4, "alpha": 16.0}


def run_of(folder: Path, weights: Path | str, layout: Layout, kind: str, **kw: Any) -> RunDir:
    from clustertrain.config.huggingface import families

    model = families.apply_init({"model": {"init": str(weights)}}, folder)["model"] if weights else {}
    tables = {"adapter": {"kind": kind, **ADAPTER}}
    return make_run(
        folder, layout, layout.world_size, **{"steps": 4, "every": 2, "model": model, "tables": tables, **kw}
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("base") / "weights", QWEN2)


@pytest.fixture(scope="module")
def references(weights: Path) -> Iterator[dict[str, dict[int, tuple[float, float]]]]:
    """Yield losses and gradient norms by step in one process, by kind of adapter."""
    with tempfile.TemporaryDirectory() as folder:
        yield {
            kind: start(run_of(Path(folder, kind), weights, Layout(), kind), Layout()).expect(0).losses()
            for kind in ("lora", "dora")
        }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_layout_matches_one_process(
    tmp_path: Path, weights: Path, references: dict[str, Any], kind: str, layout: str
) -> None:
    run = run_of(tmp_path / "run", weights, LAYOUTS[layout], kind)
    ranks = start(run, LAYOUTS[layout]).expect(0)
    assert_equal_up_to_rounding(ranks.losses(), references[kind])
