"""What `top` shows first: GPUs and ranks that differ from the others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clustertrain.report.top.problems import find_problems, format_problems
from clustertrain.report.top.state import _with_steps_behind
from clustertrain.report.top.table import filter_rows, sort_rows
from clustertrain.report.top.view import GpuRow


def build_rows(count: int = 8, **changes: dict[str, Any]) -> list[GpuRow]:
    """Return healthy rows, with ``changes`` by ``r<rank>``."""
    rows = [
        GpuRow(
            node=f"node-{i // 4}",
            gpu=i % 4,
            uuid=f"GPU-{i}",
            rank=i,
            utilization=0.93,
            memory_used_gib=61.0,
            memory_total_gib=80.0,
            power_w=600.0,
            temperature_c=65.0,
            sm_clock_mhz=1800.0,
            phase="train",
            step=100,
            behind=0,
            data_wait_share=0.01,
        )
        for i in range(count)
    ]
    return [msgspec.structs.replace(row, **changes.get(f"r{row.rank}", {})) for row in rows]


LOST = dict.fromkeys(("utilization", "memory_used_gib", "power_w", "temperature_c", "sm_clock_mhz"))


@pytest.mark.parametrize(
    ("change", "severity", "text"),
    [
        ({"utilization": 0.0}, "critical", "idle at 0%, the median is 93%"),
        ({"utilization": 0.0, "rank": None}, "critical", "idle at 0%, the median is 93%, no rank uses it"),
        ({**LOST, "reason": "GPU_IS_LOST: gone"}, "critical", "GPU_IS_LOST: gone"),
        (LOST, "critical", "no metrics"),
        ({"throttled": ["power", "thermal"]}, "warning", "throttled by heat to 1,800 MHz at 65 °C"),
        ({"throttled": ["hardware"], "sm_clock_mhz": None}, "warning", "throttled by the hardware at 65 °C"),
        ({"temperature_c": 84.0}, "warning", "hot: 84 °C"),
        ({"sm_clock_mhz": 1200.0}, "warning", "clock at 1,200 MHz, the median is 1,800"),
        ({"memory_used_gib": 79.0}, "warning", "memory full: 79.0 of 80.0 GiB"),
        ({"behind": 7}, "warning", "7 steps behind"),
        ({"data_wait_share": 0.4}, "warning", "waits for data 40% of the time, the median is 1%"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], severity: str, text: str) -> None:
    rows = build_rows(r5=change)
    (problem,) = find_problems(rows)
    assert (problem.severity, problem.text) == (severity, text)
    assert sort_rows(rows, "problems", [problem])[0] is rows[5]


@pytest.mark.parametrize(
    "change",
    [
        {"throttled": ["power"]},  # most GPUs reach their power limit
        {"behind": 1},  # between two samples
        {"utilization": 0.5},
        {"temperature_c": 82.0},
        {"sm_clock_mhz": 1700.0},
        {"utilization": None, "sm_activity": 0.5},  # a MIG slice has no utilization
    ],
)
def test_normal_differences_are_no_problem(change: dict[str, Any]) -> None:
    assert find_problems(build_rows(r5=change)) == []


def test_what_all_gpus_share_is_no_outlier() -> None:
    for change in ({"utilization": 0.0}, {"sm_clock_mhz": 900.0}, LOST, {"data_wait_share": 0.5}):
        assert find_problems(build_rows(**{f"r{i}": change for i in range(8)})) == []
    assert find_problems([]) == []


def test_worst_come_first_and_many_share_a_line() -> None:
    hot = {"temperature_c": 90.0}
    found = find_problems(build_rows(16, **{f"r{i}": hot for i in range(5)}, r7={"utilization": 0.0}))
    assert format_problems(found) == [
        ("critical", "GPU 3 of node-1 (rank 7): idle at 0%, the median is 93%"),
        ("warning", "GPU 0 of node-0 (rank 0) and 4 more GPUs: hot"),
    ]


def test_filter() -> None:
    rows = build_rows(r5={"utilization": 0.0})
    found = find_problems(rows)

    def ranks(text: str) -> list[int | None]:
        return [row.rank for row in filter_rows(rows, text, found)]

    assert ranks("") == list(range(8))
    assert ranks("5") == ranks("rank 5") == ranks("RANK 5") == ranks("idle") == [5]
    assert ranks("gpu 1") == [1, 5] and ranks("gpu 1 node-0") == [1]
    assert ranks("node-1") == ranks("NODE-1 train") == [4, 5, 6, 7]
    assert ranks("GPU-3") == [3]
    assert sort_rows(filter_rows(rows, "3", found), "problems", found) == [rows[3]], "only what matches"
    assert ranks("nothing like it") == [] and ranks("[") == []


def test_steps_of_nodes_are_compared_at_one_time() -> None:
    steps = (("a", 120), ("b", 100), ("b", 93))
    rows = [GpuRow(node=node, rank=i, step=step, phase="train") for i, (node, step) in enumerate(steps)]
    # b was sampled 10 s earlier, and a step takes 0.5 s.
    assert [r.behind for r in _with_steps_behind(rows, {"a": 110.0, "b": 100.0}, 0.5)] == [0, 0, 7]
    assert [r.behind for r in _with_steps_behind(rows, {"a": 110.0, "b": 100.0}, None)] == [0, 20, 27]
    idle = [msgspec.structs.replace(r, phase="idle", step=120) for r in rows]
    assert [r.behind for r in _with_steps_behind(idle, {"a": 110.0, "b": 100.0}, 0.5)] == [0, 0, 0]
