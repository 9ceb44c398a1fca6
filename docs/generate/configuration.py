"""The pages of the configuration, from :mod:`clustertrain.config.parsing.reference`."""

from __future__ import annotations

import inspect

from clustertrain.config.cluster import ClusterProfile
from clustertrain.config.job import JobSpec
from clustertrain.config.parsing.reference import Table, collect_tables
from clustertrain.config.recipe import Recipe
from docs.generate import docstrings

_NOTE = "<!-- Written by python -m docs.generate from clustertrain/config. Do not edit. -->"
_RECIPE_INTRO = """A recipe is a TOML file with the tables below. Every key is optional, except in lists of tables.
Command-line options and `--set table.key=value` win over the file.

A recipe may also have a table `[env]` of environment variables for the ranks, as strings."""
_PROFILE_INTRO = """A cluster profile is a TOML file, `$XDG_CONFIG_HOME/clustertrain/clusters/NAME.toml`, selected with
`--cluster NAME`. `clustertrain cluster detect` writes one. Its use: [clusters.md](../guides/clusters.md)."""


def _render_table(table: Table) -> list[str]:
    lines = []
    if table.name:
        lines += ["", f"## `[[{table.name}]]`" if table.is_list else f"## `[{table.name}]`", ""]
        paragraphs = inspect.cleandoc(table.struct.__doc__ or "").split("\n\n")
        lines.append("\n\n".join(map(docstrings.one_line, paragraphs)))
    if table.keys:
        lines += ["", "| key | type | default | allowed | description |", "|---|---|---|---|---|"]
        for key in table.keys:
            description = docstrings.one_line(key.description)
            lines.append(f"| `{key.name}` | {key.type} | {key.default} | {key.allowed} | {description} |")
    return lines


def render_recipe() -> str:
    """Return the page of recipe keys."""
    tables = [table for table in collect_tables(Recipe) if table.name]
    job = list(collect_tables(JobSpec, "job"))
    return _render_page("Recipe reference", _RECIPE_INTRO, [*tables, *job])


def render_cluster_profile() -> str:
    """Return the page of cluster profile keys."""
    return _render_page("Cluster profile reference", _PROFILE_INTRO, list(collect_tables(ClusterProfile)))


def _render_page(title: str, intro: str, tables: list[Table]) -> str:
    lines = [f"# {title}", "", _NOTE, "", intro]
    for table in tables:
        lines += _render_table(table)
    return "\n".join(lines) + "\n"
