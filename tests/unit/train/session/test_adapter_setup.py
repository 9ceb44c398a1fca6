"""Adapters of a script: what its checkpoints record, what an export reads, and what contradicts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import clustertrain as ct
from clustertrain.checkpoint.format import adapter_files
from clustertrain.checkpoint.format.manifest import read_manifest
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint
from clustertrain.errors import ConfigError, UsageError


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def train(folder: Path, steps: int, *, base: Path | None = None, lr: float = 0.1, **adapter: Any) -> None:
    """Train adapters for ``steps`` steps in all."""
    with ct.session(checkpoint_dir=folder) as session:
        model = net()
        if base is not None:
            session.load_pretrained(model, base)
        session.add_adapters(model, ["0", "2"], **{"rank": 2, "alpha": 4.0, **adapter})
        model = session.parallelize(model)
        optimizer = session.optimizer(torch.optim.AdamW, lr=lr)
        for _ in session.steps(steps, {"model": model, "optimizer": optimizer}, checkpoint_every=1):
            session.train_step((torch.ones(3, 6), torch.ones(3, 4)), loss)


def export(folder: Path, output: Path, **options: Any) -> dict[str, torch.Tensor]:
    export_checkpoint(ExportRequest(inspect.find_checkpoint(folder), output, **options))
    return load_file(next(output.glob("*.safetensors")))


@pytest.mark.long
def test_base_never_changes_and_merged_weights_are_those_of_the_adapters(tmp_path: Path) -> None:
    train(tmp_path / "run", 3)
    merged = export(tmp_path / "run", tmp_path / "merged", merge=True)
    adapter = export(tmp_path / "run", tmp_path / "adapter")
    base = net().state_dict()
    a, b = (adapter[adapter_files.peft_name("2", f"lora_{x}")] for x in "AB")
    torch.testing.assert_close(merged["2.weight"], base["2.weight"] + 2 * b @ a)
    assert torch.equal(merged["2.bias"], base["2.bias"]) and b.abs().max() > 0.1


@pytest.mark.long
def test_resume_keeps_the_hash_of_the_base_and_names_other_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "base.safetensors"
    save_file(net().state_dict(), base)
    train(tmp_path / "run", 1, base=base)
    first = read_manifest(inspect.find_checkpoint(tmp_path / "run")).about["adapter"]
    assert first["base"] == str(base) and len(first["base_sha256"]) == 64
    base.unlink()
    train(tmp_path / "run", 2, base=base, alpha=6.0)
    second = read_manifest(inspect.find_checkpoint(tmp_path / "run")).about["adapter"]
    assert (second["base_sha256"], second["spec"]["alpha"]) == (first["base_sha256"], 6.0)
    assert "adapter alpha 4.0 then, 6.0 now" in caplog.text


@pytest.mark.long
def test_adapter_to_start_from_is_refused_with_another_base(tmp_path: Path) -> None:
    base, changed = tmp_path / "base.safetensors", tmp_path / "changed.safetensors"
    weights = net().state_dict()
    save_file(weights, base)
    save_file({**weights, "2.bias": weights["2.bias"] + 1e-3}, changed)
    train(tmp_path / "run", 2, base=base)
    expected = export(tmp_path / "run", tmp_path / "adapter")
    train(tmp_path / "again", 1, lr=0.0, base=base, init=str(tmp_path / "adapter"))
    actual = export(tmp_path / "again", tmp_path / "same")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    with pytest.raises(ConfigError, match=r"was trained on a different base"):
        train(tmp_path / "other", 1, base=changed, init=str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"r = 2 in adapter_config.json, but 3 here"):
        train(tmp_path / "other", 1, base=base, init=str(tmp_path / "adapter"), rank=3)


@pytest.mark.parametrize("key", ["freeze", "unfreeze"])
def test_freezing_beside_adapters_is_refused(key: str) -> None:
    value: Any = ["0"] if key == "freeze" else [(2, ["0"])]
    with ct.session() as session, pytest.raises(ConfigError, match="freeze the whole model, but freeze or unfreeze"):
        session.parallelize(session.add_adapters(net(), ["0"], rank=2), **{key: value})


def test_adapters_after_parallelize_are_refused() -> None:
    with ct.session() as session:
        model = session.parallelize(net())
        with pytest.raises(UsageError, match="parallelized already"):
            session.add_adapters(model, ["0"])
