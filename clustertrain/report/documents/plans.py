"""Documents about several plans."""

from __future__ import annotations

import msgspec

from clustertrain.plan.search.micro_batch import Trial


class PlanOfSize(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one number of GPUs; null where nothing is predicted."""

    gpus: int
    layout: str | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    """Of all GPUs."""
    efficiency: float | None = None
    """Rate per GPU relative to the smallest size."""
    peak_gib: float | None = None
    """Memory of the fullest rank."""
    fits: bool | None = None
    reason: str = ""
    """Why there is no plan, or what would make it fit."""


class PlansBySize(msgspec.Struct, frozen=True, kw_only=True):
    """Plans for several numbers of GPUs with the same global batch."""

    global_batch: int
    """Samples per optimizer step."""
    sizes: tuple[PlanOfSize, ...]


class PredictedRow(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one row of a table."""

    pred_tokens_per_s_per_gpu: float | None
    pred_tflops_per_gpu: float | None
    pred_peak_mem_gib: float | None
    """Counted as the row's note states: allocated, reserved (default), or by nvidia-smi."""
    pred_fits: bool | None
    """The memory of the whole device suffices."""
    pred_note: str
    """Values used for empty cells, or why there is no prediction."""


class PredictedTable(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions for a table of configurations."""

    rows: tuple[PredictedRow, ...]
    predicted: int
    """Rows with a prediction."""
    not_predicted: tuple[int, ...]
    """Numbers of the other rows, from 1."""


class TrialEntry(Trial, frozen=True, kw_only=True):
    """One tried micro-batch."""

    fits: bool


class MicroBatchSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The largest micro-batch, found by training a few steps."""

    recommended: int | None
    """The micro-batch to use; null if none fits."""
    assignment: str | None
    """The recommendation as an argument of `--set`."""
    represents: str
    """Which job the trials stand for."""
    trials: tuple[TrialEntry, ...]
    error: str | None
    """The error, other than a lack of memory, that ended the search."""
