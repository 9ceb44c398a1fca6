"""Recorded outputs of `scontrol show`: 22.05.8 from slurm/testbed, the others excerpts that sites have published, with
other host names. 22.05.8 has each record on one line, as `--oneliner` prints it."""

from __future__ import annotations

from pathlib import Path

_ANSWERS = Path(__file__).with_name("answers")


def read_answer(name: str) -> str:
    """Return the recorded output ``name``, such as ``partition-22.05.8``."""
    return (_ANSWERS / f"{name}.txt").read_text()
