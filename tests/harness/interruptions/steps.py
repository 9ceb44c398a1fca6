"""Steps and losses that a program prints: lines of the form ``STEP <number> <loss>``."""

from __future__ import annotations

from pathlib import Path

Steps = dict[int, str]
"""The loss of each step in the order of the steps, as text, so that equal means equal in all bits."""


def read_steps(log: Path) -> Steps:
    """Return the steps in a log, without a last line that a kill has truncated."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return {}
    lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("STEP ")]
    return {int(fields[1]): fields[2] if len(fields) > 2 else "" for fields in lines if len(fields) > 1}
