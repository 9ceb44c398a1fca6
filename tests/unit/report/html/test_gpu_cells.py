"""The table of GPUs: order, marks and columns."""

from __future__ import annotations

import numpy as np
import pytest

from clustertrain.report.html.gpu_cells import GpuTable, Row, build_table
from clustertrain.telemetry.report_schema import ThrottleShares
from tests import pages
from tests.unit.telemetry.summaries import broken, healthy, stats, with_gpu, with_gpus


def row_of(table: GpuTable, label: str) -> Row:
    return next(row for row in table.rows if row.cells[0].text == label)


def bad_cells(table: GpuTable, label: str) -> dict[str, str | None]:
    cells = row_of(table, label).cells
    return {column.key: cell.bad for column, cell in zip(table.columns, cells, strict=True) if cell.bad}


def test_worst_gpus_come_first_and_the_rest_in_order() -> None:
    table = build_table(broken())
    labels = [row.cells[0].text for row in table.rows]
    assert labels[:3] == ["n3:0", "n2:1", "n4:1"]
    assert labels[3:] == ["n1:0", "n1:1", "n2:0", "n3:1", "n4:0"]
    assert [row.severity for row in table.rows[:4]] == ["critical", "critical", "critical", None]
    assert [row.notes for row in table.rows[:3]] == ["throttled", "unused", "slow gpu"]


def test_bad_values_are_marked_with_a_reason() -> None:
    table = build_table(broken())
    assert bad_cells(table, "n2:1") == {"mean": "critical"}
    assert bad_cells(table, "n3:0") == {"temperature": "critical", "clock": "critical", "throttled": "warning"}
    assert bad_cells(table, "n1:0") == {}
    assert all(cell.why for row in table.rows for cell in row.cells if cell.bad)


def test_limits_mark_values_without_an_insight() -> None:
    summary = with_gpu(healthy(), "n1", 0, utilization=stats(0.5))
    summary = with_gpu(summary, "n1", 1, memory_used_gib=stats(79.0), memory_total_gib=80.0)
    summary = with_gpu(summary, "n2", 0, samples=50, samples_expected=100)
    table = build_table(summary)
    assert bad_cells(table, "n1:0") == {"mean": "warning"}
    assert bad_cells(table, "n1:1") == {"memory": "warning"}
    assert bad_cells(table, "n2:0") == {"samples": "warning"}
    assert {row.cells[0].text for row in table.rows[:3]} == {"n1:0", "n1:1", "n2:0"}


def test_numbers_that_no_gpu_reports_have_no_column() -> None:
    has_column = {c.key for c in build_table(pages.page(nodes=1, gpus=2, hours=1)[0]).columns}
    assert {"throttled", "clock"} <= has_column and "model" not in has_column
    without = with_gpus(healthy(), sm_clock_mhz=None, throttle_ratio=ThrottleShares())
    assert not {"throttled", "clock"} & {c.key for c in build_table(without).columns}


def test_same_uuid_on_two_nodes_is_two_rows() -> None:
    summary = with_gpus(healthy(2, 1), uuid="GPU-same")
    assert len({row.key for row in build_table(summary).rows}) == 2


@pytest.mark.parametrize(("nodes", "gpus", "hours"), [(4, 8, 24.0), (2, 2, 4.0)])
def test_totals_of_the_synthetic_run_agree_with_its_size(nodes: int, gpus: int, hours: float) -> None:
    summary, curves = pages.page(nodes, gpus, hours)
    training, waste, count = summary.training, summary.waste, nodes * gpus
    assert training is not None and waste is not None and training.mfu is not None and summary.goodput is not None
    assert training.tokens_per_s is not None and training.joules_per_token is not None
    assert training.tokens_per_s_per_gpu == pytest.approx(training.tokens_per_s / count)
    assert training.mfu == pytest.approx(training.tokens_per_s / count * 6 * pages.PARAMETERS / pages.PEAK_FLOPS)
    assert np.nanmax(curves.training.values["step"]) <= training.steps
    assert training.tokens_per_s == pytest.approx(np.nanmean(curves.training.values["tokens_per_s"]), rel=0.01)
    held_s = sum(a.end - a.start for a in summary.attempts if a.start is not None and a.end is not None)
    assert waste.gpu_hours == pytest.approx(count * held_s / 3600)
    costs = sum(insight.gpu_hours or 0.0 for insight in summary.insights)
    assert 0 < costs < waste.gpu_hours and waste.wasted_gpu_hours == pytest.approx(sum(waste.by_cause.values()))
