"""Docstrings as Markdown."""

from __future__ import annotations

import inspect
import re

from clustertrain.config.parsing.reference import to_markdown


def one_line(docstring: str) -> str:
    """Return a docstring as one line for a cell of a table."""
    return to_markdown(" ".join(docstring.split())).replace("|", "\\|")


def paragraphs(docstring: str) -> str:
    """Return a docstring with its sections, such as ``Args:``, as lists."""
    lines: list[str] = []
    in_section = False
    for line in to_markdown(inspect.cleandoc(docstring)).splitlines():
        if re.fullmatch(r"(Args|Raises|Returns|Yields):", line):
            lines.extend((f"**{line.removesuffix(':')}**", ""))
            in_section = True
        elif in_section and (entry := re.fullmatch(r" {4}(\w[\w, ]*): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif in_section and line.startswith("    "):
            lines.append(f"  {line.strip()}" if lines and lines[-1].startswith(("- ", "  ")) else line.strip())
        else:
            in_section = in_section and not line.strip()
            lines.append(re.sub(r"::$", ":", line))  # of a code block, which Markdown also indents
    return "\n".join(lines)
