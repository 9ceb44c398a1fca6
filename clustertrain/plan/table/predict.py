"""Predictions for the rows of a table of configurations: ``plan --table``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from clustertrain.errors import ConfigError
from clustertrain.plan.cost import compute, memory, step_time
from clustertrain.plan.cost.compute import FITTED_CONSTANTS, CostConstants
from clustertrain.plan.cost.memory import GIB, MemoryEstimate
from clustertrain.plan.cost.model_shape import attention_flops, matmul_parameters
from clustertrain.plan.cost.step_time import StepEstimate
from clustertrain.plan.search import layouts
from clustertrain.plan.search.problem import SearchConstraints, SearchProblem
from clustertrain.plan.table import assumptions, rows
from clustertrain.plan.table.cells import parse_number
from clustertrain.plan.table.rows import TableRow

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# Notes that mark FLOPs as hardware FLOPs, including recomputation.
_HARDWARE_FLOPS = re.compile(r"include recompute|recompute counted|are hardware|hardware FLOPs|\(hardware")
LONG_SEQ_LEN = 16_384  # tokens; shorter sequences are not split
CALIBRATION_NOTE = "sets the factor of its source"
REQUIRED_COLUMNS = ("gpu", "seq", "n_gpus")  # other columns may be missing
COLUMNS = ("pred_tokens_per_s_per_gpu", "pred_tflops_per_gpu", "pred_peak_mem_gib", "pred_fits", "pred_note")


@dataclass(frozen=True, kw_only=True)
class RowPrediction:
    """Prediction for one row."""

    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    peak_mem_gib: float | None = None
    """Counted as the row's note states: allocated, reserved (default), or by nvidia-smi."""
    fits: bool | None = None
    """The memory of the whole device suffices."""
    note: str = ""
    """Values used for empty cells, or why there is no prediction."""

    def values(self) -> tuple[float | bool | str | None, ...]:
        """Return the values in the order of ``COLUMNS``."""
        return self.tokens_per_s_per_gpu, self.tflops_per_gpu, self.peak_mem_gib, self.fits, self.note

    def cells(self) -> tuple[str, ...]:
        """Return the values as text, None as an empty cell."""
        numbers = (self.tokens_per_s_per_gpu, self.tflops_per_gpu, self.peak_mem_gib)
        fits = "" if self.fits is None else "yes" if self.fits else "no"
        return (*("" if n is None else f"{n:.4g}" if n < 1000 else f"{n:.0f}" for n in numbers), fits, self.note)


