"""Messages name documentation pages by an address, and the pages exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

from clustertrain.documentation import SITE, page_url
from tests.paths import ROOT

MODULES = sorted((ROOT / "clustertrain").rglob("*.py"))


def list_texts(tree: ast.Module) -> Iterator[str]:
    """Yield all strings of a module except docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_pages_in_messages_exist() -> None:
    pages = {page for module in MODULES for page in re.findall(r"page_url\(['\"](.*?)['\"]\)", module.read_text())}
    assert len(pages) >= 5
    assert [page for page in pages if not (ROOT / "docs" / f"{page}.md").is_file()] == []


def test_messages_name_no_file_that_a_wheel_lacks() -> None:
    named = {
        (str(module.relative_to(ROOT)), text)
        for module in MODULES
        if "docs/" in (source := module.read_text())  # few: parsing them all takes seconds
        for text in list_texts(ast.parse(source))
        if re.search(r"\bdocs/[\w/-]+\.md", text)
    }
    assert named == set()


def test_site_is_that_of_the_package() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Documentation"] == SITE
    assert page_url("guides/data") == f"{SITE}/guides/data/"
