"""The JSON Schemas of the documents, from the structs: types, and their docstrings as descriptions."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from clustertrain.config.parsing.reference import field_descriptions, format_description
from clustertrain.documentation import SITE
from clustertrain.report.documents.encode import SCHEMA_VERSION, TIME_KEYS, is_time
from clustertrain.report.documents.registry import find_document

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def build_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of the document ``name``.

    Every key is required: a document has null for what is unknown. Further keys are allowed, since a later release
    may add them.

    Raises:
        NotFound: there is no such document.
    """
    document = find_document(name)
    struct = document.load_type()
    (top,), definitions = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    structs = {found.__name__: found for found in _find_structs(struct, set())}
    for title, definition in definitions.items():
        if title in structs:
            _complete(definition, structs[title])
    root = definitions.pop(top["$ref"].rpartition("/")[2])
    version = {"const": document.version, "description": "Version of this schema; see the reference of JSON documents."}
    return {
        "$schema": DIALECT,
        "$id": f"{SITE}/reference/json/{name}.json",
        "title": f"clustertrain {document.command}",
        **root,
        "properties": {SCHEMA_VERSION: version, **root["properties"]},
        "required": [SCHEMA_VERSION, *root["required"]],
        **({"$defs": definitions} if definitions else {}),
    }


def _complete(definition: dict[str, Any], struct: Any) -> None:
    """Add descriptions to the definition of ``struct``, rename points in time, and require every key."""
    definition.pop("title", None)
    if "description" in definition:
        definition["description"] = format_description(definition["description"])
    texts = {
        name: text
        for base in reversed(struct.__mro__)
        if base.__module__.startswith("clustertrain.")
        for name, text in field_descriptions(base).items()
    }
    types = typing.get_type_hints(struct)
    properties: dict[str, Any] = {}
    for name, settings in definition.get("properties", {}).items():
        has_time = is_time(name, types.get(name))
        # A default says what a reader of a file may leave out, and a document leaves out nothing.
        settings.pop("default", None)
        parts = [texts.get(name, ""), "UTC, seconds since 1970-01-01." if has_time else ""]
        if text := " ".join(filter(None, parts)):
            settings["description"] = format_description(text)
        properties[TIME_KEYS[name] if has_time else name] = settings
    definition["properties"] = properties
    definition["required"] = list(properties)


def _find_structs(annotation: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield all structs and dataclasses inside a type, each once."""
    is_class = isinstance(annotation, type)
    if is_class and (issubclass(annotation, msgspec.Struct) or dataclasses.is_dataclass(annotation)):
        if annotation in seen:
            return
        seen.add(annotation)
        yield annotation
        for inner in typing.get_type_hints(annotation).values():
            yield from _find_structs(inner, seen)
    for argument in typing.get_args(annotation):
        yield from _find_structs(argument, seen)
