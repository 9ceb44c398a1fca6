"""``plan --table``: a CSV file in, the same file with predictions out."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import click

from clustertrain import fsio, reading
from clustertrain.cli.common import print_json
from clustertrain.errors import ConfigError
from clustertrain.plan.table import predict


def write_predictions(source: Path, out: Path | None, *, calibrate: bool, as_json: bool) -> int:
    """All columns of ``source`` as they are, with those of ``table.COLUMNS`` behind them.

    Raises:
        ConfigError: the file is no CSV table with the columns that a prediction needs; ``out`` cannot be written.
    """
    if out is not None and out.exists() and not out.is_file():
        raise ConfigError(f"{out} is not a regular file, and would be replaced", fix="give --out the name of a file")
    columns, rows = _read_table(source)
    predictions = predict.predict(rows, calibrate=calibrate)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    input_columns = [name for name in columns if name not in predict.COLUMNS]
    writer.writerow([*input_columns, *predict.COLUMNS])
    for row, prediction in zip(rows, predictions, strict=True):
        writer.writerow([*(row[name] for name in input_columns), *prediction.cells()])
    if out is not None:
        try:
            fsio.write_text(out, text.getvalue())
        except OSError as e:
            raise ConfigError(
                f"{out} cannot be written: {e.strerror}", fix="give --out a path in a folder of yours"
            ) from e
    elif not as_json:
        click.echo(text.getvalue(), nl=False)
    not_predicted = [number for number, p in enumerate(predictions, start=1) if p.tokens_per_s_per_gpu is None]
    if as_json:
        cells = [dict(zip(predict.COLUMNS, p.values(), strict=True)) for p in predictions]
        print_json({"rows": cells, "predicted": len(predictions) - len(not_predicted), "not_predicted": not_predicted})
    elif out is not None:
        skipped = (
            f"; not predicted: rows {', '.join(map(str, not_predicted[:10]))}{' …' if len(not_predicted) > 10 else ''}"
            if not_predicted
            else ""
        )
        click.echo(
            f"{len(predictions) - len(not_predicted)} of {len(predictions)} rows predicted, written to {out}{skipped}"
        )
    return 0


def _read_table(source: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        text = reading.read_bytes(source, allow_fifo=True).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=None), restval="")
        rows = [{name: value or "" for name, value in row.items() if name is not None} for row in reader]
    except reading.UnusableFile as e:
        raise ConfigError(e.message, fix="name a CSV file") from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(f"{source} is not a CSV table: {e}") from None
    columns = list(reader.fieldnames or [])
    missing = [name for name in predict.REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise ConfigError(
            f"{source} lacks the columns {', '.join(missing)}",
            fix="the first line names the columns; docs/explanation/planner.md lists them",
        )
    return columns, rows
