"""Values of the job keys for commands: the stop signal, and the arguments of resumed attempts."""

from __future__ import annotations

import difflib
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

STOP_SIGNALS: Final = ("TERM", "USR1", "USR2", "INT", "HUP")
NO_SIGNAL: Final = "none"
_TO_ALL = "all"

CHECKPOINT: Final = "checkpoint"
"""Placeholder of the newest whole checkpoint. Arguments with it are left out if there is none."""
PLACEHOLDERS: Final = (CHECKPOINT, "run_dir", "attempt")
GLOB_PLACEHOLDERS: Final = ("run_dir",)
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class StopSignal:
    """The signal that asks a command to stop."""

    number: signal.Signals | None
    """None: the command looks at the stop file only."""
    to_all: bool = False
    """Send it to all processes of a rank, not only to the rank's program."""


def parse_stop_signal(text: str) -> StopSignal:
    """Parse ``TERM``, ``USR1:all`` or ``none``.

    Raises:
        ValueError: it is none of these.
    """
    if text == NO_SIGNAL:
        return StopSignal(None)
    name, separator, target = text.partition(":")
    if name not in STOP_SIGNALS or (separator and target != _TO_ALL):
        raise ValueError(
            f"stop_signal = {text!r}: must be one of {', '.join(STOP_SIGNALS)}, for all processes of a rank with "
            f"':{_TO_ALL}' after it, or {NO_SIGNAL!r}"
        )
    return StopSignal(signal.Signals[f"SIG{name}"], bool(separator))


def split_arguments(text: str) -> list[str]:
    """Split ``text`` into arguments as a shell does, without expansions.

    Raises:
        ValueError: a quote is not closed, a placeholder is not known, or there is a NUL character.
    """
    try:
        if "\0" in text:
            raise ValueError("contains a NUL character")
        arguments = shlex.split(text)
    except ValueError as e:
        raise ValueError(f"resume_args = {text!r}: {e}") from e
    for argument in arguments:
        check_placeholders("resume_args", argument, PLACEHOLDERS)
    return arguments


def check_placeholders(key: str, text: str, known: Sequence[str]) -> None:
    """Raise ValueError for a placeholder in ``text`` that looks like a mistyped one; other braces are left alone."""
    for name in _PLACEHOLDER.findall(text):
        if name not in known and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.7)):
            raise ValueError(f"{key} = {text!r}: unknown placeholder {{{name}}}; did you mean {{{close[0]}}}?")


def uses_placeholder(arguments: Sequence[str], name: str) -> bool:
    return any(name in _PLACEHOLDER.findall(argument) for argument in arguments)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return ``text`` with its placeholders replaced; a name without a value stays as it is."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)
