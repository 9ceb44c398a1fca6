"""The page of events, from the structs of ``clustertrain/run/event_types.py``."""

from __future__ import annotations

from clustertrain.config.parsing.reference import field_descriptions
from clustertrain.run import event_types
from docs.generate import docstrings

_HEADER = """<!-- Written by python -m docs.generate from clustertrain/run/event_types.py. -->

# Events

Events are JSON objects, one per line: `{"t": <UTC epoch s>, "monotonic_s": <monotonic s>, "host": "…", "pid": 1,
"event": "NAME", …}`. `t` is the time of the write, at the end of what the event describes; `t_begin` is its start (UTC
epoch s), and `…_s` is measured with the monotonic clock. So a checkpoint's stall is from `t_begin` to `t_begin +
stall_s`, and its commit is at `t_begin + save_s`. Runs of older versions have no `t_begin`. The batch process of an
attempt is the process of the batch script on the first node.

"""


def render() -> str:
    """Return the page with the table of all events, in the order of their definition."""
    lines = ["| event | writer | meaning | fields |", "|---|---|---|---|"]
    for name, event_type in event_types.EVENTS.items():
        descriptions = {f: docstrings.one_line(text) for f, text in field_descriptions(event_type).items()}
        own_fields = [f for f in event_type.__struct_fields__ if f not in event_types.Event.__struct_fields__]
        fields = [f"`{f}`" + (f" ({_as_remark(descriptions[f])})" if f in descriptions else "") for f in own_fields]
        meaning = docstrings.one_line(event_type.__doc__ or "").removesuffix(".")
        lines.append(f"| `{name}` | {event_type.writer} | {meaning} | {', '.join(fields)} |")
    return "\n".join([_HEADER + lines[0], *lines[1:]]) + "\n"


def _as_remark(text: str) -> str:
    text = text.removesuffix(".")
    return text[0].lower() + text[1:] if text[1:2].islower() else text
