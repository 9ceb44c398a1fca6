"""Documents about several plans."""

from __future__ import annotations

import msgspec

from clustertrain.plan.search.micro_batch import Trial


class PlanOfSize(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one number of GPUs; null where nothing is predicted."""

    gpus: int
    """Number of GPUs."""
    layout: str | None = None
    """The layout in words."""
    step_s: float | None = None
    """Predicted time per optimizer step, seconds."""
    tokens_per_s: float | None = None
    """Predicted tokens per second of all GPUs."""
    efficiency: float | None = None
    """Rate per GPU relative to the smallest size."""
    peak_gib: float | None = None
    """Predicted memory of the fullest rank, GiB."""
    fits: bool | None = None
    """The plan fits into the memory of a GPU."""
    reason: str = ""
    """Why there is no plan, or what would make it fit."""


class PlansBySize(msgspec.Struct, frozen=True, kw_only=True):
    """Plans for several numbers of GPUs with the same global batch."""

    global_batch: int
    """Samples per optimizer step."""
    sizes: tuple[PlanOfSize, ...]
    """One entry per number of GPUs, in ascending order."""


class PredictedRow(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one row of a table. A figure is null if it is not predicted."""

    pred_tokens_per_s_per_gpu: float | None
    """Tokens per second and GPU."""
    pred_tflops_per_gpu: float | None
    """TFLOP/s per GPU, with recomputation where the row's notes count it."""
    pred_peak_mem_gib: float | None
    """Peak memory of a rank, GiB, counted as the row's note states: allocated, reserved (default), or by nvidia-smi."""
    pred_fits: bool | None
    """The memory of the whole device suffices."""
    pred_note: str
    """Values used for empty cells, or why there is no prediction."""


class PredictedTable(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions for a table of configurations."""

    rows: tuple[PredictedRow, ...]
    """One entry per row of the table, in its order."""
    predicted: int
    """Rows with a prediction."""
    not_predicted: tuple[int, ...]
    """Numbers of the other rows, from 1."""


class TrialEntry(Trial, frozen=True, kw_only=True):
    """One tried micro-batch. Figures are null if it ran out of memory."""

    fits: bool
    """The outcome is `fits`."""


class MicroBatchSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The largest micro-batch, found by training a few steps."""

    recommended: int | None
    """The micro-batch to use; null if none fits."""
    assignment: str | None
    """The recommendation as an argument of `--set`; null if none fits."""
    represents: str
    """Which job the trials stand for."""
    trials: tuple[TrialEntry, ...]
    """The micro-batches that were tried, in the order of the trials."""
    error: str | None
    """The error, other than a lack of memory, that ended the search; null without one."""
