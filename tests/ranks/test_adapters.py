"""Adapters train alike under every layout; their runs resume exactly, under another layout, and write little."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clustertrain.checkpoint.format import adapter_files
from clustertrain.checkpoint.format.safetensors_files import read_weight_files
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint
from clustertrain.config.huggingface import families
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.layouts import FSDP_TP, PLAIN, TP_PP
from tests.ranks.rank_pool import digest, make_run, one_thread, write_plan
from tests.ranks.test_pretrained import QWEN2, write_weights
from tests.ranks.test_tensor_parallel import assert_equal_up_to_rounding, save_initial_values, start

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
STEPS_PER_LAYOUT = 4  # at most: a request to stop takes effect after two
ADAPTER = {"rank": 4, "alpha": 16.0}


def run_of(folder: Path, weights: Path, layout: Layout, kind: str, **kw: Any) -> RunDir:
    model = families.apply_init({"model": {"init": str(weights)}}, folder)["model"]
    adapter = {"kind": kind, **ADAPTER, **kw.pop("adapter", {})}
    options = {"every": 100, "model": model, "tables": {"adapter": adapter}, **kw}
    return make_run(folder, layout, layout.world_size, **options)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("base") / "weights", QWEN2)


def stop_soon() -> None:
    """Setup: save and stop a few steps after the first."""
    from clustertrain.train.session.session import Session

    one_thread()
    original = Session.log

    def log(self: Session, **scalars: Any) -> None:
        original(self, **scalars)
        Path(os.environ["CLUSTERTRAIN_RANK_DIR"], "stop").touch()

    Session.log = log  # type: ignore[method-assign]


def continue_under_each(run: RunDir, layouts: list[Layout]) -> tuple[dict[int, tuple[float, float]], list[int]]:
    """Run one attempt under each layout, and return the losses of all, and how often each has read the base."""
    losses: dict[int, tuple[float, float]] = {}
    loads = []
    for i, layout in enumerate(layouts):
        write_plan(run, layout, layout.world_size)
        ranks = start(run, layout, i + 1, setup=stop_soon if i + 1 < len(layouts) else None).expect(0)
        assert ranks.losses() and losses.keys().isdisjoint(ranks.losses())
        losses |= ranks.losses()
        loads.append(len(ranks.events("pretrained_loaded")))
    return losses, loads


@pytest.mark.parametrize(("kind", "layouts"), [("lora", LAYOUTS), ("dora", LAYOUTS[-3:-1])], ids=["lora", "dora"])
def test_each_layout_continues_the_run_of_another(
    tmp_path: Path, weights: Path, kind: str, layouts: list[Layout]
) -> None:
    steps = STEPS_PER_LAYOUT * len(layouts)
    undisturbed = run_of(tmp_path / "one", weights, Layout(), kind, steps=steps)
    expected = start(undisturbed, Layout()).expect(0).losses()
    run = run_of(tmp_path / "run", weights, layouts[0], kind, steps=steps)
    losses, loads = continue_under_each(run, layouts)
    assert_equal_up_to_rounding(losses, expected)
    assert loads == [1] + [0] * (len(layouts) - 1)


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], Layout(strategy="zero1", dp_replicate=2), LAYOUTS[1], LAYOUTS[2]],
    ids=["ddp", "zero1", "fsdp", "tp"],
)
def test_resumed_run_is_bitwise_equal_and_saves_write_the_adapter(tmp_path: Path, layout: Layout) -> None:
    dropout = 0.1 if layout.tp == 1 else 0.0  # refused with tensor parallelism
    options: dict[str, Any] = {
        "steps": 6,
        "every": 2,
        "model": {"dim": 64, "vocab_size": 20_000},
        "tables": {"adapter": {"kind": "lora", "rank": 2, "dropout": dropout, "target_modules": ["*.attention"]}},
    }
    undisturbed = make_run(tmp_path / "one", layout, layout.world_size, **options)
    whole = start(undisturbed, layout).expect(0)
    run = make_run(tmp_path / "run", layout, layout.world_size, **options)
    start(run, layout, setup=stop_soon).expect(0)
    second = start(run, layout, 2).expect(0).losses()
    assert digest(run) == digest(undisturbed) and second
    assert second.items() <= whole.losses().items()
    first, *later = [saved["written"] / saved["bytes"] for saved in whole.events("checkpoint")]
    assert first == 1.0 and later and max(later) < 0.01
    assert digest(undisturbed, 2) != digest(undisturbed)


def test_adapter_of_another_run_is_read_in_parts(tmp_path: Path, weights: Path) -> None:
    first = run_of(tmp_path / "first", weights, Layout(), "dora", steps=2)
    start(first, Layout()).expect(0)
    export_checkpoint(ExportRequest(inspect.find_checkpoint(first.checkpoints), tmp_path / "adapter"))
    adapter = {"init": str(tmp_path / "adapter")}
    second = run_of(tmp_path / "second", weights, FSDP_TP, "dora", steps=2, adapter=adapter)
    start(second, FSDP_TP, setup=save_initial_values).expect(0)
    export_checkpoint(ExportRequest(inspect.find_checkpoint(second.checkpoints, 1), tmp_path / "again"))
    files = [tmp_path / name / adapter_files.WEIGHTS_FILE for name in ("adapter", "again")]
    expected, actual = map(load_file, files)
    assert expected.keys() == actual.keys() and all(torch.equal(actual[k], v) for k, v in expected.items())
    hashes = [read_weight_files(file).metadata[adapter_files.BASE_HASH] for file in files]
    assert hashes[0] == hashes[1]
