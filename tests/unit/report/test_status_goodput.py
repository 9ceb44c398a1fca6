"""The goodput table of `status`: times and shares add up."""

from __future__ import annotations

import io
import random
import re

import pytest

from clustertrain.report import status
from clustertrain.report.terminal import ASCII, emit, make_console
from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput


def render_table(parts: Goodput) -> str:
    out = io.StringIO()
    emit(make_console(out, 100), status.goodput_table(parts, ASCII, 100))
    return out.getvalue()


def parse_seconds(text: str) -> int:
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))


@pytest.mark.parametrize("seed", range(20))
def test_times_and_shares_add_up_to_the_wall_time(seed: int) -> None:
    rng = random.Random(seed)
    values = {
        part: rng.choice([0.0, rng.uniform(0, 1), rng.uniform(0, 100), 10 ** rng.uniform(0, 7)])
        for part in TIME_CATEGORIES
    }
    wall_s = sum(values.values())
    text = render_table(Goodput(**values, wall_s=wall_s, ratio=values["productive_s"] / wall_s))
    table = [line for line in text.splitlines() if re.search(r" \d+%", line) and "goodput" not in line]
    assert len(table) == sum(v > 0 for v in values.values())
    assert sum(parse_seconds(re.search(r"(\w+s) +\d+%", line)[1]) for line in table) == round(wall_s)  # type: ignore[index]
    assert sum(int(re.search(r" (\d+)%", line)[1]) for line in table) == 100  # type: ignore[index]
    assert parse_seconds(re.search(r"wall time +(\w+)", text)[1]) == round(wall_s)  # type: ignore[index]


def test_title_and_row_show_the_same_share() -> None:
    text = render_table(Goodput(wall_s=1000.0, productive_s=995.0, queue_s=5.0, ratio=0.995, effective_ratio=1.0))
    share = re.search(r"goodput (\d+)%", text)
    assert share is not None and re.search(rf"productive steps +16m35s +{share[1]}%", text)
    assert "; 100% of the allocated time)" in text


def test_run_that_has_not_started_shows_only_wall_time() -> None:
    assert re.search(r"wall time +0s", render_table(Goodput()))


def test_data_wait_is_shown_within_steps() -> None:
    text = render_table(Goodput(wall_s=100.0, productive_s=60.0, repeated_s=20.0, lost_s=20.0, data_wait_s=8.0))
    assert "rank 0 waited for data: 8.00 s, 10.0% of the step time" in text


@pytest.mark.parametrize("width", [50, 60, 80])
def test_bars_leave_room_for_the_rest(width: int) -> None:
    out = io.StringIO()
    ledger = Goodput(productive_s=900_000.0, checkpoint_stall_s=99_000.0, queue_s=1.0, wall_s=999_001.0)
    emit(make_console(out, width), status.goodput_table(ledger, ASCII, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and any("#" in line for line in lines)
    assert any("checkpoint stall" in line and "1d03h30m00s" in line for line in lines)
