"""Addresses of documentation pages, for messages: an installed wheel has no docs folder."""

from __future__ import annotations

SITE = "https://clustertrain.github.io/clustertrain"


def page_url(page: str) -> str:
    """Return the address of ``page``, such as ``guides/data`` for docs/guides/data.md."""
    return f"{SITE}/{page}/"
