"""The command that serves the tools on standard input and output."""

from __future__ import annotations

import sys

import click

from clustertrain import extras
from clustertrain.documentation import page_url
from clustertrain.errors import UsageError
from clustertrain.printable import unwrap_stream


@click.command()
@click.option("--allow-submit", is_flag=True, help="Let agents submit runs. Without it, submit is always a dry run.")
@click.option("--allow-write", is_flag=True, help="Let agents cancel and requeue runs.")
def mcp(allow_submit: bool, allow_write: bool) -> None:
    """Serve runs, plans, reports and logs to agents: a server of the Model Context Protocol on stdin and stdout.

    An agent's program starts it; nothing listens on the network. It needs the extra "mcp".
    """
    extras.require("mcp", "clustertrain mcp")
    if sys.stdin.isatty():
        raise UsageError(
            "clustertrain mcp talks to a program on stdin, and stdin is a terminal",
            fix=f"name the command in the settings of your agent: {page_url('guides/agents')}",
        )
    from clustertrain.cli.mcp.server import build_server

    # The protocol escapes control characters itself, and needs the bytes of the real streams.
    sys.stdout = unwrap_stream(sys.stdout)
    build_server(allow_submit=allow_submit, allow_write=allow_write).run("stdio")
