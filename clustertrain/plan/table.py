"""Predictions for the rows of a table of configurations: ``plan --table``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import msgspec

from clustertrain.errors import ConfigError
from clustertrain.plan import compute, memory, rows, time
from clustertrain.plan.compute import FITTED, Constants
from clustertrain.plan.decoder import attention_flops, matmul_parameters
from clustertrain.plan.memory import GIB, Memory
from clustertrain.plan.rows import Row
from clustertrain.plan.time import Step

CONTEXT_GIB = memory.CONTEXT_BYTES / GIB
# From the least that is redone; what a row does not state takes the first that fits.
RECOMPUTES = ("none", "selective_attn", "selective_op", "full")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
COLUMNS = ("pred_tokens_per_s_per_gpu", "pred_tflops_per_gpu", "pred_peak_mem_gib", "pred_fits", "pred_note")


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of one row. ``peak_mem_gib`` is counted as the row's own note says: by the allocator, reserved (where nothing is
    said), or by nvidia-smi. ``fits``: what the whole device needs is at most its memory. ``note``: what was taken for
    an empty cell, or why there is no prediction."""

    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    peak_mem_gib: float | None = None
    fits: bool | None = None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        numbers = (self.tokens_per_s_per_gpu, self.tflops_per_gpu, self.peak_mem_gib)
        fits = "" if self.fits is None else "yes" if self.fits else "no"
        return (*("" if n is None else f"{n:.4g}" if n < 1000 else f"{n:.0f}" for n in numbers), fits, self.note)


def predict(table: list[Mapping[str, str]], constants: Constants = FITTED) -> Iterator[Prediction]:
    """One prediction a row, in the order of the rows; never an exception for a bad row."""
    for row in table:
        try:
            yield of_row(row, constants)
        except ConfigError as e:
            yield Prediction(note=f"not predicted: {e}")


def of_row(row: Mapping[str, str], constants: Constants = FITTED) -> Prediction:
    """Raises ConfigError where the row cannot be understood."""
    stated = rows.read(row)
    chosen, said = _filled(stated, constants)
    step, peak = step_of(chosen, constants), memory_of(chosen)
    rate = tokens_per_s(chosen, step)
    note = row.get("note") or ""
    return Prediction(
        tokens_per_s_per_gpu=rate,
        tflops_per_gpu=rate * flops_per_token(chosen, note) / 1e12,
        peak_mem_gib=peak_gib(chosen, peak, note),
        fits=device_gib(chosen, peak) <= chosen.capacity_gib,
        note="; ".join(said),
    )


def step_of(row: Row, constants: Constants = FITTED) -> Step:
    layout = msgspec.structs.replace(row.layout, activation_checkpointing=row.recompute or "none")
    machine = time.Machine(row.network, compute.rates(row.gpu, row.precision, constants))
    return time.of_step(row.shape, layout, row.pass_of(), row.stack, machine, constants)


def tokens_per_s(row: Row, step: Step) -> float:
    """Of one GPU."""
    run = row.pass_of()
    tokens = run.grad_accum * run.micro_batch * row.seq_len * row.layout.data_parallel
    return tokens / step.step_s / row.layout.world_size


def memory_of(row: Row) -> Memory:
    layout = msgspec.structs.replace(row.layout, activation_checkpointing=row.recompute or "none")
    shape = replace(row.shape, dropout=row.stack.dropout)
    return memory.of_rank(shape, layout, row.pass_of(), row.capacity_gib, row.stack)


def reserved_gib(row: Row, need: Memory) -> float:
    allocated = (need.peak_gib or 0.0) - (need.overhead_gib or 0.0)
    buffers = row.stack.buffers_gib if row.layout.world_size > 1 else 0.0
    return allocated * (1.0 + row.stack.fragmentation) + buffers


def device_gib(row: Row, need: Memory) -> float:
    return reserved_gib(row, need) + CONTEXT_GIB


def peak_gib(row: Row, need: Memory, note: str) -> float:
    """As the row's note counts it."""
    if "nvidia-smi" in note:
        return device_gib(row, need)
    if "allocated" in note and "reserved" not in note:
        return (need.peak_gib or 0.0) - (need.overhead_gib or 0.0)
    return reserved_gib(row, need)


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
    if not re.search(r"include recompute|hardware|recompute counted", note) or row.recompute in ("", "none"):
        return forward_and_backward
    if row.recompute == "full":
        blocks = 6.0 * (matmul_parameters(row.shape) - row.shape.vocab_size * row.shape.dim) + attention
        return forward_and_backward + blocks / 3.0
    return forward_and_backward + attention / 3.0


def _filled(row: Row, constants: Constants) -> tuple[Row, list[str]]:
    """The row with what it leaves open, and the words for it."""
    said: list[str] = []
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
    return device_gib(row, memory_of(row)) <= row.capacity_gib
