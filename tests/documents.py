"""Checks of JSON documents against their schemas."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema

from clustertrain.report.documents.schemas import build_schema


@functools.cache
def _validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(forbid_other_keys(build_schema(name)))


def forbid_other_keys(schema: Any) -> Any:
    """Return the schema with ``additionalProperties: false`` wherever it lists properties."""
    if isinstance(schema, dict):
        closed = {key: forbid_other_keys(inner) for key, inner in schema.items()}
        is_object = schema.get("type") == "object" and "properties" in schema
        return {**closed, "additionalProperties": False} if is_object else closed
    return [forbid_other_keys(inner) for inner in schema] if isinstance(schema, list) else schema


def check_document(name: str, text: str) -> Any:
    """Return the JSON document ``name`` after checking it against its schema, where no other keys are allowed."""
    document = json.loads(text)
    _validator(name).validate(document)
    return document
