from __future__ import annotations

import os
from pathlib import Path

import pytest

from clustertrain.telemetry import series, store
from clustertrain.telemetry.store import End, GpuFacts, Header, Processes, Reason, Sample, Writer


def header(t: float = 1000.0, gpus: int = 1) -> Header:
    return Header(node="n", t=t, mono=5.0, interval_s=1.0, gpus=[GpuFacts(f"GPU-{i}", index=i) for i in range(gpus)])


def sample(d: float, utilization: float | None = 0.5) -> Sample:
    return Sample(d, [0.1, 100, 2.5], [[utilization, 1024, 300.5, 50, 1980, 2619, 12.0]])


def write(folder: Path, *records: store.Record) -> None:
    writer = Writer(folder)
    for record in records:
        writer.add(record)
    writer.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    records = [
        header(),
        Reason(0.0, 0, "power_w", "NOT_SUPPORTED: no"),
        sample(0.0),
        Processes(0.0, 3, 7, 0.5),
        End(1.0),
    ]
    write(tmp_path, *records)
    assert list(store.read(tmp_path)) == records


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(store.read(tmp_path)) == []


def test_it_is_readable_while_it_grows_and_after_a_kill(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.add(header())
    writer.add(sample(0.0))
    writer.flush()
    writer.add(sample(1.0))  # lost: never flushed
    path = store.path_of(tmp_path)
    with path.open("ab") as f:
        f.write(b'{"kind":"s","d":2.0,"h":[0.1,1')
    assert [type(r).__name__ for r in store.read(tmp_path)] == ["Header", "Sample"]
    # Another sampler takes over: the torn line must not swallow its header.
    write(tmp_path, header(t=2000.0), sample(0.0), End(0.5))
    first, second = series.load(tmp_path)
    assert (list(first.t), first.end) == ([1000.0], None)
    assert (list(second.t), second.end) == ([2000.0], 2000.5)


def test_lines_of_a_later_version_and_rubbish_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, header(), sample(0.0))
    with store.path_of(tmp_path).open("ab") as f:
        f.write(b'{"kind":"nvlink","d":1.0}\n\xff\xfe\n[1]\n')
    write(tmp_path, sample(1.0))
    assert len(list(store.read(tmp_path))) == 3


def test_nulls_become_nan_and_keep_their_reason(tmp_path: Path) -> None:
    lost = Sample(1.0, [None, 100, 2.5], [None])
    reasons = [Reason(1.0, 0, "utilization", "GPU_IS_LOST: gone"), Reason(2.0, 0, "utilization", None)]
    write(tmp_path, header(), sample(0.0), lost, *reasons, sample(2.0))
    (found,) = series.load(tmp_path)
    assert [str(v) for v in found.gpus[0]["utilization"]] == ["0.5", "nan", "0.5"]
    assert [str(v) for v in found.host["cpu"]] == ["0.1", "nan", "0.1"]
    assert found.reasons == [{"utilization": "GPU_IS_LOST: gone"}]


def test_a_full_disk_loses_nothing_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path)
    writer.add(header())
    writer.flush()
    real, room = os.write, [100]

    def short_of_space(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = real(fd, data[: room[0]])
        room[0] -= written
        return written

    for d in range(3):
        writer.add(sample(float(d)))
    monkeypatch.setattr(os, "write", short_of_space)
    with pytest.raises(OSError, match="No space"):
        writer.flush()
    monkeypatch.setattr(os, "write", real)
    writer.add(sample(3.0))
    writer.close()
    assert [r.d for r in store.read(tmp_path) if isinstance(r, Sample)] == [0.0, 1.0, 2.0, 3.0]


def test_a_disk_that_stays_full_does_not_eat_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_KEPT", 10)
    writer = Writer(tmp_path)
    writer.add(header())
    for d in range(100):
        writer.add(sample(float(d)))
    writer.close()
    found = list(store.read(tmp_path))
    assert isinstance(found[0], Header)
    assert [r.d for r in found if isinstance(r, Sample)] == [float(d) for d in range(91, 100)]
