from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.store import jsonl_blocks, rollup, totals
from clustertrain.telemetry.store import writer as store
from clustertrain.telemetry.store.reader import RecordedSegment, find_overlapping, open_node
from clustertrain.telemetry.store.writer import Header, Writer
from tests.unit.telemetry.recordings import CHECKPOINT, T0, TRAIN, fill, header, record, row, working


def open_single_segment(node: Path) -> RecordedSegment:
    (segment,) = open_node(node)
    return segment


def test_round_trip(tmp_path: Path) -> None:
    record(tmp_path, 130)
    segment = open_single_segment(tmp_path)
    fast, slow = segment.samples(FAST), segment.samples(SLOW)
    assert segment.header == header()
    assert fast.t.tolist() == [T0 + s for s in range(130)]
    assert fast.values["gpu0.power_w"].tolist() == [working(s)["gpu0.power_w"] for s in range(130)]
    assert slow.values["host.network_rx_bytes"].tolist() == [1e4 * i for i in range(13)]
    assert np.isnan(fast.values["gpu0.temperature_c"]).all()
    assert (segment.sample_count, segment.end, segment.failure, segment.read_error) == (130, T0 + 130, None, None)


def test_read_window_and_columns(tmp_path: Path) -> None:
    record(tmp_path, 200)
    frame = open_single_segment(tmp_path).samples(FAST, ["rank0.step", "gpu9.power_w"], since=T0 + 150, until=T0 + 153)
    assert frame.t.tolist() == [T0 + 150, T0 + 151, T0 + 152]
    assert {c: v.tolist() for c, v in frame.values.items()} == {"rank0.step": [75, 75, 76]}


def test_values_keep_sensor_precision(tmp_path: Path) -> None:
    exact = {"gpu0.memory_used_bytes": 2.0**45 + 1, "rank0.tokens": 2.0**50 + 1, "gpu0.utilization": 0.123}
    record(tmp_path, 2, values=lambda s: exact | {"gpu0.power_w": 123.456, "gpu0.sm_clock_mhz": float("inf")})
    newest = open_single_segment(tmp_path).newest()
    assert {c: newest[c] for c in exact} == exact
    assert newest["gpu0.power_w"] == 123.5
    assert np.isnan(newest["gpu0.sm_clock_mhz"])


def test_samples_are_readable_by_zcat_and_json(tmp_path: Path) -> None:
    folder = record(tmp_path, 25)
    lines = gzip.decompress((folder / jsonl_blocks.NAME).read_bytes()).splitlines()
    assert {json.loads(line)["kind"] for line in lines} == {"samples", "end"}


def test_segment_is_readable_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment_header, writer = header(), Writer(tmp_path)
    writer.begin(segment_header)
    fill(writer, segment_header, 0, 1000)
    writer.fast(1000, row(segment_header.fast, working(1000)))  # lost in a kill: never flushed
    segment = open_single_segment(tmp_path)
    assert (segment.sample_count, segment.end) == (1000, None)
    monkeypatch.setattr(jsonl_blocks, "read", None)  # the whole file
    assert open_single_segment(tmp_path).newest()["gpu0.energy_j"] == 1e6 + 400.0 * 999
    assert len(open_single_segment(tmp_path).samples(FAST, since=T0 + 990)) == 10
    writer.close()


@pytest.mark.parametrize("seconds", [0, 1, 59, 60, 61, 185, 1000])
def test_totals_of_killed_segment_match_ended_one(tmp_path: Path, seconds: int) -> None:
    record(tmp_path / "killed", seconds, end=False)
    record(tmp_path / "ended", seconds)
    killed, ended = open_single_segment(tmp_path / "killed"), open_single_segment(tmp_path / "ended")
    assert (killed.sample_count, killed.end, ended.end) == (seconds, None, T0 + seconds)
    for step_s in rollup.LEVELS:
        a, b = killed.rollup(step_s), ended.rollup(step_s)
        assert a.t.tolist() == b.t.tolist() == [T0 + s for s in range(0, seconds, step_s)]
        assert np.array_equal(a.count, b.count)
        for name in ("mean", "low", "high"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-4)
    a_total, b_total = killed.totals(), ended.totals()
    assert a_total.keys() == b_total.keys()
    for column, total in a_total.items():
        other = b_total[column]
        assert (total.count, total.increase, total.by_phase) == (other.count, other.increase, other.by_phase), column
        np.testing.assert_allclose([total.low, total.high, total.last], [other.low, other.high, other.last])
        assert total.histogram.bins.tolist() == other.histogram.bins.tolist()


