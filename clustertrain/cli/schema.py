"""``clustertrain schema``: the JSON Schemas of the documents that ``--json`` prints."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from clustertrain.cli.common import print_formatted


def _complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from clustertrain.report.documents.registry import DOCUMENTS

    return [CompletionItem(n, help=d.command) for n, d in DOCUMENTS.items() if n.startswith(incomplete)]


@click.command()
@click.argument("name", metavar="[NAME]", required=False, shell_complete=_complete_names)
def schema(name: str | None) -> None:
    """Print the JSON Schema of the document NAME; without NAME, list the documents."""
    from clustertrain.report.documents.registry import DOCUMENTS
    from clustertrain.report.documents.schemas import build_schema

    if name is not None:
        print_formatted(build_schema(name))
        return
    width = max(map(len, DOCUMENTS))
    for document, entry in DOCUMENTS.items():
        click.echo(f"{document:<{width}}  version {entry.version}  {entry.command}")
