"""``clustertrain checkpoint list`` and ``diff`` as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clustertrain import schema
from clustertrain.checkpoint.offline.diff import Comparison, Form, OtherBytes, OtherValue
from clustertrain.plan.layout import Layout, counted

SHOWN = 10  # of each kind of difference, unless all are asked for
VALUE_WIDTH = 40  # characters of a value, likewise


def size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def listing(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Rows of :func:`clustertrain.checkpoint.offline.inspect.list_checkpoints`."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("step", "size", "ranks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    table.add_column("engine", no_wrap=True)
    judged = next((row["metric"]["name"] for row in reversed(rows) if row.get("metric")), None)
    table.add_column("state", no_wrap=True)
    if judged:
        table.add_column(judged, justify="right", no_wrap=True)
    for row in rows:
        ranks = str(row["world_size"] or "-")
        cells = [str(row["step"]), size(row["bytes"]), ranks, _layout(row["layout"]), row["engine"] or "-", _state(row)]
        table.add_row(*cells, *([_judged(row, judged)] if judged else []))
    return table


def _judged(row: Mapping[str, Any], by: str) -> Text:
    metric = row.get("metric")
    if not metric or metric["name"] != by:
        return Text("-")
    return Text(
        f"best {metric['value']:.6g}" if row.get("best") else f"{metric['value']:.6g}", style="green" * row["best"]
    )


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with those of ``rows`` with which something is: sentences with paths, which no table should break
    up."""
    found = ((r["step"], r.get("damage") or r.get("unreadable")) for r in rows)
    return [f"step {step}: {why}" for step, why in found if why]


def _layout(layout: Mapping[str, Any] | None) -> str:
    try:
        return schema.convert(layout, Layout).words() if layout else "-"
    except msgspec.ValidationError:  # of another version
        return str((layout or {}).get("strategy", "-"))


def _state(row: Mapping[str, Any]) -> str:
    if not row["committed"]:
        return "not committed"
    if "unreadable" in row:
        return "UNREADABLE"
    return {None: "committed", True: "verified", False: "DAMAGED"}[row["verified"]]


def differences(found: Comparison, *, whole: bool) -> RenderableType:
    """``whole``: each difference, and not only the first of a kind."""
    parts: list[RenderableType] = []
    if found.equal:
        parts.append(Text(f"equal: {counted(found.tensors, 'tensor')} and all values", style="green"))
    else:
        parts.append(_summary(found))
    if found.bytes:
        parts += [Text(), _bytes(_first(found.bytes, whole)), *_more(found.bytes, whole)]
    if found.forms:
        rows = [(f.name, _form(f.a), _form(f.b)) for f in _first(found.forms, whole)]
        parts += [Text(), _table("tensors of another form", rows), *_more(found.forms, whole)]
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            parts += [
                Text(),
                Text(f"only in {side}", style="bold"),
                *(Text(n, overflow="fold") for n in _first(names, whole)),
            ]
            parts += _more(names, whole)
    for title, values in (("values", found.values), ("how it was saved", found.saved)):
        if values:
            rows = [(v.name.replace("/__tuple__", ""), *_sides(v, whole)) for v in _first(values, whole)]
            parts += [Text(), _table(title, rows), *_more(values, whole)]
    if not found.ranks_compared:
        parts += [Text(), Text("What each rank kept for itself is not compared: other numbers of ranks saved them.")]
    return Group(*parts)


def _summary(found: Comparison) -> RenderableType:
    tensors = [f"{len(found.bytes)} of {found.tensors} differ"]
    kinds = [k for k in ("model", "optimizer", "other") if any(t.kind == k for t in found.bytes)]
    if kinds:
        each = (f"{k} {sum(t.kind == k for t in found.bytes)}" for k in kinds)
        tensors[0] += f" ({', '.join(each)})"
    if found.forms:
        tensors.append(f"{len(found.forms)} of another dtype or shape")
    tensors += [f"{len(n)} only in {side}" for side, n in (("A", found.only_a), ("B", found.only_b)) if n]
    values = f"{len(found.values)} differ" if found.values else "equal"
    return _pair(("tensors", "; ".join(tensors)), ("values", values))


def _pair(*rows: tuple[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, Text(text))
    return grid


def _bytes(tensors: Iterable[OtherBytes]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("max abs", "relative", "elements"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("tensor", overflow="fold")
    for t in tensors:
        name = Text(t.name)
        if t.not_finite:
            name.append(f" ({t.not_finite} not finite)", style="red")
        table.add_row(_number(t.max_abs), _number(t.relative), f"{t.differing / t.elements:.1%}", name)
    return table


def _number(n: float | None) -> str:
    return "-" if n is None else f"{n:.2e}"


def _table(title: str, rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in (title, "A", "B"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _form(form: Form) -> str:
    return f"{form.dtype} {list(form.shape)}"


def _sides(value: OtherValue, whole: bool) -> tuple[str, str]:
    a, b = (json.dumps(v) for v in (value.a, value.b))
    if not whole:
        a, b = (v if len(v) <= VALUE_WIDTH else f"{v[: VALUE_WIDTH - 3]}..." for v in (a, b))
    return "(none)" if value.only == "b" else a, "(none)" if value.only == "a" else b


def _first(things: Sequence[Any], whole: bool) -> Sequence[Any]:
    return things if whole else things[:SHOWN]


def _more(things: Sequence[Any], whole: bool) -> list[RenderableType]:
    left = 0 if whole else len(things) - SHOWN
    return [Text(f"and {left} more: --all shows them")] if left > 0 else []
