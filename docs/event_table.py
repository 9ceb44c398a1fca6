"""Writes docs/reference/events.md from the structs in clustertrain/run/event_types.py.

    python docs/event_table.py

tests/unit/test_docs.py fails if the page is out of date.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from clustertrain.run import event_types

PAGE = Path(__file__).with_name("reference") / "events.md"
HEADER = """<!-- Written by docs/event_table.py from clustertrain/run/event_types.py. -->

# Events

Events are JSON objects, one per line: `{"t": <UTC epoch s>, "mono": <monotonic s>, "host": "…", "pid": 1, "event":
"NAME", …}`. `t` is the time of the write, at the end of what the event describes; `t_begin` is its start (UTC epoch
s), and `…_s` is measured with the monotonic clock. So a checkpoint's stall is from `t_begin` to `t_begin + stall_s`,
and its commit is at `t_begin + save_s`. Runs of older versions have no `t_begin`. "batch" is the controller of an
attempt, the process of the batch script on the first node.

"""


def render_page() -> str:
    """Return the page with the table of all events."""
    return f"{HEADER}{render_table()}\n"


def render_table() -> str:
    """Return the Markdown table of all events, in the order of their definition."""
    docs = _field_docs()
    lines = ["| event | writer | meaning | fields |", "|---|---|---|---|"]
    for name, event_type in event_types.EVENTS.items():
        own = [f for f in event_type.__struct_fields__ if f not in event_types.Event.__struct_fields__]
        fields = [f"`{f}`" + (f" ({_lower(doc)})" if (doc := docs[event_type.__name__].get(f)) else "") for f in own]
        lines.append(f"| `{name}` | {event_type.writer} | {_flatten(event_type.__doc__ or '')} | {', '.join(fields)} |")
    return "\n".join(lines)


def _field_docs() -> dict[str, dict[str, str]]:
    """Return the docstrings under the fields, by class and field."""
    tree = ast.parse(Path(event_types.__file__).read_text())
    docs: dict[str, dict[str, str]] = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        fields = docs[cls.name] = {}
        for field, below in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(field.target, ast.Name):
                assert isinstance(below.value, ast.Constant)
                fields[field.target.id] = _flatten(str(below.value.value))
    return docs


def _flatten(docstring: str) -> str:
    text = re.sub(r":(?:data|class|func):`(?:[\w.]+\.)?(\w+)`", r"`\1`", " ".join(docstring.split()))
    return text.removesuffix(".").replace("|", "\\|")


def _lower(text: str) -> str:
    return text[0].lower() + text[1:] if text[1:2].islower() else text


if __name__ == "__main__":
    PAGE.write_text(render_page())
