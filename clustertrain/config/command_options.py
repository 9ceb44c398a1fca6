"""Values of the job keys for commands: the stop signal, and the arguments of resumed attempts."""

from __future__ import annotations

import difflib
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from clustertrain.config.checks.invalid_value import InvalidValue

STOP_SIGNALS: Final = ("TERM", "USR1", "USR2", "INT", "HUP")
NO_SIGNAL: Final = "none"
_TO_ALL = "all"

CHECKPOINT: Final = "checkpoint"
"""Placeholder of the newest whole checkpoint. Arguments with it are left out if there is none."""
PLACEHOLDERS: Final = (CHECKPOINT, "run_dir", "attempt")
GLOB_PLACEHOLDERS: Final = ("run_dir",)
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_FORMAT_FIELD = re.compile(r"\{(\w+)(?:[:!][^{}]*)?\}")  # also {step:06d}, as in Python's format strings
_UNCLOSED_PLACEHOLDER = re.compile(r"\{(\w+)[^{}]*$")


@dataclass(frozen=True)
class StopSignal:
    """The signal that asks a command to stop."""

    number: signal.Signals | None
    """None: the command looks at the stop file only."""
    to_all: bool = False
    """Send it to all processes of a rank, not only to the rank's program."""


def parse_stop_signal(text: str) -> StopSignal:
    """Parse ``TERM``, ``USR1:all`` or ``none``. Lower case and ``SIG`` in front are accepted.

    Raises:
        InvalidValue: it is none of these.
    """
    name, separator, target = normalize_stop_signal(text).partition(":")
    if name == NO_SIGNAL and not separator:
        return StopSignal(None)
    if name not in STOP_SIGNALS or (separator and target != _TO_ALL):
        reason = f"not {', '.join(STOP_SIGNALS)} or {NO_SIGNAL}"
        if name in STOP_SIGNALS:
            reason = f"after the colon, only {_TO_ALL} is known"
        example = name if name in STOP_SIGNALS else "USR1"
        raise InvalidValue(
            f"stop_signal = {text!r}: {reason}",
            fix=f"write stop_signal = {example!r} (add :{_TO_ALL} for every process of a rank)",
        )
    return StopSignal(signal.Signals[f"SIG{name}"], bool(separator))


def normalize_stop_signal(text: str) -> str:
    """Return ``USR1:all`` for ``sigusr1:ALL``."""
    name, separator, target = text.partition(":")
    name = name.upper().removeprefix("SIG")
    return f"{NO_SIGNAL if name == NO_SIGNAL.upper() else name}{separator}{target.lower()}"


def split_arguments(text: str) -> list[str]:
    """Split ``text`` into arguments as a shell does, without expansions.

    Raises:
        InvalidValue: a quote is not closed, a placeholder is mistyped, or there is a NUL character.
    """
    if "\0" in text:
        raise InvalidValue(f"resume_args = {text!r}: contains a NUL character", fix="remove it")
    try:
        arguments = shlex.split(text)
    except ValueError as e:
        if "quotation" in str(e):
            reason, fix = (
                "a quote is not closed",
                "close it, or put a backslash before a quote that belongs to the text",
            )
        else:
            reason, fix = "nothing follows the last backslash", "remove it"
        raise InvalidValue(f"resume_args = {text!r}: {reason}", fix=fix) from e
    for argument in arguments:
        _check_resume_argument(text, argument)
    return arguments


def _check_resume_argument(text: str, argument: str) -> None:
    """Refuse a placeholder that is mistyped or not closed. Other braces, such as those of JSON, are left alone."""
    for name in _PLACEHOLDER.findall(argument):
        if name not in PLACEHOLDERS and (close := _find_close(name, PLACEHOLDERS)):
            raise InvalidValue(
                f"resume_args = {text!r}: {{{name}}} is not a placeholder", fix=f"write {{{close}}} in place of it"
            )
    unclosed = _UNCLOSED_PLACEHOLDER.search(argument)
    if unclosed is not None and (close := _find_close(unclosed[1], PLACEHOLDERS)):
        raise InvalidValue(
            f"resume_args = {text!r}: the brace of {{{unclosed[1]} is not closed", fix=f"write {{{close}}}"
        )


def find_unknown_placeholders(arguments: Sequence[str]) -> list[str]:
    """Return the names in braces that are passed on as they are."""
    names = [name for argument in arguments for name in _PLACEHOLDER.findall(argument) if name not in PLACEHOLDERS]
    return list(dict.fromkeys(names))


def check_pattern(text: str) -> None:
    """Check the pattern of ``checkpoints``.

    Raises:
        InvalidValue: a placeholder is not known, so no file would match.
    """
    for match in _FORMAT_FIELD.finditer(text):
        name = match[1]
        if name in GLOB_PLACEHOLDERS and match[0] == f"{{{name}}}":
            continue
        close = _find_close(name, GLOB_PLACEHOLDERS)
        replacement = f"{{{close}}}" if close else "*"
        raise InvalidValue(
            f"checkpoints = {text!r}: {match[0]} is not replaced, and no file matches it",
            fix=f"write checkpoints = {text.replace(match[0], replacement)!r}"
            + ("" if close else "; * matches any text"),
        )
    unclosed = _UNCLOSED_PLACEHOLDER.search(text)
    if unclosed is not None and (close := _find_close(unclosed[1], GLOB_PLACEHOLDERS)):
        raise InvalidValue(
            f"checkpoints = {text!r}: the brace of {{{unclosed[1]} is not closed", fix=f"write {{{close}}}"
        )


def _find_close(name: str, known: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), "")


def uses_placeholder(arguments: Sequence[str], name: str) -> bool:
    return any(name in _PLACEHOLDER.findall(argument) for argument in arguments)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return ``text`` with its placeholders replaced; a name without a value stays as it is."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)
