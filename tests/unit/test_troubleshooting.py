"""The guide to troubleshooting: every message in it is one that the code prints, and every ending is in it."""

from __future__ import annotations

import ast
import re

from clustertrain.run import endings
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
WILD = "…"


def list_messages() -> list[str]:
    """Return what stands in backticks in the first column of the tables of messages."""
    found = []
    for table in re.findall(r"^\| (?:message|you see) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for row in table.splitlines():
            found += [code for code in row.split(" | ")[0].split("`")[1::2] if " " in code]
    return found


def render(node: ast.expr) -> str:
    """Return the text of a string or f-string, with `WILD` for what it inserts."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(render(value) for value in node.values)
    return WILD


def test_messages_are_those_of_the_code() -> None:
    messages = {m: [part for part in m.split(WILD) if part.strip(" :,")] for m in list_messages()}
    assert len(messages) > 12
    missing = set(messages)
    for path in (ROOT / "clustertrain").rglob("*.py"):
        source = path.read_text()
        near = {m for m in missing if max(messages[m], key=len).strip()[:12] in source}
        if not near:
            continue
        texts = [render(n) for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.Constant, ast.JoinedStr))]
        for message in near:
            pattern = re.compile(".*".join(map(re.escape, messages[message])), re.DOTALL)
            if any(pattern.search(text) for text in texts):
                missing.discard(message)
    assert not missing


def test_every_ending_has_its_first_steps() -> None:
    named = set(re.findall(r"`([a-z_]+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE))))
    assert set(endings.DESCRIPTIONS) - {endings.COMPLETED, endings.CANCELLED} <= named
