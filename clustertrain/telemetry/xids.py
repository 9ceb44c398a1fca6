"""What the driver's error numbers (XID) mean for somebody who trains.

After NVIDIA's catalogue, https://docs.nvidia.com/deploy/xid-errors/, in our words. Pure: the report reads it too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["critical", "warning", "info"]
Cause = Literal["program", "hardware", "driver"]

_FIX_NODE = "requeue with --exclude {node} and tell the administrators"
_FIX_PROGRAM = "look for it in the program: run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer"
_FIX_EARLIER_ERROR = "look at what came before it: it tells the cause"


class Xid(msgspec.Struct, frozen=True):
    """``cause``: where to look first. ``fix`` may hold ``{node}``, which is for :func:`format_fix` to fill."""

    number: int
    name: str
    meaning: str
    severity: Severity
    cause: Cause
    fix: str


def _xid_table(severity: Severity, cause: Cause, fix: str, *rows: tuple[int, str, str]) -> dict[int, Xid]:
    return {number: Xid(number, name, meaning, severity, cause, fix) for number, name, meaning in rows}


_PROGRAM_XIDS = _xid_table(
    "warning",
    "program",
    _FIX_PROGRAM,
    (13, "graphics engine exception", "a kernel did what it must not, such as reading out of bounds"),
    (31, "memory page fault", "a kernel touched an address that is not its own"),
    (43, "GPU stopped processing", "a program's work was ended after a fault of its own; the GPU goes on"),
    (69, "graphics engine class error", "a command came that this GPU does not know"),
    (137, "NVLink access fault", "a program touched memory of another GPU that is not its own"),
)
_HARDWARE_FAILURE_XIDS = _xid_table(
    "critical",
    "hardware",
    _FIX_NODE,
    (46, "GPU stopped processing", "the GPU hung and did not recover by itself"),
    (48, "double-bit ECC error", "memory lost a value that ECC could not restore"),
    (64, "row remapping failed", "a failing memory row could not be put down for replacement"),
    (74, "NVLink error", "a link between GPUs, or to the switch, failed"),
    (79, "GPU fell off the bus", "the GPU does not answer over PCIe any more"),
    (95, "uncontained ECC error", "memory lost a value, and every program on the GPU may be hit"),
    (140, "unrecovered ECC error", "memory lost a value, and the driver could not contain it"),
    (143, "GPU did not start", "the GPU failed while the driver brought it up"),
    *((n, "NVLink error", "a link between GPUs, or to the switch, failed (NVLink 5)") for n in range(144, 151)),
)
_DRIVER_XIDS = _xid_table(
    "critical",
    "driver",
    _FIX_NODE,
    (61, "microcontroller breakpoint", "firmware of the GPU stopped"),
    (62, "microcontroller halt", "firmware of the GPU stopped"),
    (109, "context switch timeout", "the GPU could not change from one program's work to another's"),
    (119, "GSP timeout", "the GPU's system processor does not answer the driver"),
    (120, "GSP error", "the GPU's system processor failed"),
    (154, "recovery action changed", "the GPU or the node must be reset before it is used again"),
)
_HARDWARE_WARNING_XIDS = _xid_table(
    "warning",
    "hardware",
    _FIX_NODE,
    (32, "invalid push buffer", "the commands that reached the GPU were damaged, often over PCIe"),
    (92, "many single-bit ECC errors", "memory needs correction unusually often"),
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
        (45, "channels removed", "a program's work was cleared away when it ended"),
    ),
    **_xid_table(
        "warning",
        "hardware",
        "nothing now; the GPU is to be reset between jobs, which the administrators can do",
        (63, "row remapping recorded", "a failing memory row will be replaced at the next reset"),
    ),
    **_xid_table(
        "critical",
        "hardware",
        "requeue: the run starts at its last checkpoint; have the GPU reset where it comes again",
        (94, "contained ECC error", "memory lost a value; only the program that used it is hit"),
    ),
}


def lookup_xid(number: int) -> Xid:
    """Also of a number that the table does not have, with what can be said of any."""
    xid = XIDS.get(number)
    if xid is not None:
        return xid
    return Xid(
        number,
        f"XID {number}",
        "the driver reported an error",
        "warning",
        "driver",
        "see NVIDIA's catalogue, https://docs.nvidia.com/deploy/xid-errors/",
    )


def format_fix(number: int, node: str) -> str:
    """What to do about it."""
    return lookup_xid(number).fix.format(node=node)
