"""How full the GPUs are, from the ends of the files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertrain.telemetry import store
from clustertrain.telemetry.peak import memory_used_gib
from tests.unit.telemetry.runs import GIB, busy, gpu, new_attempt, new_run, record


def test_the_fullest_gpu_of_all_nodes(tmp_path: Path) -> None:
    attempt = new_attempt(new_run(tmp_path), nodes=("n1", "n2"))
    record(attempt, [(gpu(0), busy(used_gib=60.0)), (gpu(1), busy(used_gib=61.5))])
    record(attempt, [(gpu(0, node="n2"), busy(used_gib=58.0)), (gpu(1, node="n2"), lambda s: None)], node="n2")
    assert memory_used_gib([attempt]) == 61.5


def test_the_newest_attempt_that_has_figures_counts(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    first, second, third = (new_attempt(run, n) for n in (1, 2, 3))
    record(first, [(gpu(0), busy(used_gib=70.0))])
    record(second, [(gpu(0), busy(used_gib=50.0))])
    record(third, [], nvml="no driver")
    assert memory_used_gib([first, second, third]) == 50.0
    assert memory_used_gib([third]) is None
    assert memory_used_gib([]) is None


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    attempt = new_attempt(new_run(tmp_path))
    # Ten times the size that is read; what was in use in the first second is far behind.
    record(attempt, [(gpu(0), busy(used_gib=40.0))], seconds=4000)
    folder = attempt.telemetry / "n1"
    size = store.path_of(folder).stat().st_size // 10
    found = store.newest(folder, size)
    assert isinstance(found[0], store.Header)
    samples = [r for r in found if isinstance(r, store.Sample)]
    assert samples[-1].d == 3999.0 and 300 < len(samples) < 500
    assert [s.d for s in samples] == [float(s) for s in range(4000 - len(samples), 4000)]
    assert samples[0].g == [[0.8, 40.0 * GIB, 400.0, 65, 1980, 2619, 400.0 * samples[0].d]]


@pytest.mark.parametrize("damage", [b"", b'{"kind":"s","d":4'])
def test_a_short_file_is_read_whole_and_half_a_line_is_skipped(tmp_path: Path, damage: bytes) -> None:
    attempt = new_attempt(new_run(tmp_path))
    record(attempt, [(gpu(0), busy(used_gib=40.0))], seconds=3)
    folder = attempt.telemetry / "n1"
    with store.path_of(folder).open("ab") as f:
        f.write(damage)
    found = store.newest(folder)
    assert found == [r for r in store.read(folder) if isinstance(r, (store.Header, store.Sample))]
    assert len(found) == 4
    assert store.newest(attempt.telemetry / "n2") == []