def test_totals_by_phase_and_rates(tmp_path: Path) -> None:
    record(tmp_path, 600)
    segment_totals = open_single_segment(tmp_path).totals()
    power, energy, step = (segment_totals[c] for c in ("gpu0.power_w", "gpu0.energy_j", "rank0.step"))
    values = [working(s)["gpu0.power_w"] for s in range(600)]
    assert (power.count, power.low, power.high) == (600, 130.5, 406.0)
    assert power.mean == pytest.approx(np.mean(values))
    assert power.quantile(0.5) == pytest.approx(np.median(values), rel=0.011)
    assert {phase: n for phase, (n, _) in power.by_phase.items()} == {TRAIN: 500, CHECKPOINT: 100}
    assert power.by_phase[int(CHECKPOINT)][1] == pytest.approx(130.5 * 100)
    assert (energy.count, energy.increase, energy.first) == (599, 400.0 * 599, 1e6)
    assert energy.mean == pytest.approx(400.0)
    assert (step.last, step.increase) == (299, 299)
    assert (segment_totals["gpu0.temperature_c"].count, segment_totals["gpu0.temperature_c"].mean) == (
        0,
        pytest.approx(np.nan, nan_ok=True),
    )


def test_rollups_match_samples(tmp_path: Path) -> None:
    record(tmp_path, 200)
    segment = open_single_segment(tmp_path)
    buckets = segment.rollup(60, ["gpu0.utilization", "host.network_rx_bytes", "gpu0.energy_j"])
    assert buckets.columns == ["gpu0.utilization", "gpu0.energy_j", "host.network_rx_bytes"]
    assert buckets.count.tolist() == [[60, 59, 5], [60, 60, 6], [60, 60, 6], [20, 20, 2]]
    np.testing.assert_allclose(buckets.mean[:, 1:], [[400, 1000]] * 4, rtol=1e-4)
    utilization = [working(s)["gpu0.utilization"] for s in range(60)]
    assert buckets.mean[0, 0] == pytest.approx(np.mean(utilization), rel=1e-4)
    assert (buckets.low[0, 0], buckets.high[0, 0]) == (0.0, pytest.approx(0.97, rel=1e-4))
    assert segment.rollup(120).count[:, 0].tolist() == [120, 80]
    assert segment.rollup(25).count[:, 0].tolist() == [25] * 8


def test_counter_reset_and_gap(tmp_path: Path) -> None:
    def values(s: int) -> dict[str, float]:
        energy = {} if 70 <= s < 80 else {"gpu0.energy_j": 100.0 * s}
        return energy | {"rank0.step": float(s if s < 90 else s - 90)}

    record(tmp_path, 120, values=values)
    segment_totals = open_single_segment(tmp_path).totals()
    assert (segment_totals["gpu0.energy_j"].increase, segment_totals["gpu0.energy_j"].count) == (11_900, 109)
    assert (segment_totals["rank0.step"].increase, segment_totals["rank0.step"].count) == (89 + 29, 118)
    assert open_single_segment(tmp_path).rollup(60).mean[1, header().fast.index("gpu0.energy_j")] == pytest.approx(100)


def test_reasons_persist_and_null_is_not_zero(tmp_path: Path) -> None:
    segment_header, writer = header(), Writer(tmp_path)
    writer.begin(segment_header)
    writer.null(0.0, "gpu0.temperature_c", "NOT_SUPPORTED: no")
    fill(writer, segment_header, 0, 70)
    writer.null(70.0, "gpu0.power_w", "GPU_IS_LOST: gone")
    writer.null(75.0, "gpu0.power_w", None)
    writer.flush()
    reasons = {"gpu0.temperature_c": "NOT_SUPPORTED: no", "gpu0.power_w": "GPU_IS_LOST: gone"}
    assert open_single_segment(tmp_path).reasons() == reasons
    writer.end(80.0, "the driver hung")
    writer.close()
    segment = open_single_segment(tmp_path)
    assert (segment.reasons(), segment.failure) == (reasons, "the driver hung")


