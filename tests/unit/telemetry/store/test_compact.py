from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from clustertrain.errors import UnsuitableEnvironment
from clustertrain.telemetry.fields import FAST, SLOW
from clustertrain.telemetry.store import compact, jsonl_blocks, parquet, rollup, totals
from clustertrain.telemetry.store.reader import RecordedSegment, open_node
from clustertrain.telemetry.store.writer import Writer
from tests.unit.telemetry.recordings import T0, fill, header, record, working


def open_single_segment(node: Path) -> RecordedSegment:
    (segment,) = open_node(node)
    return segment


def read_all(node: Path) -> list[object]:
    """Return everything that a reader can get from a segment, with NaN as -1."""
    segment = open_single_segment(node)
    parts: list[object] = [segment.sample_count, segment.end, segment.failure, segment.reasons(), segment.read_error]
    for frame in (segment.samples(FAST), segment.samples(SLOW, since=T0 + 100, until=T0 + 555)):
        parts.append((frame.t.tolist(), {c: to_plain(v) for c, v in frame.values.items()}))
    for step_s in (*rollup.LEVELS, 120):
        buckets = segment.rollup(step_s)
        tables = (buckets.count, buckets.mean / 1e3, buckets.low, buckets.high)
        parts.append([buckets.t.tolist(), *(to_plain(np.round(v, 2)) for v in tables)])
    for column, total in segment.totals().items():
        parts.append((column, total.count, round(total.sum, 3), total.increase, total.by_phase, total.quantile(0.5)))
    parts.append(to_plain(np.array(list(segment.newest().values()))))
    return [str(part) for part in parts]


def to_plain(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> object:
    return np.where(np.isnan(values), -1.0, values + 0.0).tolist()


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


COMPACTED_FILES = {
    "header.json",
    "totals.json.gz",
    "fast.parquet",
    "slow.parquet",
    "rollup-60.packed",
    "rollup-900.bin",
}


@pytest.mark.parametrize("mode", [0o700, 0o750])
@pytest.mark.parametrize("compacted", [False, True])
def test_file_modes_follow_the_run(tmp_path: Path, compacted: bool, mode: int) -> None:
    tmp_path.chmod(mode)
    before = os.umask(0o022)
    try:
        folder = record(tmp_path / "telemetry" / "n1", 1000, values=working)
        if compacted:
            compact.compact(folder, ended=True)
    finally:
        os.umask(before)
    modes = {p.relative_to(tmp_path): stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert modes == {path: mode if (tmp_path / path).is_dir() else 0o640 for path in modes}
    assert len(modes) > 5


@pytest.mark.parametrize("end", [True, False])
def test_compaction_loses_nothing(tmp_path: Path, end: bool) -> None:
    def values(s: int) -> dict[str, float]:
        return {} if 300 <= s < 400 else working(s)

    folder = record(tmp_path, 1000, values=values, end=end)
    before = read_all(tmp_path)
    assert compact.compact(folder, ended=True) == "compacted"
    assert read_all(tmp_path) == before
    assert names(folder) == COMPACTED_FILES
    assert compact.compact(folder) == "nothing to do"
    assert read_all(tmp_path) == before


def test_parquet_is_readable_by_other_tools(tmp_path: Path) -> None:
    segment_header, writer = header(), Writer(tmp_path)
    writer.begin(segment_header)
    writer.null(0.0, "gpu0.temperature_c", "NOT_SUPPORTED: no")
    fill(writer, segment_header, 0, 50)
    folder = writer.segment
    assert folder is not None
    writer.end(50.0)
    writer.close()
    compact.compact(folder)
    table = pq.read_table(folder / "fast.parquet")
    field = table.schema.field("gpu0.power_w")
    assert (field.metadata[b"unit"], field.metadata[b"scale"]) == (b"W", b"10.0")
    assert table.column("gpu0.power_w").to_pylist()[:3] == [4000, 4010, 4020]
    assert table.column("gpu0.temperature_c").null_count == 50
    assert b"NOT_SUPPORTED: no" in table.schema.metadata[b"reasons"]
    assert b"GPU-0" in table.schema.metadata[b"header"]


_CHANGES = ("write_bytes", "replace", "unlink", "fsync_folder")


@pytest.mark.long
@pytest.mark.parametrize("end", [True, False])
def test_killed_compaction_is_readable_and_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bool
) -> None:
    """Compaction is killed before each change of the folder, in turn."""
    folder = record(tmp_path / "n1", 700, end=end, flush=70)
    before = read_all(tmp_path / "n1")
    original = {p: p.read_bytes() for p in folder.iterdir()}
    for changes in range(100):
        for path in folder.iterdir():
            path.unlink()
        for path, data in original.items():
            path.write_bytes(data)
        with monkeypatch.context() as patch:
            _kill_after(patch, changes)
            try:
                compact.compact(folder, ended=True)
                break
            except _Killed:
                pass
        assert read_all(tmp_path / "n1") == before, changes
        compact.compact(folder, ended=True)
        assert read_all(tmp_path / "n1") == before, changes
        assert names(folder) == COMPACTED_FILES, changes
    assert changes > 8


class _Killed(BaseException):
    pass


def _kill_after(patch: pytest.MonkeyPatch, changes: int) -> None:
    remaining = [changes]

    def limited(real: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            if not remaining[0]:
                raise _Killed
            remaining[0] -= 1
            return real(*args, **kwargs)  # type: ignore[operator]

        return call

    patch.setattr(compact.fsio, "write_bytes", limited(compact.fsio.write_bytes))
    patch.setattr(compact.fsio, "fsync_folder", limited(compact.fsio.fsync_folder))
    patch.setattr(Path, "replace", limited(Path.replace))
    patch.setattr(Path, "unlink", limited(Path.unlink))
    patch.setattr(parquet.ParquetWriter, "add", limited(parquet.ParquetWriter.add))
    patch.setattr(parquet.ParquetWriter, "drop", lambda self: None)  # a kill cleans up nothing


def test_without_pyarrow_only_single_samples_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(tmp_path, 700)
    before = open_single_segment(tmp_path).samples(FAST).t.tolist()
    for module in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"] + ["pyarrow"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsuitableEnvironment, match=r"pyarrow is not installed\n.*clustertrain\[report\]"):
        compact.compact(folder, ended=True)
    assert compact.main([str(tmp_path), "--ended", "--quiet"]) == 1
    assert open_single_segment(tmp_path).samples(FAST).t.tolist() == before
    monkeypatch.undo()
    assert compact.main([str(tmp_path), "--ended", "--quiet"]) == 0
    for module in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, module, None)
    segment = open_single_segment(tmp_path)
    assert segment.sample_count == len(before) and segment.totals() and len(segment.rollup(60).t)
    with pytest.raises(UnsuitableEnvironment, match=r"fast\.parquet, the samples of an ended attempt: the package"):
        segment.samples(FAST)


def test_verification_detects_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = record(tmp_path, 100)
    before = read_all(tmp_path)
    real = parquet._group

    def flipped(file: object, i: int, columns: list[str]) -> tuple[object, object]:
        d, rows = real(file, i, columns)
        rows[0, 0] += 0.001
        return d, rows

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "_group", flipped)
        with pytest.raises(ValueError, match="verification failed"):
            compact.compact(folder)
    assert read_all(tmp_path) == before
    assert (folder / jsonl_blocks.NAME).exists()
    assert compact.compact(folder) == "compacted"


