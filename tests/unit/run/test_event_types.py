"""The schema of the event logs, compared with the calls that write events."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import clustertrain
from clustertrain.run import event_types, events
from clustertrain.telemetry.alerts import gate

PACKAGE = Path(clustertrain.__file__).parent
WRITERS = {
    "write",
    "write_event",
    "_write_event",
    "emit",
    "emit_event",
    "_emit_event",
    "_on_event",
    "_report",
    "log_user_event",
}
A_WRITER = re.compile(rf"\b({'|'.join(WRITERS)})\s*\(")
CONSTANTS = {"WARNING_EVENT": "training_warning"}


def find_writes() -> Iterator[tuple[str, str, set[str]]]:
    """Yield place, event name and field names of each call that writes an event."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if not A_WRITER.search(source):
            continue  # most: parsing them all takes a second
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = [n for arg in node.args[:2] if (n := _event_name(arg)) is not None]
            if function in WRITERS and names:
                fields = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", names[0], fields


def _event_name(arg: ast.expr) -> str | None:
    if isinstance(arg, ast.Name):
        return CONSTANTS.get(arg.id)
    is_name = isinstance(arg, ast.Constant) and isinstance(arg.value, str) and arg.value.isidentifier()
    return arg.value if is_name else None  # type: ignore[attr-defined]


@pytest.mark.long
def test_every_written_event_and_field_has_a_schema() -> None:
    writes = list(find_writes())
    unknown = [(place, name) for place, name, _ in writes if name not in event_types.EVENTS]
    assert unknown == []
    undeclared = [
        (place, name, fields - set(event_types.EVENTS[name].__struct_fields__)) for place, name, fields in writes
    ]
    assert [row for row in undeclared if row[2]] == []
    assert set(event_types.EVENTS) - {name for _, name, _ in writes} == set()


def test_alert_event_has_the_fields_of_an_alert() -> None:
    assert set(gate.Alert.__struct_fields__) <= set(event_types.AlertEvent.__struct_fields__)


def test_event_names_are_class_names_in_snake_case() -> None:
    assert event_types.EVENTS["gpu_lost"] is event_types.GpuLost
    assert event_types.EVENTS["ended"] is event_types.Ended


def test_field_types_are_read_from_the_annotations() -> None:
    types = event_types.collect_field_types()
    assert (types["step"], types["job_id"], types["nodes"], types["options"]) == (float, str, list, dict)
    assert types["ended_by_script"] is bool
    assert "value" not in types  # several types


def test_every_event_type_can_be_built() -> None:
    for name, event_type in event_types.EVENTS.items():
        document = {"event": name, "t": 1.0, "step": 3} if name != "session_started" else {"event": name, "t": 1.0}
        assert isinstance(msgspec.convert(document, event_type), event_type)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"step": 4, "restore_s": 0.5, "later": 1}, (4, 0.5)),
        ({"step": "four", "restore_s": 0.5}, (None, 0.5)),
        ({"step": None}, (None, None)),
        ({}, (None, None)),
    ],
    ids=["unknown field", "wrong type", "null", "absent"],
)
def test_damaged_fields_are_absent_from_the_struct(
    fields: dict[str, object], expected: tuple[int | None, float | None]
) -> None:
    log = events.filter_valid([{"t": 1.0, "event": "restored", **fields}, {"t": 2.0, "event": "stopped"}])
    restored = events.select_last(log, event_types.Restored)
    assert restored is not None and (restored.step, restored.restore_s) == expected
    assert events.select_last(log, event_types.Ended) is None
