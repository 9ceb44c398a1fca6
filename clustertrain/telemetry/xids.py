"""What the driver's XID numbers mean, those that training jobs meet.

Source: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors), the catalogue for Ampere and newer.
"""

from __future__ import annotations

import msgspec


class Xid(msgspec.Struct, frozen=True):
    """``program``: as a rule the program's own fault; else the board's or the machine's."""

    text: str
    program: bool = False


_KNOWN = {
    13: Xid("a kernel raised an exception", program=True),
    31: Xid("a kernel read or wrote an address that is not there", program=True),
    43: Xid("a program was stopped after an error of its own", program=True),
    45: Xid("work was removed after an earlier error", program=True),
    48: Xid("a memory error of two bits"),
    63: Xid("a memory row is to be replaced at the next reset"),
    64: Xid("a memory row could not be replaced"),
    74: Xid("an NVLink error"),
    79: Xid("it has fallen off the bus"),
    92: Xid("many memory errors of one bit"),
    94: Xid("a memory error that hit one program"),
    95: Xid("a memory error that may have hit every program"),
    119: Xid("its system processor (GSP) gives no answer"),
    120: Xid("its system processor (GSP) failed"),
    140: Xid("a memory error that was not recovered"),
    154: Xid("the driver wants it reset, drained or the node restarted"),
}
_UNKNOWN = Xid("not one of the common ones")


def of(number: int) -> Xid:
    return _KNOWN.get(number, _UNKNOWN)
