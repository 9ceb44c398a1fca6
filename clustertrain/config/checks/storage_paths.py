"""Storage outside the run folder that a recipe names: folders on the nodes' local disks, and URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertrain import extras, settings
from clustertrain.errors import ConfigError, UnsuitableEnvironment

_NON_PERSISTENT_PROTOCOLS = {
    "memory": "it is the memory of a single process",
    **dict.fromkeys(("http", "https", "data"), "it is read-only"),
}
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def is_url(text: str) -> bool:
    """Return whether ``text`` is a URL rather than a path."""
    return "://" in text


def check_node_folder(name: str, text: str) -> None:
    """Raise ValueError unless ``text`` can be a folder on a node."""
    unknown = re.search(r"\{(?!job\})\w*\}?", _VARIABLE.sub("", text))
    if unknown:
        raise ValueError(f"{name} = {text!r}: {unknown[0]} is unknown; use {{job}} or $NAME of the node's environment")
    if not text.startswith(("/", "$", "~/")):
        raise ValueError(
            f"{name} = {text!r}: must be a folder on the nodes, for example /local/me, $TMPDIR or /tmp/{{job}}"
        )


def resolve_node_folder(text: str, environ: Mapping[str, str], key: str = "checkpoint.local") -> Path:
    """Return ``text``, the value of ``key``, with environment variables and ``{job}`` substituted.

    Raises:
        UnsuitableEnvironment: a variable is unset, or the result is not an absolute path.
    """
    job = environ.get(settings.SLURM_JOB_ID) or f"local-{Path(environ.get(settings.LOCAL_JOB, '0')).name}"

    def substitute(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise UnsuitableEnvironment(f"{text}: ${name} is not set here")
        return environ[name]

    path = settings.expand_user_path(_VARIABLE.sub(substitute, text).replace("{job}", job), key)
    if not path.is_absolute():
        raise UnsuitableEnvironment(f"{text}: {path} is not an absolute path")
    return path


def check_protocol(url: str) -> None:
    """Raise ConfigError if fsspec does not know the protocol of ``url`` or it cannot store files persistently.

    The protocol's package need not be installed, since the run may be planned on another machine.
    """
    problem = _NON_PERSISTENT_PROTOCOLS.get(_innermost_protocol(url))
    if problem:
        raise ConfigError(
            f"checkpoint.remote = {url!r}: {problem}, so no checkpoint would outlive the run",
            fix="give an object store or a folder, for example s3://bucket/prefix or file:///folder",
        )
    try:
        find_filesystem_class(url)
    except ConfigError as e:
        if not isinstance(e.__cause__, ImportError):
            raise


def _innermost_protocol(url: str) -> str:
    """Return the protocol that stores the bytes, the last one of a chain such as ``simplecache::s3://``."""
    return url.partition("://")[0].split("::")[-1]


def find_filesystem_class(url: str) -> Any:
    """Return fsspec's class for ``url``.

    Raises:
        ConfigError: fsspec or the package of the protocol is not installed, or the protocol is unknown.
    """
    extras.require("fsspec", url)
    import fsspec

    protocol = _innermost_protocol(url)
    try:
        return fsspec.get_filesystem_class(protocol)  # type: ignore[no-untyped-call]
    except ImportError as e:
        raise ConfigError(
            f"{url}: the package for {protocol}:// is not installed: {e}",
            fix=f"{extras.install_command('s3fs')} for s3, otherwise that package, here and where the ranks run",
        ) from e
    except ValueError as e:
        raise ConfigError(
            f"{url}: fsspec does not know the protocol {protocol}://", fix="give a URL such as s3://bucket/prefix"
        ) from e
