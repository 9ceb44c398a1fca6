"""Checkpoints for tests of their readers, saved by one process with the real manager."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.storage import RemoteFolder
from clustertrain.checkpoint.manager import CheckpointConfig, CheckpointManager
from clustertrain.config.parsing.documents import build
from clustertrain.config.parsing.presets import apply_preset
from clustertrain.config.recipe import Recipe
from clustertrain.train.models.decoder import Decoder


def save(
    root: Path,
    step: int,
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    manager = CheckpointManager(
        root,
        Ranks(),
        CheckpointConfig(
            attempt="1",
            layout={"strategy": "single"},
            policy=RetentionPolicy(keep=100),
            async_save=False,
            about={**({"recipe": msgspec.to_builtins(recipe)} if recipe else {}), **(about or {})},
        ),
    )
    saved = manager.save(step, state, rank_state)
    assert saved is not None
    return saved.path


def change_index(folder: Path, **fields: Any) -> None:
    """Replace ``fields`` of the manifest."""
    index.write_manifest(folder, msgspec.structs.replace(index.read_manifest(folder), **fields))


def recipe_of(**model: Any) -> Recipe:
    document = apply_preset({"model": {"preset": "tiny", **model}})
    return build(document, Recipe, "a test")


def decoder(recipe: Recipe, seed: int = 0) -> Decoder:
    """Return a decoder without equal values, so that a swapped norm or head is noticed."""
    torch.manual_seed(seed)
    model = Decoder(recipe.model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.07)
    return model


def make_run(folder: Path, model: nn.Module, steps: tuple[int, ...], **sizes: Any) -> Path:
    """Return a run folder with checkpoints of ``model`` and of an optimizer that took one step before each."""
    folder.mkdir(parents=True)
    (folder / "spec.toml").touch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in steps:
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "data": {"position": step * 10}}
        save(folder / "checkpoints", step, state, {"random": torch.get_rng_state()}, recipe_of(**sizes))
    return folder


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value), "note": value}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def steps(root: Path | RemoteFolder) -> list[int | None]:
    return [index.parse_step(p) for p in index.list_checkpoint_folders(root)]
