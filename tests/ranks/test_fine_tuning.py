"""A tiny model learns one text, and adapters over it another: with a recipe, and with a script and transformers."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from clustertrain.checkpoint.format import adapter_files
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint
from clustertrain.config.huggingface import families
from clustertrain.plan.layout import Layout
from tests.paths import ROOT
from tests.ranks.rank_pool import make_run
from tests.ranks.test_tensor_parallel import start

pytestmark = pytest.mark.ranks

FSDP = Layout(strategy="fsdp", dp_shard=2)
SOURCE = str(Path(sysconfig.get_paths()["stdlib"], "asyncio"))  # Python
MANUAL = {"path": str(Path(SOURCE).with_name("pydoc_data")), "pattern": "topics.py"}  # English
DATA = {"seq_len": 48, "max_bytes": 2_000_000, "validation": 0.05}
SIZES = {"dim": 48, "layers": 2, "heads": 4, "kv_heads": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned Python, as transformers reads it."""
    folder = tmp_path_factory.mktemp("base")
    tables = {"optim": {"lr": 8e-3}, "evaluation": {"every": 150, "samples": 128}}
    data = {**DATA, "path": SOURCE}
    run = make_run(
        folder / "run", Layout(), 1, steps=150, every=150, micro_batch=16, model=SIZES, data=data, tables=tables
    )
    rows = start(run, Layout()).expect(0).rows()
    assert rows[-1]["validation_loss"] < 2.4
    export_checkpoint(ExportRequest(inspect.find_checkpoint(run.checkpoints), folder / "hf"))
    return folder / "hf"


def test_recipe_adapts_to_another_text(tmp_path: Path, base: Path) -> None:
    model = families.apply_init({"model": {"init": str(base)}}, base)["model"]
    tables = {
        "adapter": {"kind": "lora", "rank": 8, "alpha": 16.0},
        "optim": {"lr": 8e-3, "weight_decay": 0.0},
        "evaluation": {"every": 60, "samples": 128},
    }
    data = {**DATA, **MANUAL}
    run = make_run(tmp_path / "run", FSDP, 2, steps=60, every=60, micro_batch=8, model=model, data=data, tables=tables)
    ranks = start(run, FSDP).expect(0)
    (first, _), last = ranks.losses()[1], ranks.rows()[-1]["validation_loss"]
    assert first > 2.3 and last < 2.15, (first, last)
    (event,) = ranks.events("optimizer")
    trained = sum(group["parameters"] for group in event["groups"])
    assert event["frozen"] > 0 and trained < event["frozen"]  # of rank 0's part


def test_script_adapts_a_model_of_transformers(tmp_path: Path, base: Path) -> None:
    args = ("--base", str(base), "--steps", "12", "--lr", "8e-3", "--checkpoint-every", "12")
    run = make_run(tmp_path / "run", FSDP, 2, script=(ROOT / "examples" / "adapt_script.py", args))
    text = start(run, FSDP).expect(0).logs()
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): ([\d.]+) nats per byte", text)}
    assert losses.keys() == {0, 12} and losses[12] < losses[0] - 0.15, losses
    result = export_checkpoint(ExportRequest(inspect.find_checkpoint(run.checkpoints), tmp_path / "adapter"))
    assert result.tensors == 28
    document, files = adapter_files.read_adapter(tmp_path / "adapter")
    assert document["base_model_name_or_path"] == str(base)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in files.tensors
