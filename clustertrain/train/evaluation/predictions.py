"""Predictions of an evaluation in the run folder: one line per sample, and a confusion matrix of a classifier."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from clustertrain import fsio
from clustertrain.train.evaluation.dataset_pass import EvalBatch
from clustertrain.train.evaluation.metrics import classes_last, to_full_tensor

log = logging.getLogger(__name__)

MAX_VALUES = 1024  # of one sample; longer predictions and targets are cut
MAX_CLASSES = 200  # of a confusion matrix
CONFUSION_FILE = "confusion.json"


class PredictionRecorder:
    """The predictions of the first samples of one evaluation, on one rank.

    Outputs (batch, …, classes) with class targets (batch, …) give the most probable class of each target. Any other
    tensor is recorded as it is. Outputs that are no tensor are not recorded.
    """

    def __init__(self, samples: int, *, ignore_index: int, counts: bool, confusion: bool) -> None:
        """
        Args:
            samples: dataset indices below this are recorded.
            ignore_index: class target that is not counted.
            counts: False on a rank that duplicates another rank's results, and only takes part in collectives.
            confusion: count a confusion matrix. Every rank must see outputs then, unlike in a pipeline.
        """
        self._samples, self._ignore_index, self._counts = samples, ignore_index, counts
        self._lines: list[str] = []
        self._has_confusion = confusion
        self._confusion: torch.Tensor | None = None  # (classes, classes) int64: targets by predictions
        self._is_warned = False

    def add(self, batch: EvalBatch, output: Any, target: Any) -> None:
        """Record the samples of ``batch`` that count, the first ones in ``output`` and ``target``."""
        if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
            self._warn(f"outputs of type {type(output).__name__} with targets of type {type(target).__name__}")
            return
        output = to_full_tensor(output)
        count = len(batch.sample_indices)
        logits = classes_last(output, target)
        predicted = logits.argmax(-1) if logits is not None else output
        if self._has_confusion and logits is not None and target.dim() == 1 and logits.shape[-1] <= MAX_CLASSES:
            self._add_confusion(target[:count], predicted[:count], logits.shape[-1])
        recorded = [i for i, sample in enumerate(batch.sample_indices) if sample < self._samples]
        if not recorded or not self._counts:
            return
        confidence = logits[recorded].float().softmax(-1).amax(-1) if logits is not None and target.dim() == 1 else None
        columns = {"target": target[recorded], "prediction": predicted[recorded], "confidence": confidence}
        values = {name: _to_rows(column) for name, column in columns.items() if column is not None}
        self._lines += [
            json.dumps({"sample": batch.sample_indices[i], **{name: rows[n] for name, rows in values.items()}})
            for n, i in enumerate(recorded)
        ]

    def _add_confusion(self, target: torch.Tensor, predicted: torch.Tensor, classes: int) -> None:
        if self._confusion is None:
            self._confusion = torch.zeros(classes, classes, dtype=torch.int64, device=target.device)
        if self._counts:
            # Neither a mask nor bincount, whose sizes the host would have to wait for.
            counted = target != self._ignore_index
            cells = torch.where(counted, target * classes + predicted, 0)
            self._confusion.view(-1).index_add_(0, cells, counted.long())

    def reduce(self) -> None:
        """Sum the confusion matrices. Collective over all ranks, each of which has seen outputs of the same form."""
        if self._confusion is not None and dist.is_initialized():
            dist.all_reduce(self._confusion)

    def write(self, folder: Path, rank: int, keep: Collection[int], step: int) -> bool:
        """Write this rank's lines below ``folder``; return whether there was anything to write.

        Rank 0 also writes the confusion matrix, and deletes the predictions of steps other than ``step`` and ``keep``.
        """
        target_folder = step_folder(folder, step)
        if self._lines:
            fsio.make_folder(target_folder)
            fsio.write_text(target_folder / f"rank-{rank:05d}.jsonl", "\n".join(self._lines) + "\n")
        if rank == 0 and self._confusion is not None:
            fsio.make_folder(target_folder)
            rows = ",\n  ".join(map(json.dumps, self._confusion.tolist()))  # a line per target, to be read by people
            text = f'{{"rows": "targets", "columns": "predictions", "counts": [\n  {rows}\n]}}\n'
            fsio.write_text(target_folder / CONFUSION_FILE, text)
        if rank == 0 and folder.is_dir():
            retained = {step_folder(folder, n).name for n in (*keep, step)}
            for old in folder.iterdir():
                if old.name not in retained:
                    shutil.rmtree(old, ignore_errors=True)
        return bool(self._lines) or self._confusion is not None

    def _warn(self, reason: str) -> None:
        if not self._is_warned and self._counts:
            log.warning("evaluation.save_predictions: %s are not recorded, only tensors", reason)
        self._is_warned = True


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder with the predictions of the evaluation after ``step`` steps."""
    return folder / f"step-{step:08d}"


def _to_rows(column: torch.Tensor) -> list[Any]:
    """Return the values of each sample: a number, or a list of at most :data:`MAX_VALUES`."""
    flat = column.flatten(1)[:, :MAX_VALUES] if column.dim() > 1 else column
    rows: list[Any] = flat.tolist()
    if flat.is_floating_point():
        return list(pytree.tree_map(_round, rows))
    return rows


def _round(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
