"""The files that ``clustertrain telemetry`` writes: a page, a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir
    from clustertrain.telemetry.analysis.summarize import Request
    from clustertrain.telemetry.report_schema import Summary


def check(html: str | None) -> None:
    """Raises ConfigError where the page could not be written: worth asking before minutes of reading."""
    if html is not None:
        from clustertrain.report.html import check as check_page

        check_page(Path(html))


def write_page(run: RunDir, summary: Summary, html: str) -> None:
    """Raises ConfigError where it cannot be written."""
    from clustertrain.report.html import write
    from clustertrain.telemetry.analysis.curves import curves

    size = write(summary, curves(run, summary), Path(html))
    click.echo(f"{html}: {size / 1e3:,.0f} kB", err=True)


def write_tables(run: RunDir, request: Request, csv: str | None, parquet: str | None) -> None:
    """Raises ConfigError where one cannot be written, UsageError where no GPU fits the request."""
    from clustertrain.cli.progress import Bar
    from clustertrain.telemetry.analysis.summarize import chosen_parts
    from clustertrain.telemetry.export import table

    parts, wanted = chosen_parts(run, request)
    recorded = [table.Part(p.attempt, p.segment) for p in parts if p.segment is not None]
    since = None if request.since_s is None else min((p.since for p in parts if p.since is not None), default=None)
    choice = table.Choice(wanted, since)
    for path, write in ((csv, table.write_csv), (parquet, table.write_parquet)):
        if path is None:
            continue
        with Bar(f"writing {path}") as bar:
            written = write(recorded, path, choice, bar)
        for why in written.trouble:
            click.echo(f"clustertrain: left out: {why}", err=True)
        if path != table.STDOUT:
            click.echo(f"{path}: {written.rows:,} rows", err=True)