def predict(table: Sequence[Mapping[str, str]], *, calibrate: bool = False) -> list[RowPrediction]:
    """Return one prediction per row; an invalid row gets a note instead of an exception.

    Args:
        calibrate: for each source, the middle one of the rows with a measured throughput sets a factor for the others,
            as one measured run does for a cluster. Its prediction then equals its measurement, which its note states.
    """
    predictions = [_predict_or_note(row) for row in table]
    if not calibrate:
        return predictions
    rows_by_source: dict[str, list[int]] = {}
    for index, (row, prediction) in enumerate(zip(table, predictions, strict=True)):
        if _measured_ratio(row, prediction) is not None:
            rows_by_source.setdefault(row.get("source") or "", []).append(index)
    calibration_rows = {source: indices[len(indices) // 2] for source, indices in rows_by_source.items()}
    factors = {
        source: _measured_ratio(table[index], predictions[index]) or 1.0 for source, index in calibration_rows.items()
    }
    for index in calibration_rows.values():
        predictions[index] = replace(
            predictions[index], note="; ".join([*filter(None, [predictions[index].note]), CALIBRATION_NOTE])
        )
    return [_scale(p, factors.get(row.get("source") or "", 1.0)) for row, p in zip(table, predictions, strict=True)]


def _predict_or_note(row: Mapping[str, str]) -> RowPrediction:
    try:
        return predict_row(row)
    except ConfigError as e:
        return RowPrediction(note=f"not predicted: {e}")


def _measured_ratio(row: Mapping[str, str], prediction: RowPrediction) -> float | None:
    """Return measured over predicted throughput, from the first of tokens, TFLOP/s and MFU in the row; None without."""
    try:
        measured, predicted = compare_throughput(row, prediction)
    except ConfigError:
        return None
    return measured / predicted if measured and predicted else None


def compare_throughput(row: Mapping[str, str], prediction: RowPrediction) -> tuple[float | None, float | None]:
    """Return (measured, predicted) in tokens/s, otherwise TFLOP/s, otherwise TFLOP/s from an MFU of the 16-bit peak.

    Raises:
        ConfigError: a cell is not a number.
    """
    if tokens := parse_number(row, "tokens_per_s_per_gpu"):
        return tokens, prediction.tokens_per_s_per_gpu
    if tflops := parse_number(row, "tflops_per_gpu"):
        return tflops, prediction.tflops_per_gpu
    if mfu := parse_number(row, "mfu_pct"):
        return mfu / 100 * rows.find_row_gpu(row).tflops, prediction.tflops_per_gpu
    return None, None


def _scale(prediction: RowPrediction, factor: float) -> RowPrediction:
    if factor == 1.0 or prediction.tokens_per_s_per_gpu is None or prediction.tflops_per_gpu is None:
        return prediction
    return replace(
        prediction,
        tokens_per_s_per_gpu=prediction.tokens_per_s_per_gpu * factor,
        tflops_per_gpu=prediction.tflops_per_gpu * factor,
    )


def predict_row(row: Mapping[str, str], constants: CostConstants = FITTED_CONSTANTS) -> RowPrediction:
    """Return the prediction for a row. Raise ConfigError if the row is invalid."""
    parsed = rows.parse_row(row)
    filled, notes = _fill_defaults(parsed, constants)
    step, estimate = estimate_row_step(filled, constants), estimate_row_memory(filled)
    rate = tokens_per_s(filled, step)
    note = row.get("note") or ""
    return RowPrediction(
        tokens_per_s_per_gpu=rate,
        tflops_per_gpu=rate * flops_per_token(filled, note) / 1e12,
        peak_mem_gib=peak_gib(estimate, note),
        fits=estimate.fits,
        note="; ".join(notes),
    )


def complete_row(row: Mapping[str, str]) -> TableRow:
    """Return the parsed row with defaults for unstated values. Raise ConfigError as :func:`predict_row`."""
    return _fill_defaults(rows.parse_row(row), FITTED_CONSTANTS)[0]


def estimate_row_step(row: TableRow, constants: CostConstants = FITTED_CONSTANTS) -> StepEstimate:
    """Return the predicted step time of a row."""
    layout = msgspec.structs.replace(row.layout, activation_checkpointing=row.activation_checkpointing or "none")
    machine = step_time.Machine(row.network, compute.build_rates(row.gpu, row.precision, constants))
    return step_time.estimate_step(row.shape, layout, row.build_pass_config(), row.framework, machine, constants)


def tokens_per_s(row: TableRow, step: StepEstimate) -> float:
    """Return the tokens/s of one GPU."""
    config = row.build_pass_config()
    tokens = config.grad_accum * config.micro_batch * row.seq_len * row.layout.data_parallel
    return tokens / step.step_s / row.layout.world_size


def estimate_row_memory(row: TableRow) -> MemoryEstimate:
    """Return the predicted memory of a row."""
    layout = msgspec.structs.replace(row.layout, activation_checkpointing=row.activation_checkpointing or "none")
    shape = replace(row.shape, dropout=row.framework.dropout)
    return memory.estimate_memory(shape, layout, row.build_pass_config(), row.capacity_gib, row.framework)


def peak_gib(estimate: MemoryEstimate, note: str) -> float:
    """Return the peak as the row's note counts it: whole device, allocated, or reserved (default)."""
    device_gib = estimate.peak_gib or 0.0
    if "nvidia-smi" in note:
        return device_gib
    if "allocated" in note and "reserved" not in note:
        return device_gib - (estimate.overhead_gib or 0.0)
    return device_gib - memory.CONTEXT_BYTES / GIB


def flops_per_token(row: TableRow, note: str) -> float:
    """Return the FLOPs per token as the row's note counts them, by default as the framework's tables do.

    Model FLOPs: 6 per matmul parameter, and attention's scores in full or, if "causal", half. Hardware FLOPs: also the
    recomputed forward pass and scores. "8N": eight per parameter, without attention.
    """
    if "8N" in note:
        return 8.0 * row.shape.parameters()
    causal = row.framework.counts_causal if "causal" not in note else "non-causal" not in note
    attention = attention_flops(row.shape, row.seq_len, causal=causal)
    forward_and_backward = 6.0 * matmul_parameters(row.shape) + attention
    if not _HARDWARE_FLOPS.search(note) or row.activation_checkpointing in ("", "none"):
        return forward_and_backward
    if row.activation_checkpointing == "full":
        blocks = 6.0 * (matmul_parameters(row.shape) - row.shape.vocab_size * row.shape.dim) + attention
        return forward_and_backward + blocks / 3.0
    return forward_and_backward + attention / 3.0


def _fill_defaults(row: TableRow, constants: CostConstants) -> tuple[TableRow, list[str]]:
    """Return the row with unstated values filled in, and notes on them."""
    notes = [row.framework_note] if row.framework_note else []
    if not row.has_layout and row.gpus:
        row, note = _with_layout(row)
        notes.append(note)
    if not row.gpus and row.layout.is_sharded:
        row = _with_gpus(row)
        notes.append(f"n_gpus is not stated: {row.layout.world_size}, the fewest on 1, 2, 4 ... nodes on which it fits")
    elif not row.gpus:
        notes.append(f"n_gpus is not stated: {row.layout.world_size}, one replica")
    trial = replace(
        row, micro_batch=max(1, row.micro_batch), activation_checkpointing=row.activation_checkpointing or "none"
    )
    assumed, changes = assumptions.assume_until_it_fits(trial, _fits)
    notes += [*changes, *assumptions.note_usual_settings(assumed, changes)]
    row = replace(assumed, micro_batch=row.micro_batch)
    if not row.micro_batch:
        row, note = _with_micro_batch(row, constants)
        notes.append(note)
    return row, notes


def _with_layout(row: TableRow) -> tuple[TableRow, str]:
    """Return the row with a layout, and a note. Raise ConfigError if the model fits in no layout."""
    problem = SearchProblem(
        model=row.shape,
        world_size=row.gpus,
        gpus_per_node=row.gpus_per_node,
        seq_len=row.seq_len,
        global_batch=row.global_batch or row.gpus * max(1, row.micro_batch),
        precision=row.build_pass_config().precision,
        parallel=rows.RING_ATTENTION,
        machine=step_time.Machine(row.network, compute.build_rates(row.gpu, row.precision)),
        framework=row.framework,
        limit_gib=memory.SAFE_FRACTION * row.capacity_gib,
        constraints=SearchConstraints(
            micro_batch=row.micro_batch,
            activation_checkpointing=row.activation_checkpointing if row.activation_checkpointing == "full" else "",
            cp=1 if row.seq_len <= LONG_SEQ_LEN else 0,
        ),
    )
    best = layouts.search(problem).best
    if best is None:
        raise ConfigError(f"the layout is not stated, and none of {row.gpus} GPUs has room for the model")
    filled = replace(
        row,
        layout=best.layout,
        micro_batch=best.config.micro_batch,
        activation_checkpointing=row.activation_checkpointing or best.layout.activation_checkpointing,
        global_batch=problem.global_batch,
    )
    return filled, f"the layout is not stated: {best.layout.describe()}, what a search finds"


def _with_gpus(row: TableRow) -> TableRow:
    model_ranks = row.layout.world_size // row.layout.dp_shard
    nodes = 1
    while True:
        shard = max(1, nodes * row.gpus_per_node // model_ranks)
        scaled = replace(row, layout=msgspec.structs.replace(row.layout, strategy="fsdp", dp_shard=shard))
        smallest = replace(
            scaled, micro_batch=row.micro_batch or 1, activation_checkpointing=row.activation_checkpointing or "full"
        )
        if _fits(smallest) or nodes >= 4096:
            return scaled
        nodes *= 2


def _with_micro_batch(row: TableRow, constants: CostConstants) -> tuple[TableRow, str]:
    if row.global_batch:
        rank_batch = max(1, row.global_batch // row.layout.data_parallel)
        candidates = [replace(row, micro_batch=m) for m in MICRO_BATCHES if rank_batch % m == 0]
    else:
        candidates = [replace(row, micro_batch=m) for m in MICRO_BATCHES]
    fitting = [r for r in candidates if _fits(r)] or candidates[:1]
    rate: Callable[[TableRow], float] = lambda r: tokens_per_s(r, estimate_row_step(r, constants))  # noqa: E731
    best = max(fitting, key=rate)
    return best, f"micro_bs is not stated: {best.micro_batch}, the fastest that fits"


def _fits(row: TableRow) -> bool:
    return estimate_row_memory(row).fits is True
