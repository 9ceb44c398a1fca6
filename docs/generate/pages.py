"""The generated pages by file name, each with the function that renders it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import commands, configuration, documents, events, hardware, python_api, states

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
MANUAL = Path(__file__).resolve().parents[1] / "man"
PAGES: Mapping[str, Callable[[], str]] = {
    "recipe.md": configuration.render_recipe,
    "cluster-profile.md": configuration.render_cluster_profile,
    "cli.md": commands.render,
    "python-api.md": python_api.render,
    "events.md": events.render,
    "states.md": states.render,
    "hardware.md": hardware.render,
    "json.md": documents.render,
    **documents.SCHEMA_FILES,
}
