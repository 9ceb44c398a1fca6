"""Outputs of `scontrol show` as they were printed: 22.05.8 by slurm/testbed, others as sites have published them, with
other host names and in part only. 22.05.8 has each record on one line, as `--oneliner` prints it."""

from __future__ import annotations

from pathlib import Path

_ANSWERS = Path(__file__).with_name("answers")


def said(name: str) -> str:
    """``partition-22.05.8`` and the like."""
    return (_ANSWERS / f"{name}.txt").read_text()
