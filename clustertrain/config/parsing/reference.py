"""What the keys of recipes and cluster profiles mean, from the structs that parse them.

Types and defaults come from the structs, descriptions from the docstring under each field, ranges from the bounds of
:mod:`clustertrain.config.parsing.bounds` and the checks in ``__post_init__``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from clustertrain.config.parsing.bounds import BOUNDS
from clustertrain.config.parsing.dotted_keys import element_types, find_struct

StructType = type[msgspec.Struct]


@functools.cache
def class_node(struct: type[msgspec.Struct]) -> ast.ClassDef:
    """Return the syntax tree of a class."""
    node = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(node, ast.ClassDef)
    return node


def field_descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring under each field of ``struct`` that has one, as one line of reStructuredText."""
    texts = {}
    for field, text in itertools.pairwise(class_node(struct).body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts


def to_markdown(docstring: str) -> str:
    """Turn roles and double backticks of reStructuredText into code; a role keeps only the last part of its path."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", docstring)
    return text.replace("``", "`")


def format_description(docstring: str) -> str:
    """Return a docstring as the description of a JSON Schema: one line of Markdown."""
    return " ".join(to_markdown(docstring).split())


class Key(NamedTuple):
    """A key of a table. Values are in backticks."""

    name: str
    type: str
    default: str
    allowed: str
    description: str


class Table(NamedTuple):
    """A table of a TOML file."""

    name: str
    """Dotted name; empty for the top level."""
    is_list: bool
    struct: StructType
    keys: list[Key]


def _show_type(annotation: Any) -> str:
    """Return the type of a TOML value."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_show_type(arg) for arg in args if arg is not type(None)))
    if origin is Literal:
        return " or ".join(dict.fromkeys(_show_type(type(arg)) for arg in args))
    if origin in (tuple, list):
        element = _show_type(args[0])
        return f"{len(args)} {element}s" if origin is tuple and args[-1] is not ... else f"list of {element}s"
    if origin is dict:
        return "table" if args[1] is Any else f"table of {_show_type(args[1])}s"
    return {bool: "boolean", int: "integer", float: "number", str: "string"}[annotation]


def _literal_choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [_show_value(choice) for choice in typing.get_args(annotation)]
    return [choice for arg in typing.get_args(annotation) for choice in _literal_choices(arg)]


def _show_value(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def _show_default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT:
        return "required" if field.default_factory is msgspec.NODEFAULT else f"`{_show_value(field.default_factory())}`"
    return "unset" if field.default is None else f"`{_show_value(field.default)}`"


def _number(node: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _checked_names(node: ast.AST, loop_names: list[str], fields: set[str]) -> list[str]:
    """Return the fields that an expression of a check refers to, directly or through the loop around it."""
    texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    attributes = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return sorted((texts | attributes) & fields) or loop_names


@functools.cache
def _checks(struct: StructType) -> list[tuple[str, str]]:
    """Return (field, allowed values) for the comparisons and range checks in ``__post_init__``."""
    fields = set(struct.__struct_fields__)
    methods = [n for n in class_node(struct).body if isinstance(n, ast.FunctionDef) and n.name == "__post_init__"]
    methods += [n for n in class_node(struct).body if isinstance(n, ast.FunctionDef) and n.name.startswith("_check")]
    return [check for method in methods for check in _checks_in(method, [], fields)]


def _checks_in(node: ast.AST, loop_names: list[str], fields: set[str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.For):
        constants = {n.value for n in ast.walk(node.iter) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        loop_names = sorted(constants & fields)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "check_positive":
            yield from ((name, "> 0") for name in _checked_names(node.args[0], loop_names, fields))
        elif node.func.id == "check_range":
            low, high = _number(node.args[2]), _number(node.args[3])
            limits = [f"≥ {low:g}"] if low is not None else []
            limits += [f"≤ {high:g}"] if high is not None and high < 2**62 else []
            yield from ((name, limit) for name in _checked_names(node.args[0], loop_names, fields) for limit in limits)
    if isinstance(node, ast.If):
        is_any = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or)
        for test in node.test.values if is_any else [node.test]:  # type: ignore[attr-defined]
            yield from _comparison_check(test, loop_names, fields)
    for child in ast.iter_child_nodes(node):
        yield from _checks_in(child, loop_names, fields)


def _comparison_check(test: ast.expr, loop_names: list[str], fields: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the check of ``if self.name < LOW: raise`` or of ``if getattr(self, name) < LOW: raise`` in a loop."""
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Lt)):
        return
    low = _number(test.comparators[0])
    if low is not None and isinstance(test.left, ast.Attribute):
        yield from ((name, f"≥ {low:g}") for name in _checked_names(test.left, [], fields))
    elif low is not None and isinstance(test.left, ast.Call) and ast.unparse(test.left.func) == "getattr":
        yield from ((name, f"≥ {low:g}") for name in loop_names)


def _allowed(struct: StructType, field: msgspec.structs.FieldInfo, key: str) -> str:
    choices = _literal_choices(field.type)
    limits = list(dict.fromkeys(limit for name, limit in _checks(struct) if name == field.name))
    if "> 0" in limits and any(limit.startswith("≥") for limit in limits):
        limits.remove("≥ 0" if "≥ 0" in limits else "> 0")
    bound = BOUNDS.get(key)
    if bound is not None and not any(limit.startswith("≤") for limit in limits):
        limits.append(f"≤ {bound.maximum:,}" if isinstance(bound.maximum, int) else f"≤ {bound.maximum:g}")
    return ", ".join([*(f"`{choice}`" for choice in choices), *limits])


def collect_tables(
    struct: StructType, name: str = "", *, is_list: bool = False, bounds_prefix: str = ""
) -> Iterator[Table]:
    """Yield the table ``name`` of ``struct`` and, after it, the tables inside it."""
    keys, inner_tables = [], []
    descriptions = field_descriptions(struct)
    for field in msgspec.structs.fields(struct):
        key = f"{name}.{field.name}" if name else field.name
        elements = element_types(field.type)
        inner = find_struct(elements[0]) if elements else find_struct(field.type)
        if inner is not None:
            inner_tables.append((inner, key, bool(elements)))
        else:
            keys.append(
                Key(
                    field.name,
                    _show_type(field.type),
                    _show_default(field),
                    _allowed(struct, field, bounds_prefix + key),
                    descriptions.get(field.name, ""),
                )
            )
    yield Table(name, is_list, struct, keys)
    for inner, key, inner_is_list in inner_tables:
        yield from collect_tables(inner, key, is_list=inner_is_list, bounds_prefix=bounds_prefix)
