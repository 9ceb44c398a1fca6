"""JSON documents: their keys and figures, and their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from click.testing import CliRunner

from clustertrain.cli.schema import schema
from clustertrain.errors import NotFound
from clustertrain.report.documents.encode import round_figure, to_document
from clustertrain.report.documents.registry import DOCUMENTS
from clustertrain.report.documents.schemas import build_schema
from clustertrain.report.runs.sweep import SweepResults, SweepRow
from clustertrain.report.top.view import EventView, RunView
from tests.documents import check_document
from tests.paths import ROOT

CLI = "".join(path.read_text() for path in sorted((ROOT / "clustertrain" / "cli").rglob("*.py")))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_schema_is_valid_and_describes_its_structs(name: str) -> None:
    document = build_schema(name)
    jsonschema.Draft202012Validator.check_schema(document)
    for definition in (document, *document.get("$defs", {}).values()):
        assert definition["description"] and "``" not in json.dumps(definition)
        assert definition["required"] == list(definition["properties"])
    assert next(iter(document["properties"])) == "schema_version"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_key_has_a_description_in_the_terms_of_json(name: str) -> None:
    texts = dict(_iter_descriptions(build_schema(name), name))
    assert not [key for key, text in texts.items() if not text], "add a docstring under the field"
    # Neither Python's names of values nor roles of its documentation.
    assert not [key for key, text in texts.items() if re.search(r"\bNone\b|:[a-z]+:`", text)]


def _iter_descriptions(node: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield the description, if any, of each key of the objects in a schema, and of the objects with keys."""
    if isinstance(node, list):
        for item in node:
            yield from _iter_descriptions(item, where)
    if not isinstance(node, dict):
        return
    keys = node.get("properties", {})
    if keys:
        yield where, node.get("description", "")
    for key, settings in keys.items():
        yield f"{where}.{key}", settings.get("description", "")
        yield from _iter_descriptions(settings, f"{where}.{key}")
    for word, inner in node.items():
        if word == "$defs":
            for name, definition in inner.items():
                yield from _iter_descriptions(definition, name)
        elif word != "properties":
            yield from _iter_descriptions(inner, where)


def test_nullable_keys_say_when_they_are_null() -> None:
    """In their own description or, where it is the same for all keys, in that of their object."""
    unclear: set[str] = set()
    for name in DOCUMENTS:
        document = build_schema(name)
        for title, definition in {name: document, **document.get("$defs", {})}.items():
            for key, value in definition.get("properties", {}).items():
                texts = f"{value.get('description')} {definition.get('description')}".lower()
                if '"null"' in json.dumps(value) and "null" not in texts and "unset:" not in texts:
                    unclear.add(f"{title}.{key}")
    assert not unclear


def test_every_document_is_printed_by_a_command_and_every_other_is_refused() -> None:
    printed = set(re.findall(r'print_json(?:_line)?\(\s*"([a-z-]+)"', CLI))
    assert printed == set(DOCUMENTS)
    with pytest.raises(NotFound, match="no document 'lists'") as refused:
        build_schema("lists")
    assert "list" in str(refused.value.fix)


def test_points_in_time_have_their_unit_in_the_key_and_milliseconds() -> None:
    events = [EventView(t=1700000000.1234567, event="ended", text="")]
    view = RunView(t=1.0, run="net", allocation_end=1700000000.9999, start_estimate=None, events=events, step_s=1 / 3)
    document = to_document("top", view)
    check_document("top", json.dumps(document))
    assert document["events"][0]["time_unix_s"] == 1700000000.123
    assert (document["allocation_end_unix_s"], document["start_estimate_unix_s"]) == (1700000001.0, None)
    assert document["step_s"] == 0.333333333 and not {"t", "allocation_end"} & document.keys()


def test_settings_keep_all_their_digits_and_metrics_named_like_times_their_names() -> None:
    values = {"optim.lr": 3.1622776601683795e-05, "t": 1.23456789012345}
    row = SweepRow(task=0, run="a", job_id=None, values=values, state="running", attempts=1, step=1, total_steps=2)
    results = SweepResults(sweep="s", metric="loss", higher_is_better=False, runs=[row], best=None, deleted=0, notes=[])
    document = to_document("sweep-show", results)
    check_document("sweep-show", json.dumps(document))
    assert document["runs"][0]["values"] == values


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1 + 0.2, 0.3),
        (2.0**60, 2.0**60),  # such as tokens and FLOP
        (123456789012345.75, 123456789000000.0),
        (-1.23456789012e-30, -1.23456789e-30),
    ],
)
def test_figures_have_nine_digits_and_whole_numbers_all(value: float, shown: float) -> None:
    assert round_figure(value) == shown


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_null(value: float) -> None:
    document = msgspec.json.encode(to_document("top", RunView(t=1.0, run="net", loss=value)))
    assert json.loads(document)["loss"] is None
    check_document("top", document.decode())


def test_command_prints_a_schema_or_the_names() -> None:
    def call(*argv: str) -> Any:
        return CliRunner().invoke(schema, argv, standalone_mode=False)

    assert json.loads(call("status").stdout) == build_schema("status")
    assert [line.split()[0] for line in call().stdout.splitlines()] == list(DOCUMENTS)
    assert isinstance(call("no-such").exception, NotFound)
