"""The files that ``clustertrain telemetry`` writes: a page, a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from clustertrain.run.run_dir import RunDir
    from clustertrain.telemetry.analysis.summarize import SummaryRequest
    from clustertrain.telemetry.report_schema import Summary


def check_html_path(html: str | None) -> None:
    """Raises ConfigError where the page could not be written: worth asking before minutes of reading."""
    if html is not None:
        from clustertrain.report.html import check_path as check_page

        check_page(Path(html))


def write_page(run: RunDir, summary: Summary, html: str) -> None:
    """Raises ConfigError where it cannot be written."""
    from clustertrain.report.html import write
    from clustertrain.telemetry.analysis.curves import build_curves

    size = write(summary, build_curves(run, summary), Path(html))
    click.echo(f"{html}: {size / 1e3:,.0f} kB", err=True)


def write_tables(run: RunDir, request: SummaryRequest, csv: str | None, parquet: str | None) -> None:
    """Raises ConfigError where one cannot be written, UsageError where no GPU fits the request."""
    from clustertrain.cli.progress import ProgressBar
    from clustertrain.telemetry.analysis.summarize import select_records
    from clustertrain.telemetry.export import table

    parts, gpu_filter = select_records(run, request)
    table_parts = [table.AttemptSegment(p.attempt, p.segment) for p in parts if p.segment is not None]
    since = None if request.since_s is None else min((p.since for p in parts if p.since is not None), default=None)
    selection = table.RowFilter(gpu_filter, since)
    for path, write in ((csv, table.write_csv), (parquet, table.write_parquet)):
        if path is None:
            continue
        with ProgressBar(f"writing {path}") as bar:
            result = write(table_parts, path, selection, bar)
        for problem in result.errors:
            click.echo(f"clustertrain: left out: {problem}", err=True)
        if path != table.STDOUT:
            click.echo(f"{path}: {result.rows:,} rows", err=True)
