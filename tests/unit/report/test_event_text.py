"""Events as text, for people who follow a run."""

from __future__ import annotations

from typing import Any

import pytest

from clustertrain.report.event_text import format_event


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"world_size": 1, "layout": "single", "device": "cpu"}, "1 rank connected (single, cpu)"),
        ({"world_size": 4, "layout": "ddp", "device": "cuda"}, "4 ranks connected (ddp, cuda)"),
        ({"layout": "ddp", "device": "cuda"}, None),  # of another version
    ],
)
def test_ranks_are_counted(fields: dict[str, Any], text: str | None) -> None:
    assert format_event({"event": "session_started", "t": 1.0, **fields}) == text
