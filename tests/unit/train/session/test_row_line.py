"""The printed row of a step."""

from __future__ import annotations

import time
from typing import Any

from clustertrain.train.session.row_line import WIDTH, RowLine

ROW: dict[str, Any] = {
    "step": 90, "t": 1_800_000_000.0, "step_s": 0.361862, "tokens_per_s": 11319.2, "data_wait_s": 0.001,
    "rss_gib": 0.48077, "sum_tokens": 5, "lr": 0.000288446, "loss": 2.75542, "grad_norm": 0.92, "clipped": 0,
    "clip_fraction": 0.0, "skipped": 0, "spike": 0, "grad_norm/layers.0": 1.0,
}  # fmt: skip


def line_of(total: int | None = 600) -> RowLine:
    line = RowLine()
    line.begin(total)
    return line


def test_what_people_look_for_comes_first() -> None:
    t = time.strftime("%H:%M:%S", time.localtime(ROW["t"]))
    expected = f"{t}  step  90/600  loss 2.755  362 ms/step  11.3k tok/s  lr 0.000288  grad_norm 0.92  0.481 GiB"
    assert line_of().format(ROW) == expected and len(expected) <= WIDTH


def test_time_left_is_that_of_the_last_printed_rows() -> None:
    line = line_of()
    line.format({**ROW, "step": 80, "t": ROW["t"] - 20.0})
    assert "loss 2.755  17m00s left  " in line.format(ROW)  # 510 steps of 2 s, with all that is between steps
    assert " left" not in line.format({**ROW, "step": 40, "t": ROW["t"] + 100.0})  # after a rollback
    assert " left" not in line.format({**ROW, "step": 600, "t": ROW["t"] + 200.0})


def test_speed_is_the_mean_since_the_last_printed_row() -> None:
    line = RowLine()
    sums = {"sum_step_s": 20.0, "sum_tokens": 1000, "sum_data_wait_s": 0.0}
    assert "500 ms/step" in line.format({"step": 10, "step_s": 0.5, "tokens_per_s": 200.0, "data_wait_s": 0.0, **sums})
    sums = {"sum_step_s": 22.0, "sum_tokens": 3000, "sum_data_wait_s": 1.0}
    row = {"step": 20, "step_s": 0.01, "tokens_per_s": 1e6, "data_wait_s": 0.0, "samples_per_s": 100.0, **sums}
    assert line.format(row) == "step 20  200 ms/step  50% data wait  1k tok/s  5 samples/s"
    after_rollback = {"step": 15, "step_s": 0.01, "sum_step_s": 21.0}
    assert line.format(after_rollback) == "step 15  10.0 ms/step"


def test_unknown_total_leaves_out_the_time_left() -> None:
    line = line_of(None)
    line.format({**ROW, "step": 80, "t": ROW["t"] - 20.0})
    assert "step 90  loss 2.755  362 ms/step" in line.format(ROW)


def test_evaluation_and_problems_precede_the_speed() -> None:
    row = {**ROW, "validation_loss": 2.5, "validation_accuracy/night": 0.1, "skipped": 1, "data_wait_s": 0.1}
    text = line_of().format(row)
    assert "  loss 2.755  skipped  validation_loss 2.5  362 ms/step  28% data wait" in text


def test_line_is_not_wider_than_the_limit_and_short_values_still_fit() -> None:
    row = {**ROW, "a_scalar_with_a_very_long_name_of_the_users_own_choice": 1.0, "n": 3}
    text = line_of().format(row)
    assert len(text) <= WIDTH and text.endswith("  n 3") and "very_long" not in text


def test_odd_values_are_printed() -> None:
    row = {"step": 1, "loss": float("nan"), "lr": None, "step_s": float("inf"), "phase": "warm-up"}
    assert line_of(None).format(row) == "step 1  loss nan  lr None  phase warm-up"
