"""What the driver's error numbers (XID) mean for somebody who trains.

After NVIDIA's catalogue, https://docs.nvidia.com/deploy/xid-errors/, in our words. Pure: the report reads it too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["critical", "warning", "info"]
Cause = Literal["program", "hardware", "driver"]

_ADMINS = "requeue with --exclude {node} and tell the administrators"
_OWN = "look for it in the program: run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer"
_FOLLOWS = "look at what came before it: it tells the cause"


class Xid(msgspec.Struct, frozen=True):
    """``cause``: where to look first. ``fix`` may hold ``{node}``, which is for :func:`advice` to fill."""

    number: int
    name: str
    meaning: str
    severity: Severity
    cause: Cause
    fix: str


def _table(*rows: tuple[int, str, str, Severity, Cause, str]) -> dict[int, Xid]:
    return {row[0]: Xid(*row) for row in rows}


# fmt: off
XIDS = _table(
    (13, "graphics engine exception", "a kernel did what it must not, such as reading out of bounds", "warning", "program", _OWN),
    (31, "memory page fault", "a kernel touched an address that is not its own", "warning", "program", _OWN),
    (32, "invalid push buffer", "the commands that reached the GPU were damaged, often over PCIe", "warning", "hardware", _ADMINS),
    (43, "GPU stopped processing", "a program's work was ended after a fault of its own; the GPU goes on", "warning", "program", _OWN),
    (45, "channels removed", "a program's work was cleared away because it ended or was killed", "info", "program", _FOLLOWS),
    (46, "GPU stopped processing", "the GPU hung and did not recover by itself", "critical", "hardware", _ADMINS),
    (48, "double-bit ECC error", "memory lost a value that ECC could not restore", "critical", "hardware", _ADMINS),
    (61, "microcontroller breakpoint", "the firmware of the GPU stopped", "critical", "driver", _ADMINS),
    (62, "microcontroller halt", "the firmware of the GPU stopped", "critical", "driver", _ADMINS),
    (63, "row remapping recorded", "a failing memory row will be replaced at the next reset", "warning", "hardware",
     "nothing now; the GPU is to be reset between jobs, which the administrators can do"),
    (64, "row remapping failed", "a failing memory row could not be recorded for replacement", "critical", "hardware", _ADMINS),
    (69, "graphics engine class error", "a kernel or the driver sent a command that the GPU does not know", "warning", "program", _OWN),
    (74, "NVLink error", "a link between GPUs, or to the switch, failed", "critical", "hardware", _ADMINS),
    (79, "GPU fell off the bus", "the GPU does not answer over PCIe any more", "critical", "hardware", _ADMINS),
    (92, "many single-bit ECC errors", "memory needs correction unusually often", "warning", "hardware", _ADMINS),
    (94, "contained ECC error", "memory lost a value; only the program that used it is hit", "critical", "hardware",
     "requeue: the run starts at its last checkpoint; have the GPU reset where it comes again"),
    (95, "uncontained ECC error", "memory lost a value, and every program on the GPU may be hit", "critical", "hardware", _ADMINS),
    (109, "context switch timeout", "the GPU could not change from one program's work to another's", "critical", "driver", _ADMINS),
    (119, "GSP timeout", "the GPU's system processor does not answer the driver", "critical", "driver", _ADMINS),
    (120, "GSP error", "the GPU's system processor failed", "critical", "driver", _ADMINS),
    (121, "C2C link error", "a corrected error between the processor and the GPU (Grace)", "warning", "hardware", _ADMINS),
    (137, "NVLink access fault", "a program touched another GPU's memory that is not its own", "warning", "program", _OWN),
    (140, "unrecovered ECC error", "memory lost a value, and the driver could not contain it", "critical", "hardware", _ADMINS),
    (143, "GPU did not start", "the GPU failed while the driver brought it up", "critical", "hardware", _ADMINS),
    (149, "NVLink error", "a link between GPUs, or to the switch, failed", "critical", "hardware", _ADMINS),
    (154, "recovery action changed", "the driver says that the GPU or the node must be reset before it is used again",
     "critical", "driver", _ADMINS),
)
# fmt: on


def of(number: int) -> Xid:
    """Also of a number that the table does not have, with what can be said of any."""
    known = XIDS.get(number)
    if known is not None:
        return known
    return Xid(
        number,
        f"XID {number}",
        "the driver reported an error",
        "warning",
        "driver",
        "see NVIDIA's catalogue, https://docs.nvidia.com/deploy/xid-errors/",
    )


def advice(number: int, node: str) -> str:
    """What to do about it."""
    return of(number).fix.format(node=node)
