"""Weights of another run as the start of a run: which checkpoint a name stands for, and what it contains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertrain import reading, settings
from clustertrain.checkpoint.format.manifest import parse_step, read_manifest
from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.offline import inspect
from clustertrain.errors import NotFound
from clustertrain.run.lookup import resolve_run

BEST = "best"


def resolve_weights(name: str, cwd: Path) -> Path:
    """Return the file or folder with the weights that ``name`` stands for.

    A path that exists stands for itself, except that a run's folder or its folder of checkpoints stands for the newest
    committed checkpoint. Otherwise ``name`` is RUN, RUN@STEP or RUN@best.

    Raises:
        NotFound: there is neither such a path nor such a run, or the run has no such checkpoint.
        AmbiguousName: several runs match.
        PermissionDenied: the run belongs to another user and is not shared.
    """
    path = cwd / settings.expand_user_path(name, "the weights")
    if path.exists():
        return _find_in_folder(path)
    run_name, _, selector = name.rpartition("@") if "@" in name else (name, "", "")
    if "/" in name or (selector and selector != BEST and not reading.is_unsigned_int(selector)):
        raise NotFound(f"{name}: no such file or folder", fix="check the path; this machine and every node must see it")
    try:
        root = resolve_run(run_name).checkpoints
    except NotFound as e:
        raise NotFound(
            f"{name}: no such file or folder, and no such run", fix="check the path, or see `clustertrain list`"
        ) from e
    if selector == BEST:
        return inspect.find_best(root)
    return inspect.find_checkpoint(root, int(selector) if selector else None)


def _find_in_folder(path: Path) -> Path:
    if not path.is_dir() or parse_step(path) is not None:
        return path
    for root in (path / "checkpoints", path):
        if (root is path or (path / "spec.toml").is_file()) and rollback.list_valid_folders(root):
            return inspect.find_checkpoint(root)
    return path


def read_model_table(folder: Path) -> Mapping[str, Any]:
    """Return the ``[model]`` table of the recipe that saved the checkpoint ``folder``; empty if it had none.

    Raises:
        CheckpointError: the checkpoint is not committed, or damaged.
    """
    recipe = read_manifest(folder).about.get("recipe")
    table = recipe.get("model") if isinstance(recipe, dict) else None
    return table if isinstance(table, dict) else {}
