"""Meaning and remedy of the driver's error numbers (XID) for training jobs.

Based on NVIDIA's catalog, https://docs.nvidia.com/deploy/xid-errors/. No I/O: the report uses it too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["critical", "warning", "info"]
Cause = Literal["program", "hardware", "driver"]

_FIX_NODE = "requeue with --exclude {node} and notify the administrators"
_FIX_PROGRAM = "debug the program: run it with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer"
_FIX_EARLIER_ERROR = "look for the cause in the preceding errors"


class Xid(msgspec.Struct, frozen=True):
    """Entry of the XID catalog."""

    number: int
    name: str
    meaning: str
    severity: Severity
    cause: Cause
    """Most likely cause."""
    fix: str
    """May contain ``{node}``; :func:`format_fix` fills it in."""


def _xid_table(severity: Severity, cause: Cause, fix: str, *rows: tuple[int, str, str]) -> dict[int, Xid]:
    return {number: Xid(number, name, meaning, severity, cause, fix) for number, name, meaning in rows}


_PROGRAM_XIDS = _xid_table(
    "warning",
    "program",
    _FIX_PROGRAM,
    (13, "graphics engine exception", "a kernel performed an illegal operation, such as an out-of-bounds read"),
    (31, "memory page fault", "a kernel accessed an invalid address"),
    (43, "GPU stopped processing", "the driver ended a program after a fault in it; the GPU still works"),
    (69, "graphics engine class error", "the GPU received an unknown command"),
    (137, "NVLink access fault", "a program accessed an invalid address in another GPU's memory"),
)
_HARDWARE_FAILURE_XIDS = _xid_table(
    "critical",
    "hardware",
    _FIX_NODE,
    (46, "GPU stopped processing", "the GPU hung and did not recover by itself"),
    (48, "double-bit ECC error", "memory lost a value that ECC could not restore"),
    (64, "row remapping failed", "a failing memory row could not be marked for replacement"),
    (74, "NVLink error", "a link between GPUs, or to the switch, failed"),
    (79, "GPU fell off the bus", "the GPU no longer responds over PCIe"),
    (95, "uncontained ECC error", "memory lost a value, and every program on the GPU may be affected"),
    (140, "unrecovered ECC error", "memory lost a value, and the driver could not contain it"),
    (143, "GPU did not start", "the GPU failed while the driver initialized it"),
    *((n, "NVLink error", "a link between GPUs, or to the switch, failed (NVLink 5)") for n in range(144, 151)),
)
_DRIVER_XIDS = _xid_table(
    "critical",
    "driver",
    _FIX_NODE,
    (61, "microcontroller breakpoint", "the GPU's firmware stopped"),
    (62, "microcontroller halt", "the GPU's firmware stopped"),
    (109, "context switch timeout", "the GPU could not switch from one program to another"),
    (119, "GSP timeout", "the GPU's system processor does not respond to the driver"),
    (120, "GSP error", "the GPU's system processor failed"),
    (154, "recovery action changed", "the GPU or the node must be reset before it is used again"),
)
_HARDWARE_WARNING_XIDS = _xid_table(
    "warning",
    "hardware",
    _FIX_NODE,
    (32, "invalid push buffer", "the GPU received corrupted commands, often because of PCIe"),
    (92, "many single-bit ECC errors", "memory errors are corrected unusually often"),
    (121, "C2C link error", "a corrected error between the processor and the GPU (Grace)"),
)
XIDS = {
    **_PROGRAM_XIDS,
    **_HARDWARE_FAILURE_XIDS,
    **_DRIVER_XIDS,
    **_HARDWARE_WARNING_XIDS,
    **_xid_table(
        "info",
        "program",
        _FIX_EARLIER_ERROR,
        (45, "channels removed", "the driver removed a program's work when the program ended"),
    ),
    **_xid_table(
        "warning",
        "hardware",
        "no action needed now; ask the administrators to reset the GPU between jobs",
        (63, "row remapping recorded", "a failing memory row will be replaced at the next reset"),
    ),
    **_xid_table(
        "critical",
        "hardware",
        "requeue the run, which resumes from its last checkpoint; ask for a reset of the GPU if the error returns",
        (94, "contained ECC error", "memory lost a value; only the program that used it is affected"),
    ),
}


def lookup_xid(number: int) -> Xid:
    """Return the entry of an XID; a generic one if the table lacks it."""
    xid = XIDS.get(number)
    if xid is not None:
        return xid
    return Xid(
        number,
        f"XID {number}",
        "the driver reported an error",
        "warning",
        "driver",
        "see NVIDIA's catalog, https://docs.nvidia.com/deploy/xid-errors/",
    )


def format_report(number: int, count: int = 1) -> str:
    """Return a phrase for ``count`` reports of an XID by a GPU."""
    xid, times_text = lookup_xid(number), f" {count:,} times" if count > 1 else ""
    return f"reported XID {number}{times_text}: {xid.name}, {xid.meaning}"


def format_fix(number: int, node: str) -> str:
    """Return the remedy for an XID on ``node``."""
    return lookup_xid(number).fix.format(node=node)
