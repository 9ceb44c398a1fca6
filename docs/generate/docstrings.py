"""Docstrings as Markdown."""

from __future__ import annotations

import inspect
import re


def one_line(docstring: str) -> str:
    """Return a docstring as one line for a cell of a table."""
    return _inline_code(" ".join(docstring.split())).replace("|", "\\|")


def paragraphs(docstring: str) -> str:
    """Return a docstring with its sections, such as ``Args:``, as lists."""
    lines: list[str] = []
    in_section = False
    for line in _inline_code(inspect.cleandoc(docstring)).splitlines():
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


def _inline_code(text: str) -> str:
    """Turn Sphinx roles and double backticks into Markdown's code; a role keeps only the last part of its path."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")
