"""URLs of object stores, which fsspec and a package for the protocol open. Imported by what was given such a URL."""

from __future__ import annotations

from typing import Any

from clustertrain.errors import ConfigError

EXTRA = "pip install 'clustertrain[object-storage]'"


def is_url(text: str) -> bool:
    return "://" in text


def storage_class(url: str) -> Any:
    """fsspec's class for ``url``.

    Raises:
        ConfigError: fsspec, or what it needs for the protocol, is not installed, or there is no such protocol.
    """
    try:
        import fsspec
    except ImportError as e:
        raise ConfigError(f"{url}: needs the package fsspec: {e}", fix=f"{EXTRA} where the ranks run and here") from e
    protocol = url.partition("://")[0].split("::")[-1]
    try:
        return fsspec.get_filesystem_class(protocol)  # type: ignore[no-untyped-call]
    except ImportError as e:
        raise ConfigError(
            f"{url}: the package for {protocol}:// is not installed: {e}",
            fix=f"install it where the ranks run and here; for s3 also: {EXTRA}",
        ) from e
    except ValueError as e:
        raise ConfigError(f"{url}: fsspec knows no protocol {protocol}://", fix="for example s3://bucket/prefix") from e