def test_open_segment_is_skipped(tmp_path: Path) -> None:
    folder = record(tmp_path, 100, end=False)
    assert compact.compact(folder) == "still written"
    assert (folder / jsonl_blocks.NAME).exists()
    hours_ago = (folder / jsonl_blocks.NAME).stat().st_mtime - 7200
    os.utime(folder / jsonl_blocks.NAME, (hours_ago, hours_ago))
    assert compact.compact(folder) == "compacted"


def test_existing_reader_continues(tmp_path: Path) -> None:
    folder = record(tmp_path, 700, end=False)
    before = read_all(tmp_path)
    (segment,) = open_node(tmp_path)
    assert segment.sample_count == 700
    compact.compact(folder, ended=True)
    assert (len(segment.samples(FAST)), len(segment.rollup(60)), segment.read_error) == (700, 12, None)
    assert segment.totals()["gpu0.power_w"].count == 700
    assert read_all(tmp_path) == before


def test_only_row_groups_in_window_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "_ROWS", 100)
    folder = record(tmp_path, 1000)
    before = open_single_segment(tmp_path).samples(FAST, since=T0 + 450, until=T0 + 455)
    compact.compact(folder)
    assert pq.ParquetFile(folder / "fast.parquet").num_row_groups == 10
    after = open_single_segment(tmp_path).samples(FAST, since=T0 + 450, until=T0 + 455)
    assert after.t.tolist() == before.t.tolist() == [T0 + s for s in range(450, 455)]
    assert {c: to_plain(v) for c, v in after.values.items()} == {c: to_plain(v) for c, v in before.values.items()}


@pytest.mark.parametrize("name", ["fast.parquet", "rollup-60.packed", totals.NAME])
def test_damage_after_compaction_is_local(tmp_path: Path, name: str) -> None:
    folder = record(tmp_path, 300)
    compact.compact(folder)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    segment = open_single_segment(tmp_path)
    counts = (len(segment.samples(FAST)), len(segment.rollup(60)), segment.totals()["gpu0.power_w"].count)
    expected = {"fast.parquet": (0, 5, 300), "rollup-60.packed": (300, 0, 300), totals.NAME: (300, 5, 300)}
    assert counts == expected[name]
    assert (segment.read_error is None) == (name == totals.NAME)  # totals are rebuilt from the samples


@pytest.mark.long
def test_command_line(tmp_path: Path) -> None:
    record(tmp_path / "n1", 20)
    record(tmp_path / "n2", 20, end=False)
    bad = record(tmp_path / "n3", 20)
    (bad / "header.json").write_text("{")
    argv = [sys.executable, "-m", "clustertrain.telemetry.store.compact", "--ended", str(tmp_path)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stdout.count(": compacted") == 2
    assert str(bad) in result.stderr
    assert "Traceback" not in result.stderr
    assert [open_single_segment(tmp_path / n).sample_count for n in ("n1", "n2")] == [20, 20]