def test_each_sampler_has_its_segment(tmp_path: Path) -> None:
    first, second = Writer(tmp_path), Writer(tmp_path)
    for writer, t in ((first, T0), (second, T0 + 50)):
        writer.begin(header(t=t))
        fill(writer, header(t=t), 0, 100)
    first.begin(header(gpus=2, t=T0 + 200))  # the driver returned with another GPU
    first.flush()
    a, b, c = open_node(tmp_path)
    assert [s.folder.name for s in (a, b, c)] == ["0", "1", "2"]
    assert [(x.folder.name, y.folder.name) for x, y in find_overlapping([a, b, c])] == [("0", "1")]
    assert (a.end, b.end, len(c.header.gpus)) == (T0 + 99, None, 2)


def test_full_disk_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment_header, writer = header(), Writer(tmp_path)
    writer.begin(segment_header)
    fill(writer, segment_header, 0, 100)
    real, free_bytes = os.pwrite, [100]

    def short_of_space(fd: int, data: bytes, at: int) -> int:
        if not free_bytes[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(fd, data[: free_bytes[0]], at)
        free_bytes[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", short_of_space)
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: None)  # fails too, so the partial piece stays
    fill(writer, segment_header, 100, 200, flush=0)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            writer.flush()
    assert open_single_segment(tmp_path).samples(FAST).t.tolist() == [T0 + s for s in range(100)]
    monkeypatch.setattr(os, "pwrite", real)
    fill(writer, segment_header, 200, 260, flush=0)
    writer.end(260.0)
    writer.close()
    segment = open_single_segment(tmp_path)
    assert segment.samples(FAST).t.tolist() == [T0 + s for s in range(260)]
    assert segment.rollup(60).count[:, 0].tolist() == [60, 60, 60, 60, 20]
    assert segment.totals()["gpu0.power_w"].count == 260


def test_full_disk_bounds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_ROWS", 10)
    record(tmp_path, 100, flush=0)
    assert open_single_segment(tmp_path).samples(FAST).t.tolist() == [T0 + s for s in range(90, 100)]
    assert open_single_segment(tmp_path).totals()["gpu0.power_w"].count == 100


def test_disk_missing_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store.fsio.write_bytes

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(store.fsio, "write_bytes", refuse)
    segment_header, writer = header(), Writer(tmp_path)
    writer.begin(segment_header)
    fill(writer, segment_header, 0, 5, flush=0)
    with pytest.raises(OSError, match="quota"):
        writer.flush()
    (empty,) = open_node(tmp_path)
    assert (empty.sample_count, len(empty.samples(FAST)), "no header" in (empty.read_error or "")) == (0, 0, True)
    monkeypatch.setattr(store.fsio, "write_bytes", real)
    writer.close()
    assert [s.sample_count for s in open_node(tmp_path)] == [5]


_CHILD = """
import sys
from pathlib import Path
from clustertrain.telemetry.store.writer import Writer
from tests.unit.telemetry.recordings import fill, header
writer = Writer(Path(sys.argv[1]))
writer.begin(header())
s = 0
while True:
    fill(writer, header(), s, s + 10)
    s += 10
    print(s, flush=True)
"""


@pytest.mark.long
def test_kill_9_loses_at_most_the_last_flush(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    flushed = [int(child.stdout.readline()) for _ in range(30)]
    child.kill()
    flushed += [int(line) for line in child.stdout.read().splitlines()]
    child.wait()
    child.stdout.close()
    segment = open_single_segment(tmp_path)
    frame = segment.samples(FAST)
    assert flushed[-1] <= segment.sample_count <= flushed[-1] + 10
    assert frame.t.tolist() == [T0 + s for s in range(segment.sample_count)]
    assert segment.totals()["gpu0.energy_j"].increase == 400.0 * (segment.sample_count - 1)
    assert segment.rollup(60).count[:, 0].sum() == segment.sample_count
    assert (segment.end, segment.read_error) == (None, None)


@pytest.mark.long
def test_truncated_segment_is_read_to_last_flush(tmp_path: Path) -> None:
    folder = record(tmp_path / "n1", 30, end=False)
    (folder / totals.NAME).unlink()
    data = (folder / jsonl_blocks.NAME).read_bytes()
    starts = [i for i in range(len(data)) if data.startswith(jsonl_blocks._MAGIC, i)] + [len(data)]
    assert len(starts) == 4
    for size in range(len(data) + 1):
        (folder / jsonl_blocks.NAME).write_bytes(data[:size])
        whole = 10 * max(0, sum(start <= size for start in starts) - 1)
        segment = open_single_segment(tmp_path / "n1")
        assert (segment.sample_count, segment.read_error) == (whole, None), size
    for size in starts:
        (folder / jsonl_blocks.NAME).write_bytes(data[:size] + b"\x1f\x8b\x08" + data[5:50] + data[size:])
        assert open_single_segment(tmp_path / "n1").sample_count == 30  # damage between blocks affects nothing else


@pytest.mark.parametrize("name", [totals.NAME, "rollup-60.bin", "rollup-900.bin"])
def test_damaged_totals_are_rebuilt_from_samples(tmp_path: Path, name: str) -> None:
    folder = record(tmp_path, 1000, end=False)
    undamaged = open_single_segment(tmp_path)
    power, minutes, quarters = undamaged.totals()["gpu0.power_w"], undamaged.rollup(60), undamaged.rollup(900)
    data = (folder / name).read_bytes()
    for damage in (b"", data[: len(data) // 2], data[:-1], bytes(100), None):
        if damage is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(damage)
        segment = open_single_segment(tmp_path)
        assert (segment.sample_count, segment.totals()["gpu0.power_w"].sum) == (1000, pytest.approx(power.sum))
        assert np.array_equal(segment.rollup(60).count, minutes.count)
        assert np.array_equal(segment.rollup(900).count, quarters.count)


def test_bad_segment_does_not_hide_others(tmp_path: Path) -> None:
    for k in range(4):
        record(tmp_path, 20, segment_header=header(t=T0 + 100 * k))
    (tmp_path / "0" / store.HEADER).write_bytes(b'{"node": "n1", "t"')
    (tmp_path / "1" / store.HEADER).unlink()
    (tmp_path / "2" / jsonl_blocks.NAME).write_bytes(b"")
    (tmp_path / "stray").write_text("of another program")
    damaged, headless, empty, good = open_node(tmp_path)
    assert "damaged" in (damaged.read_error or "")
    assert "no header" in (headless.read_error or "")
    assert [s.sample_count for s in (damaged, headless, empty, good)] == [0, 0, 20, 20]
    assert [len(s.samples(FAST)) for s in (damaged, headless, empty, good)] == [0, 0, 0, 20]
    assert (damaged.totals(), len(headless.rollup(60)), damaged.newest(), damaged.newest_t) == ({}, 0, {}, None)
    assert find_overlapping([damaged, headless, good]) == []


def test_newer_format_is_rejected(tmp_path: Path) -> None:
    folder = record(tmp_path, 5)
    header_json = json.loads((folder / store.HEADER).read_text()) | {"format": 99}
    (folder / store.HEADER).write_text(json.dumps(header_json))
    assert "newer version" in (open_single_segment(tmp_path).read_error or "")


def test_unreadable_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "n1", 5)
    record(tmp_path / "n2", 5)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    segment = open_single_segment(tmp_path / "n1")
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(os, "open", refuse)
    assert len(segment.samples(FAST)) == 0
    assert "may not read" in (segment.read_error or "")
    assert "may not read" in (open_single_segment(tmp_path / "n2").read_error or "")
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert "may not read" in (open_single_segment(tmp_path / "n2").read_error or "")


def test_missing_folder_has_no_segments(tmp_path: Path) -> None:
    assert open_node(tmp_path / "n7") == []


def test_row_of_wrong_length_raises(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    with pytest.raises(RuntimeError, match="begin"):
        writer.fast(0.0, np.zeros(1))
    writer.begin(Header(node="n1", t=T0, mono=0.0, interval_s=1.0, fast=["host.cpu"]))
    with pytest.raises(ValueError, match="2 values for 1 columns"):
        writer.fast(0.0, np.zeros(2))


@pytest.mark.long
def test_foreign_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / jsonl_blocks.NAME
    path.write_bytes(jsonl_blocks._MAGIC + bytes(100))
    os.truncate(path, 50 << 30)  # sparse: reading all of it would take minutes
    assert list(jsonl_blocks.read(tmp_path)) == []
