"""The model of a completed run as files for a tracker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from clustertrain import fsio
from clustertrain.checkpoint.offline import inspect
from clustertrain.checkpoint.offline.export import ExportRequest, export_checkpoint
from clustertrain.run.run_dir import RunDir


class ModelFiles(msgspec.Struct, frozen=True):
    """An exported model."""

    folder: Path
    """Safetensors, with a ``config.json`` if transformers has such a model."""
    step: int


@contextmanager
def exported_model(run: RunDir, which: Literal["best", "last"], tracker: str) -> Iterator[ModelFiles]:
    """Export the model of the run's best or last checkpoint for the block, for one tracker.

    Raises:
        NotFound: there is no such checkpoint.
        CheckpointError: it cannot be exported.
    """
    root = run.checkpoints
    checkpoint = inspect.find_best(root) if which == "best" else inspect.find_checkpoint(root)
    folder = run.tracking / f"model-{tracker}"
    fsio.make_folder(run.tracking)
    try:
        step = export_checkpoint(ExportRequest(checkpoint, folder, force=True)).step
        yield ModelFiles(folder, step)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
