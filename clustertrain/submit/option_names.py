"""Names of job keys in messages: a user who typed an option looks for the option."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
from collections.abc import Container, Iterator

from clustertrain.errors import ClusterTrainError

# By job key: the option, if the key is not named as the option is.
_OPTIONS = {"container_mounts": "--container-mount", "hooks": "--no-hooks", "environment": "--ship-env"}
_LITERAL = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+"""
_ASSIGNMENT = re.compile(rf"(?:\bwrite )?(?<![\w.])(\w+) = ({_LITERAL})")
_CHANGE = re.compile(r"\bchange (\w+)(?!\.)")
_SUBJECT = re.compile(r"(?:job: )?(\w+)(?=: | = )")


def option_name(key: str) -> str:
    """Return the option for a job key."""
    return _OPTIONS.get(key, f"--{key.replace('_', '-')}")


@contextlib.contextmanager
def named(given: Container[str]) -> Iterator[None]:
    """Name the options in place of their keys in the errors about them that are raised in the block.

    Such an error begins with ``KEY: `` or ``KEY = VALUE``; its fix may have ``KEY = VALUE`` in it.

    Args:
        given: keys of the options on the command line.
    """
    try:
        yield
    except ClusterTrainError as e:
        subject = _SUBJECT.match(e.message)
        if subject is None or subject[1] not in given:
            raise
        message = _name_options(e.message.removeprefix("job: "), given)
        if message.startswith(f"{subject[1]}: "):
            message = option_name(subject[1]) + message.removeprefix(subject[1])
        raise type(e)(message, fix=_name_options(e.fix, given) if e.fix else None) from e


def _name_options(text: str, given: Container[str]) -> str:
    text = _CHANGE.sub(lambda m: f"change {option_name(m[1])}" if m[1] in given else m[0], text)
    return _ASSIGNMENT.sub(lambda m: _format_option(m[1], m[2]) if m[1] in given else m[0], text)


def _format_option(key: str, literal: str) -> str:
    value = str(ast.literal_eval(literal))
    return f"{option_name(key)} " + (f'"{value}"' if "'" in value and '"' not in value else shlex.quote(value))
