"""Predictions for the rows of a table of configurations: ``plan --table``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from clustertrain.errors import ConfigError
from clustertrain.plan.cost import compute, memory, step_time
from clustertrain.plan.cost.compute import FITTED, Constants
from clustertrain.plan.cost.memory import GIB, Memory
from clustertrain.plan.cost.model_shape import attention_flops, matmul_parameters
from clustertrain.plan.cost.step_time import Step
from clustertrain.plan.search import layouts
from clustertrain.plan.table import rows
from clustertrain.plan.table.rows import Row

# From the least that is redone; what a row does not state takes the first that fits.
RECOMPUTES = ("none", "selective_attn", "selective_op", "full")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# What a note says where its FLOPs are those that the hardware did, recomputation included.
_HARDWARE = re.compile(r"include recompute|recompute counted|are hardware|hardware FLOPs|\(hardware")
LONG = 16_384  # tokens: up to here nobody splits sequences
CALIBRATES = "sets the factor of its source"
NEEDED = ("gpu", "seq", "n_gpus")  # every other column may be missing, as its cells may be empty
COLUMNS = ("pred_tokens_per_s_per_gpu", "pred_tflops_per_gpu", "pred_peak_mem_gib", "pred_fits", "pred_note")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one row. ``peak_mem_gib`` is counted as the row's own note says: by the allocator, reserved (where nothing is
    said), or by nvidia-smi. ``fits``: what the whole device needs is at most its memory. ``note``: what was taken for
    an empty cell, or why there is no prediction."""

    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    peak_mem_gib: float | None = None
    fits: bool | None = None
    note: str = ""

    def values(self) -> tuple[float | bool | str | None, ...]:
        """In the order of ``COLUMNS``."""
        return self.tokens_per_s_per_gpu, self.tflops_per_gpu, self.peak_mem_gib, self.fits, self.note

    def cells(self) -> tuple[str, ...]:
        """The same as text; an empty cell where there is nothing."""
        numbers = (self.tokens_per_s_per_gpu, self.tflops_per_gpu, self.peak_mem_gib)
        fits = "" if self.fits is None else "yes" if self.fits else "no"
        return (*("" if n is None else f"{n:.4g}" if n < 1000 else f"{n:.0f}" for n in numbers), fits, self.note)


