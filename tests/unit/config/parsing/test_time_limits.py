from __future__ import annotations

import pytest

from clustertrain.config.parsing.time_limits import parse_time_limit_s
from clustertrain.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("0", None),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-12:30", 131400),
        ("0-0:1:5", 65),
        ("", None),
    ],
)
def test_slurm_time_formats(text: str, seconds: float | None) -> None:
    assert parse_time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["soon", "1h", "-5", "1:2:3:4", "$(date)"])
def test_invalid_time_limit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="time limit"):
        parse_time_limit_s(text)
