"""``clustertrain recipe``: what the keys of a recipe mean, for people and for editors."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import json_option, print_formatted, print_json, set_option
from clustertrain.cli.completion import complete_keys
from clustertrain.errors import NotFound, UsageError

if TYPE_CHECKING:
    from clustertrain.config.parsing.reference import Key, Table
    from clustertrain.report.documents.tools import RecipeKeys
    from clustertrain.submit.recipe import ParsedRecipe

URL = "https://json-schema.org/draft/2020-12/schema"


@click.group()
def recipe() -> None:
    """Show a recipe with its defaults; explain keys; print the JSON Schema."""


@recipe.command(short_help="Show the type, default, range and meaning of a key.")
@click.argument("key", metavar="KEY", shell_complete=complete_keys)
@json_option
def explain(key: str, as_json: bool) -> None:
    """Show the type, default, range and meaning of KEY, such as optim.lr, or the keys of a table, such as optim."""
    from clustertrain.report.terminal import emit, make_console

    document = explain_keys(key)
    if as_json:
        print_json("recipe-explain", document)
        return
    console = make_console()
    width = min(console.width, 100)
    parts = []
    for k in document.keys:
        parts.append(f"{k.key}  {k.type}{f', {k.allowed}' if k.allowed else ''}; default {k.default}")
        parts.append(textwrap.indent(textwrap.fill(k.description, width - 2), "  ") + "\n")
    emit(console, *parts)


def explain_keys(key: str) -> RecipeKeys:
    """Return what a key means, or all keys of a table. Raise NotFound, with the nearest names, if there is none."""
    from clustertrain.report.documents.tools import RecipeKey, RecipeKeys

    name = key.rstrip("=")
    tables = _tables()
    table = tables.get(name)
    found = _find_key(tables, name)
    if table is None and found is None:
        raise NotFound(f"a recipe has no key {name!r}", fix=_suggest(tables, name))
    keys = {name: found} if found is not None else {f"{name}.{k.name}": k for k in table.keys} if table else {}
    return RecipeKeys(keys=tuple(RecipeKey(key=n, **_plain(k)) for n, k in keys.items()))


@recipe.command(short_help="Print the JSON Schema of recipes, for editors.")
def schema() -> None:
    """Print the JSON Schema of recipes, with which editors complete and check the keys of a TOML file.

    \b
    clustertrain recipe schema > recipe.schema.json
    and as the first line of a recipe:  #:schema ./recipe.schema.json
    """
    print_formatted(build_schema())


@recipe.command(short_help="Show every key of a recipe with its value.")
@click.argument("file", metavar="[RECIPE.toml]", default="")
@set_option
def show(file: str, assignments: tuple[str, ...]) -> None:
    """Show every key of RECIPE.toml with the value that a run gets: as TOML, with where it comes from.

    Keys without a comment have their default. A plan chooses what is 0 or "auto" for its number of GPUs.
    """
    from clustertrain.submit.recipe import is_recipe_path, parse_recipe
    from clustertrain.submit.request import SubmitRequest

    if file and not is_recipe_path(Path(file)):
        raise UsageError(f"{file}: not a recipe", fix="name a .toml file")
    click.echo(_format_values(parse_recipe(SubmitRequest(target=file, assignments=assignments))), nl=False)


def _format_values(parsed: ParsedRecipe) -> str:
    """Return the recipe as TOML, with a comment on each value that is no default."""
    import msgspec
    import tomlkit

    from clustertrain.config.checks.unused_keys import iter_keys
    from clustertrain.config.parsing.presets import apply_preset
    from clustertrain.config.recipe import Recipe

    sources = [
        (dict(iter_keys(parsed.overrides)), "--set"),
        (dict(iter_keys(parsed.file_document)), json.dumps(parsed.request.target)[1:-1]),  # one line
        (dict(iter_keys(apply_preset(parsed.document))), "model.preset"),
    ]
    defaults = dict(iter_keys(msgspec.to_builtins(Recipe())))

    def build_table(values: dict[str, Any], prefix: str) -> tomlkit.items.Table:
        table = tomlkit.table()
        for name, value in values.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict):
                table[name] = build_table(value, f"{key}.")
            elif value is not None:  # which TOML lacks: unset
                table[name] = tomlkit.item(value)
                source = next((label for keys, label in sources if key in keys), "model.init")
                if value != defaults.get(key, value) or source != "model.init":
                    table[name].comment(source)
        return table

    document = tomlkit.document()
    values = msgspec.to_builtins(parsed.recipe)
    for name in sorted(values, key=lambda name: isinstance(values[name], dict)):  # keys before tables
        document.update(build_table({name: values[name]}, ""))
    return tomlkit.dumps(document)


def format_schema() -> str:
    """Return the JSON Schema of a recipe as the text of a file."""
    return json.dumps(build_schema(), indent=1, ensure_ascii=False) + "\n"


def build_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe, with a description for each key."""
    import msgspec

    from clustertrain.config.job import JobSpec
    from clustertrain.config.parsing.reference import field_descriptions, format_description
    from clustertrain.config.recipe import Recipe

    (top, job), components = msgspec.json.schema_components([Recipe, JobSpec], ref_template="#/$defs/{name}")
    structs = _find_structs(Recipe) | _find_structs(JobSpec)
    for name, definition in components.items():
        definition.pop("title", None)
        texts = field_descriptions(structs[name]) if name in structs else {}
        for field, settings in definition.get("properties", {}).items():
            if field in texts:
                settings["description"] = format_description(texts[field])
        if "description" in definition:
            definition["description"] = format_description(definition["description"])
    root = components.pop(top["$ref"].rpartition("/")[2])
    root["properties"] |= {
        "job": job,
        "env": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Environment variables of the ranks.",
        },
    }
    return {"$schema": URL, "title": "Recipe of clustertrain", **root, "$defs": components}


def _find_structs(struct: Any) -> dict[str, Any]:
    """Return the struct and those of the tables inside it, by class name."""
    from clustertrain.config.parsing.reference import collect_tables

    return {table.struct.__name__: table.struct for table in collect_tables(struct)}


def _tables() -> dict[str, Table]:
    from clustertrain.config.job import JobSpec
    from clustertrain.config.parsing.reference import collect_tables
    from clustertrain.config.recipe import Recipe

    return {t.name: t for t in (*collect_tables(Recipe), *collect_tables(JobSpec, "job")) if t.name}


def _find_key(tables: dict[str, Table], name: str) -> Key | None:
    table, _, key = name.rpartition(".")
    return next((k for k in tables[table].keys if k.name == key), None) if table in tables else None


def _suggest(tables: dict[str, Table], name: str) -> str:
    """Return a sentence that lists the keys and tables that ``name`` may mean; a key may lack its table."""
    from clustertrain.config.parsing.documents import find_near, suggest_key

    known = [f"{t}.{k.name}" for t in tables for k in tables[t].keys]
    table, dot, key = name.rpartition(".")
    if table in tables:
        return suggest_key(key, [k.name for k in tables[table].keys], f"{table}.", known)
    near = find_near(name, [*tables, *known]) if dot else []
    return f"did you mean {' or '.join(near)}?" if near else suggest_key(key, [*tables], "", known)


def _plain(key: Key) -> dict[str, str]:
    """Return the parts of a key without the marks of reStructuredText and Markdown."""
    texts = {name: text for name, text in key._asdict().items() if name != "name"}
    # Code in a description is in double backticks; a string in it has quotes of its own.
    return {name: re.sub(r"``(.*?)``|`", lambda code: code[1] or "", text) for name, text in texts.items()}
