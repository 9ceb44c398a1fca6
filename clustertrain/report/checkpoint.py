"""Text output of ``clustertrain checkpoint list`` and ``diff``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain import schema
from clustertrain.checkpoint.offline.diff import CheckpointDiff, TensorDiff, TensorForm, ValueDiff
from clustertrain.plan.layout import Layout, pluralize
from clustertrain.run.rollback_record import UNREADABLE_FIX

# Without --all:
MAX_SHOWN = 10  # differences per kind
MAX_VALUE_WIDTH = 40  # characters per value


def format_size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def render_list(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Render the rows of :func:`clustertrain.checkpoint.offline.inspect.list_checkpoints` as a table.

    If checkpoints share files, the column "new" has the bytes that no older one has: their sum is the space on disk.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    has_links = any(row["new_bytes"] not in (None, row["bytes"]) for row in rows)
    for name in ("step", "size", *["new"] * has_links, "ranks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    table.add_column("engine", no_wrap=True)
    metric_name = next((row["metric"]["name"] for row in reversed(rows) if row.get("metric")), None)
    table.add_column("state", no_wrap=True)
    if metric_name:
        table.add_column(metric_name, justify="right", no_wrap=True)
    for row in rows:
        ranks = str(row["world_size"] or "-")
        cells = [
            str(row["step"]),
            format_size(row["bytes"]),
            *([format_size(row["new_bytes"])] if has_links else []),
            ranks,
            format_layout(row["layout"]),
            row["engine"] or "-",
            format_state(row),
        ]
        table.add_row(*cells, *([_metric_cell(row, metric_name)] if metric_name else []))
    return table


def _metric_cell(row: Mapping[str, Any], metric_name: str) -> Text:
    metric = row.get("metric")
    if not metric or metric["name"] != metric_name:
        return Text("-")
    return Text(
        f"best {metric['value']:.6g}" if row.get("best") else f"{metric['value']:.6g}", style="green" * row["best"]
    )


def damage_messages(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the problems of damaged or unreadable checkpoints, outside the table because they contain long paths."""
    reasons_by_step = ((r["step"], r.get("damage") or r.get("unreadable")) for r in rows)
    return [f"step {step}: {why}" for step, why in reasons_by_step if why]


def format_record_error(reason: str) -> str:
    """Return the lines below checkpoints without the record of rollbacks; ``reason`` says why it cannot be read."""
    return f"{reason}; these checkpoints may include ones that a rollback invalidated\n  fix: {UNREADABLE_FIX}"


def format_layout(layout: Mapping[str, Any] | None) -> str:
    try:
        return schema.convert(layout, Layout).describe() if layout else "-"
    except msgspec.ValidationError:  # from another version
        return str((layout or {}).get("strategy", "-"))


def format_state(row: Mapping[str, Any]) -> str:
    if not row["committed"]:
        return "not committed"
    if "unreadable" in row:
        return "UNREADABLE"
    return {None: "committed", True: "verified", False: "DAMAGED"}[row["verified"]]


def render_diff(comparison: CheckpointDiff, *, show_all: bool) -> RenderableType:
    """Render the differences, with ``show_all`` every one instead of the first few of each kind."""
    parts: list[RenderableType] = []
    if comparison.equal:
        parts.append(Text(f"equal: {pluralize(comparison.tensors, 'tensor')} and all values", style="green"))
    else:
        parts.append(_summary_table(comparison))
    if comparison.bytes:
        parts += [
            Text(),
            _tensor_table(_truncate(comparison.bytes, show_all)),
            *_remainder_line(comparison.bytes, show_all),
        ]
    if comparison.forms:
        rows = [
            (f.name, _format_tensor_meta(f.a), _format_tensor_meta(f.b)) for f in _truncate(comparison.forms, show_all)
        ]
        parts += [
            Text(),
            _table("tensors with another dtype or shape", rows),
            *_remainder_line(comparison.forms, show_all),
        ]
    for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
        if names:
            parts += [
                Text(),
                Text(f"only in {side}", style="bold"),
                *(Text(n, overflow="fold") for n in _truncate(names, show_all)),
            ]
            parts += _remainder_line(names, show_all)
    for title, values in (("values", comparison.values), ("save metadata", comparison.saved)):
        if values:
            rows = [(v.name, *_format_sides(v, show_all)) for v in _truncate(values, show_all)]
            parts += [Text(), _table(title, rows), *_remainder_line(values, show_all)]
    if not comparison.ranks_compared:
        parts += [Text(), Text("Per-rank state is not compared: different numbers of ranks saved the checkpoints.")]
    return Group(*parts)


def _summary_table(comparison: CheckpointDiff) -> RenderableType:
    tensors = [f"{len(comparison.bytes)} of {comparison.tensors} differ"]
    kinds = [k for k in ("model", "optimizer", "other") if any(t.kind == k for t in comparison.bytes)]
    if kinds:
        counts = (f"{k} {sum(t.kind == k for t in comparison.bytes)}" for k in kinds)
        tensors[0] += f" ({', '.join(counts)})"
    if comparison.forms:
        tensors.append(f"{len(comparison.forms)} with another dtype or shape")
    tensors += [f"{len(n)} only in {side}" for side, n in (("A", comparison.only_a), ("B", comparison.only_b)) if n]
    values = f"{len(comparison.values)} differ" if comparison.values else "equal"
    return _key_value_grid(("tensors", "; ".join(tensors)), ("values", values))


def _key_value_grid(*rows: tuple[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, Text(text))
    return grid


def _tensor_table(tensors: Iterable[TensorDiff]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("max abs", "relative", "elements"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("tensor", overflow="fold")
    for t in tensors:
        name = Text(t.name)
        if t.not_finite:
            name.append(f" ({t.not_finite} NaN or Inf)", style="red")
        table.add_row(_format_float(t.max_abs), _format_float(t.relative), f"{t.differing / t.elements:.1%}", name)
    return table


def _format_float(n: float | None) -> str:
    return "-" if n is None else f"{n:.2e}"


def _table(title: str, rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in (title, "A", "B"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _format_tensor_meta(form: TensorForm) -> str:
    return f"{form.dtype} {list(form.shape)}"


def _format_sides(value: ValueDiff, show_all: bool) -> tuple[str, str]:
    a, b = (json.dumps(v) for v in (value.a, value.b))
    if not show_all:
        a, b = (v if len(v) <= MAX_VALUE_WIDTH else f"{v[: MAX_VALUE_WIDTH - 3]}..." for v in (a, b))
    return "(none)" if value.only == "b" else a, "(none)" if value.only == "a" else b


def _truncate(items: Sequence[Any], show_all: bool) -> Sequence[Any]:
    return items if show_all else items[:MAX_SHOWN]


def _remainder_line(items: Sequence[Any], show_all: bool) -> list[RenderableType]:
    num_left = 0 if show_all else len(items) - MAX_SHOWN
    return [Text(f"and {num_left} more: --all shows them")] if num_left > 0 else []
