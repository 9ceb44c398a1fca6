"""What a row of a table does not state, assumed as a reader would: the usual setting under which it could have run.

A published configuration ran, so a usual setting that needs more memory than its GPU has is wrong. The steps below
replace it by the next more frugal one, in the order in which people resort to them, until the configuration fits. They
change nothing that the row states, and do not read the columns of its outcome.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from clustertrain.config import hardware
from clustertrain.plan.cost import frameworks
from clustertrain.plan.table.rows import TableRow

FUSED_LOGIT_BYTES = 4  # a loss that works in place on 16-bit logits (flash-attn's fused cross-entropy)
REASON = "as it would not fit otherwise"


@dataclass(frozen=True)
class Step:
    """A step to a more frugal setting."""

    column: str
    """The column of the setting, or for what has no column its name in ``TableRow.stated``."""
    setting: str
    apply: Callable[[TableRow], TableRow | None]
    """Return the changed row; None if it would not change. Called only if the setting is not stated."""


def _with_largest_memory(row: TableRow) -> TableRow | None:
    name = rf"{re.escape(row.gpu.name)}-\d+gb"
    # A variant with slower memory is rare (H100 with HBM2e).
    variants = [
        gpu for gpu in hardware.CATALOG if re.fullmatch(name, gpu.name) and gpu.memory_gb_s >= row.gpu.memory_gb_s
    ]
    gpu = max(variants, key=lambda gpu: gpu.memory_gib, default=row.gpu)
    if gpu.memory_gib <= row.gpu.memory_gib:
        return None
    return replace(row, gpu=gpu, capacity_gib=gpu.capacity_gib)


def _with_sharded_optimizer(row: TableRow) -> TableRow | None:
    if row.layout.strategy != "ddp":
        return None
    return replace(row, layout=msgspec.structs.replace(row.layout, strategy="zero1", zero1=True))


def _with_half_gradients(row: TableRow) -> TableRow | None:
    framework = row.framework
    if framework.weight_bytes != 2 or framework.grad_bytes <= 2:
        return None
    return replace(row, framework=replace(framework, grad_bytes=2, reduce_bytes=2))


def _with_sequence_parallel(row: TableRow) -> TableRow | None:
    """Plain attention is older than sequence parallelism, so a framework that the row names with it had none."""
    is_too_old = row.framework.plain_attention and "framework" in row.stated
    if row.layout.tp == 1 or row.layout.sequence_parallel or is_too_old:
        return None
    return replace(row, layout=msgspec.structs.replace(row.layout, sequence_parallel=True))


def _with_checkpointing(mode: str) -> Callable[[TableRow], TableRow | None]:
    return lambda row: replace(row, activation_checkpointing=mode)


def _with_fused_loss(row: TableRow) -> TableRow | None:
    """The loss of a framework that the row names is known."""
    if row.framework.logit_bytes <= FUSED_LOGIT_BYTES or row.framework.plain_attention or "framework" in row.stated:
        return None
    return replace(row, framework=replace(row.framework, logit_bytes=FUSED_LOGIT_BYTES, fused_mlp=True))


def _with_half_states(row: TableRow) -> TableRow | None:
    """The types of a framework that the row names are known."""
    if row.framework.weight_bytes != 4 or "framework" in row.stated:
        return None
    return replace(row, framework=frameworks.with_half_states(row.framework))


def _with_offload(row: TableRow) -> TableRow | None:
    """Offload replaces tensor and pipeline parallelism on few GPUs, usually by DeepSpeed."""
    if row.layout.offload or not row.layout.is_sharded or row.layout.tp * row.layout.pp > 1:
        return None
    if "framework" in row.stated and not row.framework.offloads_often:
        return None
    return replace(row, layout=msgspec.structs.replace(row.layout, offload=True))


STEPS: tuple[Step, ...] = (
    Step("gpu_mem_gib", "the variant with the most memory", _with_largest_memory),
    Step("fsdp_or_zero", "zero1", _with_sharded_optimizer),
    Step("gradients", "16 bit", _with_half_gradients),
    Step("sequence parallelism", "on", _with_sequence_parallel),
    Step("act_ckpt", "selective_attn", _with_checkpointing("selective_attn")),
    Step("act_ckpt", "selective_op", _with_checkpointing("selective_op")),
    Step("act_ckpt", "full", _with_checkpointing("full")),
    Step("loss", "fused", _with_fused_loss),
    Step("weights and moments", "16 bit", _with_half_states),
    Step("offload", "weights, gradients and optimizer", _with_offload),
)


def assume_until_it_fits(row: TableRow, fits: Callable[[TableRow], bool]) -> tuple[TableRow, list[str]]:
    """Return the row after the steps that it needs to fit, and a note per setting that they changed.

    If it never fits, all steps are taken.
    """
    settings: dict[str, str] = {}
    for step in STEPS:
        if fits(row):
            break
        candidate = None if step.column in row.stated else step.apply(row)
        if candidate is not None:
            row, settings[step.column] = candidate, step.setting
    return row, [f"{column} is not stated: {setting}, {REASON}" for column, setting in settings.items()]


def note_usual_settings(row: TableRow, notes: list[str]) -> list[str]:
    """Return notes on the usual settings that remain for columns which the row does not state."""
    settings = {}
    if row.layout.data_parallel > 1 and row.has_layout:
        settings["fsdp_or_zero"] = f"{row.layout.strategy}, usual for {row.framework.name}"
    settings["act_ckpt"] = f"{row.activation_checkpointing}, the least that fits"
    return [
        f"{column} is not stated: {setting}"
        for column, setting in settings.items()
        if column not in row.stated and not any(note.startswith(f"{column} ") for note in notes)
    ]
