"""Peak GPU memory from the totals."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.telemetry.analysis.peak_memory import read_peak_memory_gib
from tests.unit.telemetry.runs import busy, gpu, new_attempt, new_run, record


def test_fullest_gpu_of_all_nodes(tmp_path: Path) -> None:
    attempt = new_attempt(new_run(tmp_path), nodes=("n1", "n2"))
    record(attempt, [(gpu(0), busy(used_gib=60.0)), (gpu(1), busy(used_gib=61.5))])
    record(attempt, [(gpu(0, node="n2"), busy(used_gib=58.0)), (gpu(1, node="n2"), lambda s: None)], node="n2")
    assert read_peak_memory_gib([attempt]) == 61.5


def test_newest_attempt_with_totals_counts(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    first, second, third = (new_attempt(run, n) for n in (1, 2, 3))
    record(first, [(gpu(0), busy(used_gib=70.0))])
    record(second, [(gpu(0), busy(used_gib=50.0))])
    record(third, [], nvml="no driver")
    assert read_peak_memory_gib([first, second, third]) == 50.0
    assert read_peak_memory_gib([third]) is None
    assert read_peak_memory_gib([]) is None


@pytest.mark.parametrize("damage", [b"", b"\x1f\x8b\x08", b"not gzip at all"])
def test_unreadable_totals_are_skipped(tmp_path: Path, damage: bytes) -> None:
    attempt = new_attempt(new_run(tmp_path), nodes=("n1", "n2"))
    record(attempt, [(gpu(0), busy(used_gib=60.0))])
    record(attempt, [(gpu(0, node="n2"), busy(used_gib=70.0))], node="n2")
    (attempt.telemetry / "n2" / "0" / "totals.json.gz").write_bytes(damage)
    assert read_peak_memory_gib([attempt]) == 60.0
