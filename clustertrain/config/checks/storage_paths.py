"""Where a recipe says that files lie, besides the run's own folder: on a node's own disk, or behind a URL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertrain import settings
from clustertrain.errors import ConfigError, UnsuitableEnvironment

INSTALL_HINT = "pip install 'clustertrain[object-storage]'"
_NON_PERSISTENT_PROTOCOLS = {
    "memory": "it is the memory of one process",
    **dict.fromkeys(("http", "https", "data"), "it can only be read"),
}
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def is_url(text: str) -> bool:
    return "://" in text


def check_node_folder(name: str, text: str) -> None:
    """Raises ValueError where ``text`` can be no folder on any node."""
    unknown = re.search(r"\{(?!job\})\w*\}?", _VARIABLE.sub("", text))
    if unknown:
        raise ValueError(f"{name} = {text!r}: {unknown[0]} is not known; {{job}} is, and $NAME of the node")
    if not text.startswith(("/", "$", "~/")):
        raise ValueError(f"{name} = {text!r}: must be a folder on the nodes, as /local/me, $TMPDIR or /tmp/{{job}}")


def resolve_node_folder(text: str, environ: Mapping[str, str]) -> Path:
    """``text`` with the environment's variables and the job's id in it.

    Raises:
        UnsuitableEnvironment: a variable is not set here, or holds something else than a path.
    """
    job = environ.get(settings.SLURM_JOB_ID) or f"local-{Path(environ.get(settings.LOCAL_JOB, '0')).name}"

    def substitute(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise UnsuitableEnvironment(f"{text}: ${name} is not set here")
        return environ[name]

    path = settings.expand_user_path(_VARIABLE.sub(substitute, text).replace("{job}", job), "checkpoint.local")
    if not path.is_absolute():
        raise UnsuitableEnvironment(f"{text}: {path} is no absolute path")
    return path


def check_protocol(url: str) -> None:
    """Raises ConfigError where fsspec knows no such protocol as that of ``url``, or nothing can be kept there. Whether
    what it needs is installed is another matter: where a run is only planned it need not be."""
    problem = _NON_PERSISTENT_PROTOCOLS.get(_innermost_protocol(url))
    if problem:
        raise ConfigError(
            f"checkpoint.remote = {url!r}: {problem}, so no checkpoint would be there after the run",
            fix="name an object store or a folder, as s3://bucket/prefix or file:///folder",
        )
    try:
        find_filesystem_class(url)
    except ConfigError as e:
        if not isinstance(e.__cause__, ImportError):
            raise


def _innermost_protocol(url: str) -> str:
    """Of several in each other, as ``simplecache::s3://``, the one that holds the bytes."""
    return url.partition("://")[0].split("::")[-1]


def find_filesystem_class(url: str) -> Any:
    """fsspec's class for ``url``.

    Raises:
        ConfigError: fsspec, or what it needs for the protocol, is not installed, or there is no such protocol.
    """
    try:
        import fsspec
    except ImportError as e:
        raise ConfigError(
            f"{url}: needs the package fsspec: {e}", fix=f"{INSTALL_HINT}, here and where the ranks run"
        ) from e
    protocol = _innermost_protocol(url)
    try:
        return fsspec.get_filesystem_class(protocol)  # type: ignore[no-untyped-call]
    except ImportError as e:
        raise ConfigError(
            f"{url}: the package for {protocol}:// is not installed: {e}",
            fix=f"{INSTALL_HINT} for s3, else that package; here and where the ranks run",
        ) from e
    except ValueError as e:
        raise ConfigError(f"{url}: fsspec knows no protocol {protocol}://", fix="for example s3://bucket/prefix") from e
