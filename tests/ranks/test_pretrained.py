"""Every layout starts from the same pretrained weights, and a resumed run does not read them again."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from clustertrain.checkpoint.offline import inspect
from clustertrain.config.huggingface import families, tensor_names
from clustertrain.config.model import ModelSpec
from clustertrain.plan.layout import Layout
from clustertrain.run.run_dir import RunDir
from tests.ranks.rank_pool import Ranks, digest, layout_of, make_run, one_thread
from tests.ranks.test_tensor_parallel import assert_equal_up_to_rounding, save_initial_values, start

pytestmark = pytest.mark.ranks

# All features that change the tensors: heads of their own width, norms of queries and keys, a tied head.
QWEN3 = ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_dim=48, qk_norm=True, tie_embeddings=True)
QWEN2 = ModelSpec(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, qkv_bias=True)
LAYOUTS = {
    "ddp": layout_of("ddp", 2),
    "fsdp": layout_of("fsdp", 2),
    "tp 2": Layout(strategy="single", tp=2),
    "tp 2 + sp, fsdp 2": Layout(strategy="fsdp", dp_shard=2, tp=2, sequence_parallel=True),
    "pp 2": Layout(strategy="single", pp=2, schedule="1f1b"),
}


def write_weights(folder: Path, spec: ModelSpec) -> Path:
    """Write random weights as transformers saves them, in bf16 and two files."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {
        hf_name: torch.randn(shape, generator=generator).mul(0.1).add(1.0 if "norm" in hf_name else 0.0).bfloat16()
        for hf_name, shape in tensor_names.list_tensors(spec).values()
    }
    files = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = families.build_config(spec, 256, "bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_of(folder: Path, weights: Path, layout: Layout, **kw: Any) -> RunDir:
    model = families.apply_init({"model": {"init": str(weights)}}, folder)["model"]
    return make_run(folder, layout, layout.world_size, **{"steps": 3, "every": 100, "model": model, **kw})


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[int, tuple[float, float]], str]]:
    """Return weights, losses and digest of the initial values in one process, by family."""
    results = {}
    for name, spec in {"qwen2": QWEN2, "qwen3": QWEN3}.items():
        folder = tmp_path_factory.mktemp(name)
        weights = write_weights(folder / "weights", spec)
        run = run_of(folder / "run", weights, layout_of("single", 1))
        ranks = Ranks(run, 1, setup=save_initial_values).expect(0)
        results[name] = weights, ranks.losses(), digest(run, 1)
    return results


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3", name) for name in LAYOUTS] + [("qwen2", "tp 2")],
)
def test_layout_starts_from_the_same_weights(
    tmp_path: Path, references: dict[str, Any], family: str, layout: str
) -> None:
    weights, losses, initial = references[family]
    run = run_of(tmp_path / "run", weights, LAYOUTS[layout])
    ranks = start(run, LAYOUTS[layout], setup=save_initial_values)
    ranks.expect(0)
    assert digest(run, 1) == initial
    assert_equal_up_to_rounding(ranks.losses(), losses)
    (event,) = ranks.events("pretrained_loaded")
    spec = {"qwen2": QWEN2, "qwen3": QWEN3}[family]
    assert (event["path"], event["tensors"]) == (str(weights), len(tensor_names.list_tensors(spec)))


def test_first_loss_differs_from_that_of_random_weights(tmp_path: Path, references: dict[str, Any]) -> None:
    _, losses, _ = references["qwen3"]
    model = msgspec.to_builtins(QWEN3)
    run = make_run(tmp_path / "run", "single", 1, steps=1, model={**model, "init": ""})
    random_loss = Ranks(run, 1).expect(0).losses()[1][0]
    assert random_loss == pytest.approx(math.log(256), rel=0.02) and abs(random_loss - losses[1][0]) > 0.05


def test_resumed_run_does_not_read_the_weights_again(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "weights", QWEN3)
    run = run_of(tmp_path / "run", weights, layout_of("fsdp", 2), steps=8)
    Ranks(run, 2, setup=_stop_after_1).expect(0)
    shutil.rmtree(weights)
    second = Ranks(run, 2, 2, setup=one_thread).expect(0)
    assert second.events("restored") and not second.events("pretrained_loaded")
    assert max(second.losses()) == 8


def _stop_after_1() -> None:
    from tests.ranks.rank_pool import touch_stop_at

    one_thread()
    touch_stop_at(1)


@pytest.mark.parametrize("damage", ["torn", "missing"])
def test_unreadable_weights_end_all_ranks_with_the_reason(tmp_path: Path, damage: str) -> None:
    weights = write_weights(tmp_path / "weights", QWEN3)
    run = run_of(tmp_path / "run", weights, layout_of("fsdp", 2))
    if damage == "torn":
        path = weights / "model-1.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
    else:
        (weights / "model-2.safetensors").unlink()
    ranks = Ranks(run, 2, setup=one_thread)
    assert all(ranks.wait())
    expected = "is torn" if damage == "torn" else "is missing"
    assert all(expected in result["error"]["message"] for result in ranks.results()), ranks.results()


NET = """
from torch import nn

class Scaled(nn.Flatten):
    def forward(self, x):
        return super().forward(x) / 127.5 - 1

def make(width):
    return nn.Sequential(Scaled(), nn.Linear(8 * 8 * 3, width), nn.BatchNorm1d(width), nn.Linear(width, 10))
"""


def test_own_model_starts_from_another_run_in_another_layout(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    model = {"entry": "net:make", "args": {"width": 24}}
    options = {"steps": 2, "every": 100, "data": {"kind": "images", "image_size": 8}}
    first = make_run(tmp_path / "first", "fsdp", 2, model=model, **options)
    Ranks(first, 2, setup=_one_thread_with_imports, args=(str(tmp_path),)).expect(0)
    source = inspect.find_checkpoint(first.checkpoints)
    run = make_run(tmp_path / "second", "ddp", 2, model={**model, "init": str(source)}, **options)
    ranks = Ranks(run, 2, setup=_save_initial_values_with_imports, args=(str(tmp_path),)).expect(0)
    (event,) = ranks.events("pretrained_loaded")
    assert event["tensors"] == 9  # with the integer that counts the batches of the norm
    assert inspect.digest(inspect.find_checkpoint(run.checkpoints, 1), ("model",)) == inspect.digest(source, ("model",))
    wide = make_run(tmp_path / "wide", "ddp", 1, model={**model, "args": {"width": 32}, "init": str(source)}, **options)
    (result,) = _fail(wide, str(tmp_path))
    assert "1.weight has shape [24, 192], not [32, 192]" in result["error"]["message"]
    assert "3.weight has shape [10, 24], not [10, 32]" in result["error"]["message"]


def _one_thread_with_imports(folder: str) -> None:
    one_thread()
    sys.path.insert(0, folder)


def _save_initial_values_with_imports(folder: str) -> None:
    save_initial_values()
    sys.path.insert(0, folder)


def _fail(run: RunDir, folder: str) -> list[dict[str, Any]]:
    ranks = Ranks(run, 1, setup=_one_thread_with_imports, args=(folder,))
    assert all(ranks.wait())
    return ranks.results()
