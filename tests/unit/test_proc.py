"""Starting child processes."""

from __future__ import annotations

import ast
import re

import pytest

from tests.paths import ROOT


def _starts_module(tree: ast.AST) -> bool:
    """Return whether a list in the source has ``-m`` after another argument, as in ``[python, "-m", module]``.

    After the word "python" it is a command that a user has typed, which starts as typed.
    """
    return any(
        isinstance(element, ast.Constant) and element.value == "-m"
        for node in ast.walk(tree)
        if isinstance(node, ast.List | ast.Tuple) and not _is_word_python(node.elts[:1])
        for element in node.elts[1:]
    )


def _is_word_python(elements: list[ast.expr]) -> bool:
    return any(isinstance(element, ast.Constant) and element.value == "python" for element in elements)


@pytest.mark.parametrize(
    ("source", "starts"),
    [
        ('[python, "-m", module]', True),
        ('(sys.executable, "-P", "-m", module)', True),
        ('[*python, *(["-m"] if is_module else []), program]', False),
        ('argument in ("-m", "--")', False),
        ('["python", "-m", *words]', False),
    ],
)
def test_lists_that_start_modules_are_recognized(source: str, starts: bool) -> None:
    assert _starts_module(ast.parse(source)) is starts


def test_python_modules_start_through_python_module_argv() -> None:
    """Only :func:`clustertrain.proc.python_module_argv` writes ``-m``: a call without ``-P`` imports from the cwd."""
    package = ROOT / "clustertrain"
    sources = {p: p.read_text() for p in package.rglob("*.py")}
    # Few have the argument: parsing them all takes a second.
    paths = [p for p, text in sources.items() if re.search("""["']-m["']""", text) and _starts_module(ast.parse(text))]
    assert paths == [package / "proc.py"]
