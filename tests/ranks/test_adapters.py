"""Adapters train alike under every layout; their runs resume exactly, under another layout, and write little."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from clustertrain.config.huggingface import families
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.layouts import FSDP_TP, PLAIN, TP_PP
from tests.ranks.rank_pool import Ranks, digest, make_run, touch_stop_at, write_plan
from tests.ranks.test_pretrained import QWEN2, write_weights
from tests.ranks.test_tensor_parallel import assert_equal_up_to_rounding, one_thread, start

pytestmark = pytest.mark.ranks

LAYOUTS = [
    Layout(strategy="ddp", dp_replicate=2),
    Layout(strategy="fsdp", dp_shard=2),
    Layout(tp=2),
    PLAIN["hsdp"],
    Layout(pp=2, schedule="1f1b"),
    FSDP_TP,
    TP_PP,
    Layout(strategy="fsdp-grad-op", dp_shard=2),
]
STEPS = 2 * len(LAYOUTS)
ADAPTER = {"rank": 4, "alpha": 16.0}


def run_of(folder: Path, weights: Path, layout: Layout, kind: str, **kw: Any) -> RunDir:
    model = families.apply_init({"model": {"init": str(weights)}}, folder)["model"]
    adapter = {"kind": kind, **ADAPTER, **kw.pop("adapter", {})}
    options = {"steps": STEPS, "every": 100, "model": model, "tables": {"adapter": adapter}, **kw}
    return make_run(folder, layout, layout.world_size, **options)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("base") / "weights", QWEN2)


def stop_at(step: int) -> None:
    """Setup: save and stop after step ``step``."""
    one_thread()
    touch_stop_at(step)


@pytest.mark.parametrize(("kind", "layouts"), [("lora", LAYOUTS), ("dora", LAYOUTS[-3:-1])])
def test_each_layout_continues_the_run_of_another(
    tmp_path: Path, weights: Path, kind: str, layouts: list[Layout]
) -> None:
    steps = 2 * len(layouts)
    undisturbed = run_of(tmp_path / "one", weights, Layout(), kind, steps=steps)
    expected = start(undisturbed, Layout()).expect(0).losses()
    run = run_of(tmp_path / "run", weights, layouts[0], kind, steps=steps)
    losses: dict[int, tuple[float, float]] = {}
    for i, layout in enumerate(layouts):
        write_plan(run, layout, layout.world_size)
        setup = {"setup": stop_at, "args": (2 * i + 2,)} if i + 1 < len(layouts) else {"setup": one_thread}
        ranks = Ranks(run, layout.world_size, i + 1, **setup).expect(0)
        losses |= ranks.losses()
        assert bool(ranks.events("pretrained_loaded")) == (i == 0)
    assert_equal_up_to_rounding(losses, expected)
