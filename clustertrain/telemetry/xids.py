"""Stands in until the real table is merged."""

from __future__ import annotations

import msgspec


class Meaning(msgspec.Struct, frozen=True):
    severity: str
    text: str
    advice: str
    program: bool = False


def meaning(xid: int) -> Meaning:
    return Meaning("warning", "see NVIDIA's catalogue of XIDs", "tell the administrators")


of = meaning