def predict(table: Sequence[Mapping[str, str]], *, calibrate: bool = False) -> list[Prediction]:
    """One prediction a row, in the order of the rows; never an exception for a bad row.

    ``calibrate``: of the rows of a source that have a measured throughput the middle one sets a factor for the others,
    as one measured run does for a cluster. Its own prediction is then its measurement, and its note says so.
    """
    found = [_or_note(row) for row in table]
    if not calibrate:
        return found
    measured: dict[str, list[int]] = {}
    for at, (row, prediction) in enumerate(zip(table, found, strict=True)):
        if _measured_ratio(row, prediction) is not None:
            measured.setdefault(row.get("source") or "", []).append(at)
    setting = {source: rows_of[len(rows_of) // 2] for source, rows_of in measured.items()}
    factors = {source: _measured_ratio(table[at], found[at]) or 1.0 for source, at in setting.items()}
    for at in setting.values():
        found[at] = replace(found[at], note="; ".join([*filter(None, [found[at].note]), CALIBRATES]))
    return [_scaled(p, factors.get(row.get("source") or "", 1.0)) for row, p in zip(table, found, strict=True)]


def _or_note(row: Mapping[str, str]) -> Prediction:
    try:
        return of_row(row)
    except ConfigError as e:
        return Prediction(note=f"not predicted: {e}")


def _measured_ratio(row: Mapping[str, str], found: Prediction) -> float | None:
    """Measured over predicted throughput, from the first of tokens, TFLOP/s and MFU that the row has; None where it has
    neither, or what is no number."""
    try:
        measured, predicted = measured_throughput(row, found)
    except ConfigError:
        return None
    return measured / predicted if measured and predicted else None


def measured_throughput(row: Mapping[str, str], found: Prediction) -> tuple[float | None, float | None]:
    """(measured, predicted) in the row's own unit: tokens/s, else TFLOP/s, else TFLOP/s from an MFU of the 16-bit peak.

    Raises:
        ConfigError: a cell is no number.
    """
    if tokens := rows.number(row, "tokens_per_s_per_gpu"):
        return tokens, found.tokens_per_s_per_gpu
    if tflops := rows.number(row, "tflops_per_gpu"):
        return tflops, found.tflops_per_gpu
    if mfu := rows.number(row, "mfu_pct"):
        return mfu / 100 * rows.gpu_of(row).tflops, found.tflops_per_gpu
    return None, None


def _scaled(found: Prediction, factor: float) -> Prediction:
    if factor == 1.0 or found.tokens_per_s_per_gpu is None or found.tflops_per_gpu is None:
        return found
    return replace(
        found,
        tokens_per_s_per_gpu=found.tokens_per_s_per_gpu * factor,
        tflops_per_gpu=found.tflops_per_gpu * factor,
    )


def of_row(row: Mapping[str, str], constants: Constants = FITTED) -> Prediction:
    """Raises ConfigError where the row cannot be understood."""
    stated = rows.read(row)
    chosen, said = _filled(stated, constants)
    step, need = step_of(chosen, constants), memory_of(chosen)
    rate = tokens_per_s(chosen, step)
    note = row.get("note") or ""
    return Prediction(
        tokens_per_s_per_gpu=rate,
        tflops_per_gpu=rate * flops_per_token(chosen, note) / 1e12,
        peak_mem_gib=peak_gib(need, note),
        fits=need.fits,
        note="; ".join(said),
    )


def completed(row: Mapping[str, str]) -> Row:
    """The row with defaults for what it leaves open. Raises ConfigError as :func:`of_row`."""
    return _filled(rows.read(row), FITTED)[0]


def step_of(row: Row, constants: Constants = FITTED) -> Step:
    layout = msgspec.structs.replace(row.layout, activation_checkpointing=row.recompute or "none")
    machine = step_time.Machine(row.network, compute.rates(row.gpu, row.precision, constants))
    return step_time.of_step(row.shape, layout, row.pass_of(), row.stack, machine, constants)


def tokens_per_s(row: Row, step: Step) -> float:
    """Of one GPU."""
    run = row.pass_of()
    tokens = run.grad_accum * run.micro_batch * row.seq_len * row.layout.data_parallel
    return tokens / step.step_s / row.layout.world_size


def memory_of(row: Row) -> Memory:
    layout = msgspec.structs.replace(row.layout, activation_checkpointing=row.recompute or "none")
    shape = replace(row.shape, dropout=row.stack.dropout)
    return memory.of_rank(shape, layout, row.pass_of(), row.capacity_gib, row.stack)


def peak_gib(need: Memory, note: str) -> float:
    """As a row's note counts it: the whole device, what the allocator has given out, or what it has reserved."""
    device = need.peak_gib or 0.0
    if "nvidia-smi" in note:
        return device
    if "allocated" in note and "reserved" not in note:
        return device - (need.overhead_gib or 0.0)
    return device - memory.CONTEXT_BYTES / GIB


def flops_per_token(row: Row, note: str) -> float:
    """As the row's note counts them; where it says nothing, as the framework's own tables do.

    The model's: 6 a parameter of a matmul, and attention's scores in full or, where "causal", their lower half. The
    hardware's: forward pass and scores again where they are recomputed; "8N": eight a parameter, attention not counted.
    """
    if "8N" in note:
        return 8.0 * row.shape.parameters()
    causal = row.stack.counts_causal if "causal" not in note else "non-causal" not in note
    attention = attention_flops(row.shape, row.seq_len, causal=causal)
    forward_and_backward = 6.0 * matmul_parameters(row.shape) + attention
    if not _HARDWARE.search(note) or row.recompute in ("", "none"):
        return forward_and_backward
    if row.recompute == "full":
        blocks = 6.0 * (matmul_parameters(row.shape) - row.shape.vocab_size * row.shape.dim) + attention
        return forward_and_backward + blocks / 3.0
    return forward_and_backward + attention / 3.0


def _filled(row: Row, constants: Constants) -> tuple[Row, list[str]]:
    """The row with what it leaves open, and the words for it."""
    said: list[str] = []
    if not row.stated and row.gpus:
        row, words = _with_layout(row)
        said.append(words)
    if not row.gpus and row.layout.sharded:
        row = _with_gpus(row)
        said.append(f"n_gpus is not stated: {row.layout.world_size}, the fewest on 1, 2, 4 ... nodes on which it fits")
    elif not row.gpus:
        said.append(f"n_gpus is not stated: {row.layout.world_size}, one replica")
    if not row.recompute:
        micro = replace(row, micro_batch=max(1, row.micro_batch))
        mode = next((m for m in RECOMPUTES if _fits(replace(micro, recompute=m))), "full")
        row = replace(row, recompute=mode)
        said.append(f"act_ckpt is not stated: {mode}, the least that fits")
    if not row.micro_batch:
        row, words = _with_micro_batch(row, constants)
        said.append(words)
    return row, said


def _with_layout(row: Row) -> tuple[Row, str]:
    """Raises ConfigError: no layout of so many GPUs has room for the model."""
    problem = layouts.Problem(
        model=row.shape,
        world=row.gpus,
        gpus_per_node=row.gpus_per_node,
        seq_len=row.seq_len,
        global_batch=row.global_batch or row.gpus * max(1, row.micro_batch),
        compute=row.pass_of().compute,
        parallel=rows.RING,
        machine=step_time.Machine(row.network, compute.rates(row.gpu, row.precision)),
        stack=row.stack,
        limit_gib=memory.SAFE_FRACTION * row.capacity_gib,
        wanted=layouts.Wanted(
            micro_batch=row.micro_batch,
            recompute=row.recompute if row.recompute == "full" else "",
            cp=1 if row.seq_len <= LONG else 0,
        ),
    )
    best = layouts.search(problem).best
    if best is None:
        raise ConfigError(f"the layout is not stated, and none of {row.gpus} GPUs has room for the model")
    chosen = replace(
        row,
        layout=best.layout,
        micro_batch=best.run.micro_batch,
        recompute=row.recompute or best.layout.activation_checkpointing,
        global_batch=problem.global_batch,
    )
    return chosen, f"the layout is not stated: {best.layout.words()}, what a search finds"


def _with_gpus(row: Row) -> Row:
    inner = row.layout.world_size // row.layout.dp_shard
    nodes = 1
    while True:
        shard = max(1, nodes * row.gpus_per_node // inner)
        larger = replace(row, layout=msgspec.structs.replace(row.layout, strategy="fsdp", dp_shard=shard))
        least = replace(larger, micro_batch=row.micro_batch or 1, recompute=row.recompute or "full")
        if _fits(least) or nodes >= 4096:
            return larger
        nodes *= 2


def _with_micro_batch(row: Row, constants: Constants) -> tuple[Row, str]:
    if row.global_batch:
        share = max(1, row.global_batch // row.layout.data_parallel)
        possible = [replace(row, micro_batch=m) for m in MICRO_BATCHES if share % m == 0]
    else:
        possible = [replace(row, micro_batch=m) for m in MICRO_BATCHES]
    fitting = [r for r in possible if _fits(r)] or possible[:1]
    rate: Callable[[Row], float] = lambda r: tokens_per_s(r, step_of(r, constants))  # noqa: E731
    best = max(fitting, key=rate)
    return best, f"micro_bs is not stated: {best.micro_batch}, the fastest that fits"


def _fits(row: Row) -> bool:
    return memory_of(row).fits is True
