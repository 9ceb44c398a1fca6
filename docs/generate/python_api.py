"""The page of every public name of ``clustertrain``, from their signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import clustertrain
from docs.generate import docstrings

_HEADER = "<!-- Written by python -m docs.generate from the names that clustertrain exports. -->\n"


def render() -> str:
    """Return the page of every public name of ``clustertrain``."""
    parts = [f"{_HEADER}\n# Python API", inspect.cleandoc(str(clustertrain.__doc__))]
    for name in clustertrain.__all__:
        thing = getattr(clustertrain, name)
        if inspect.isclass(thing):
            parts.append(f"## `{name}`")
            parts.append(_docstring(thing))
            for attribute, member in vars(thing).items():
                if not attribute.startswith("_"):
                    parts.extend(_member_parts(name, attribute, member))
        elif inspect.isfunction(thing):
            parts.extend((f"## `{name}{_signature(thing)}`", _docstring(thing)))
        elif inspect.ismodule(thing):
            parts.extend((f"## `{name}`", _docstring(thing)))
        else:
            parts.extend((f"## `{name}`", "The version of the package."))
    return "\n\n".join(parts) + "\n"


def _member_parts(owner: str, name: str, member: object) -> Iterator[str]:
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    if isinstance(member, property):
        yield f"### `{owner}.{name}`"
        yield _docstring(member)
    elif inspect.isfunction(member):
        yield f"### `{owner}.{name}{_signature(member)}`"
        yield _docstring(member)


class _Text:
    """Something that a signature shows without quotes: an annotation, or the name of a class."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(function: object) -> str:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [p.replace(annotation=_unquote(p.annotation), default=_name(p)) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=_unquote(signature.return_annotation)))


def _unquote(annotation: object) -> object:
    return _Text(annotation) if isinstance(annotation, str) else annotation


def _name(parameter: inspect.Parameter) -> object:
    """Return the default of a parameter; a class by its name."""
    default = parameter.default
    return _Text(default.__qualname__) if isinstance(default, type) and default is not parameter.empty else default


def _docstring(thing: object) -> str:
    text = inspect.getdoc(thing)
    assert text, f"{thing} has no docstring"
    return docstrings.paragraphs(text)
