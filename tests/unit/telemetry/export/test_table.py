"""``--csv`` and ``--parquet`` export every sample once."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from clustertrain.errors import ConfigError, UsageError
from clustertrain.run.heartbeat import PHASES
from clustertrain.telemetry import fields
from clustertrain.telemetry.export import table
from clustertrain.telemetry.export.table import FIELDS, AttemptSegment, RowFilter, write_csv, write_parquet
from clustertrain.telemetry.store.reader import open_node
from clustertrain.telemetry.store.writer import GpuFacts, Header, Writer

T0 = 1_700_000_000.0
FAST = ["gpu0.utilization", "gpu0.energy_j", "gpu1.utilization", "gpu1.energy_j", "rank4.step", "rank4.phase"]
SLOW = ["gpu0.processes", "gpu1.processes", "host.cpu", "rank4.memory_bytes"]


def record(folder: Path, node: str = "node1", *, t: float = T0, seconds: int = 25) -> Path:
    """Record a segment: utilization is second / 100 (GPU 1: missing in odd seconds), slow fields at 0, 10, 20 …"""
    node_folder = folder / node
    writer = Writer(node_folder)
    gpus = [GpuFacts("GPU-a", 0, ranks=[4]), GpuFacts("GPU-b", 1)]
    writer.begin(Header(node=node, t=t, mono=0.0, interval_s=1.0, gpus=gpus, ranks=[4], fast=FAST, slow=SLOW))
    for d in range(seconds):
        other = d / 100 if d % 2 == 0 else np.nan
        writer.fast(float(d), np.array([d / 100, 300.5 * d, other, 0.0, d // 5, PHASES.index("train")]))
        if d % 10 == 0:
            writer.slow(float(d), np.array([1.0, 0.0, 0.25, 5e9]))
    writer.end(float(seconds))
    writer.close()
    return node_folder


def attempt_segments(*folders: Path, attempt: int = 1) -> list[AttemptSegment]:
    return [AttemptSegment(attempt, segment) for folder in folders for segment in open_node(folder)]


Row = dict[str, Any]
Write = Callable[..., list[Row]]


def rows_via_csv(segments: list[AttemptSegment], path: Path, row_filter: RowFilter = table.ALL_ROWS) -> list[Row]:
    write_csv(segments, path, row_filter)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    text_fields = {"node", "device", "uuid", "phase"}
    return [{k: (v if k in text_fields else float(v)) if v else None for k, v in row.items()} for row in rows]


def rows_via_parquet(segments: list[AttemptSegment], path: Path, row_filter: RowFilter = table.ALL_ROWS) -> list[Row]:
    write_parquet(segments, path, row_filter)
    rows: list[Row] = pa.parquet.read_table(path).to_pylist()
    return rows


@pytest.fixture(params=[rows_via_csv, rows_via_parquet], ids=["csv", "parquet"])
def write(request: pytest.FixtureRequest) -> Write:
    function: Write = request.param
    return function


def test_one_row_per_time_and_device(write: Write, tmp_path: Path) -> None:
    rows = write(attempt_segments(record(tmp_path)), tmp_path / "out")
    assert list(rows[0]) == ["time_s", "attempt", "node", "device", "uuid", "rank", *FIELDS]
    assert [(r["time_s"] - T0, r["device"]) for r in rows[:8]] == [
        (0, "gpu0"), (0, "gpu1"), (0, "host"), (0, "rank4"), (1, "gpu0"), (1, "gpu1"), (1, "rank4"), (2, "gpu0"),
    ]  # fmt: skip
    assert len(rows) == 25 * 3 + 3
    gpu0, gpu1, host, rank = rows[:4]
    assert {(r["attempt"], r["node"]) for r in rows} == {(1, "node1")}
    assert (gpu0["uuid"], gpu0["rank"]) == ("GPU-a", 4) and (gpu1["uuid"], gpu1["rank"]) == ("GPU-b", None)
    assert (host["uuid"], host["rank"]) == (None, None) and (rank["uuid"], rank["rank"]) == ("GPU-a", 4)
    assert gpu0["processes"] == 1 and host["cpu"] == 0.25 and rank["memory_bytes"] == 5e9
    assert rank["phase"] == "train" and gpu0["phase"] is None and rank["utilization"] is None


def test_every_sample_once_with_empty_missing_values(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = attempt_segments(record(tmp_path))
    whole = write(segments, tmp_path / "whole")
    monkeypatch.setattr(table, "_CELLS", 40)  # windows of a few seconds, pieces of a few rows
    monkeypatch.setattr(table, "_ROWS", 7)
    rows = write(segments, tmp_path / "out")
    assert rows == whole
    by_gpu = [[r["utilization"] for r in rows if r["device"] == f"gpu{i}"] for i in (0, 1)]
    assert by_gpu[0] == [d / 100 for d in range(25)]
    assert by_gpu[1] == [d / 100 if d % 2 == 0 else None for d in range(25)]
    assert [r["energy_j"] for r in rows if r["device"] == "gpu0"] == [300.5 * d for d in range(25)]
    assert [r["step"] for r in rows if r["device"] == "rank4"] == [d // 5 for d in range(25)]
    assert [r["time_s"] - T0 for r in rows if r["processes"] == 1] == [0, 10, 20]


def test_several_nodes_and_attempts(write: Write, tmp_path: Path) -> None:
    first = attempt_segments(record(tmp_path / "1", "a", seconds=3), record(tmp_path / "1", "b", seconds=2))
    second = attempt_segments(record(tmp_path / "2", "a", t=T0 + 100, seconds=1), attempt=2)
    rows = write([*first, *second], tmp_path / "out")
    samples = {(r["attempt"], r["node"], r["time_s"] - T0) for r in rows}
    assert samples == {(1, "a", 0), (1, "a", 1), (1, "a", 2), (1, "b", 0), (1, "b", 1), (2, "a", 100)}


def test_row_filter(write: Write, tmp_path: Path) -> None:
    segments = attempt_segments(record(tmp_path))
    row_filter = RowFilter(
        gpu_filter=lambda node, gpu: node == "node1" and gpu.uuid == "GPU-a", since=T0 + 5, until=T0 + 11
    )
    rows = write(segments, tmp_path / "out", row_filter)
    assert {r["device"] for r in rows} == {"gpu0", "rank4"}
    assert sorted({r["time_s"] - T0 for r in rows}) == [5, 6, 7, 8, 9, 10]
    assert write(segments, tmp_path / "out", RowFilter(gpu_filter=lambda node, gpu: False)) == []
    assert write(segments, tmp_path / "out", RowFilter(since=T0 + 1000)) == []
    assert write([], tmp_path / "out") == []


def test_unknown_fields_are_left_out(write: Write, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "n")
    writer.begin(Header(node="n", t=T0, mono=0.0, interval_s=1.0, fast=["host.cpu", "host.aura", "moon0.phase"]))
    writer.fast(0.0, np.array([0.5, 1.0, 2.0]))
    writer.close()
    (row,) = write(attempt_segments(tmp_path / "n"), tmp_path / "out")
    assert row["cpu"] == 0.5 and "aura" not in row


def test_unknown_phase_is_missing(write: Write, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "n")
    writer.begin(Header(node="n", t=T0, mono=0.0, interval_s=1.0, ranks=[0], fast=["rank0.phase"]))
    for d, code in enumerate((0.0, 99.0, np.nan)):
        writer.fast(float(d), np.array([code]))
    writer.close()
    assert [r["phase"] for r in write(attempt_segments(tmp_path / "n"), tmp_path / "out")] == ["idle", None, None]


def test_damage_affects_only_its_segment(tmp_path: Path) -> None:
    good, bad = record(tmp_path, "good", seconds=4), record(tmp_path, "bad", seconds=4)
    (bad / "0" / "header.json").write_text("{")
    result = write_csv(attempt_segments(bad, good), tmp_path / "out.csv")
    assert result.rows == 4 * 3 + 1 and len(result.errors) == 1 and "damaged" in result.errors[0]


def test_every_field_has_a_column() -> None:
    assert set(FIELDS) == {f.name for f in (*fields.GPU, *fields.HOST, *fields.RANK)}


@pytest.mark.parametrize("to", [write_csv, write_parquet], ids=["csv", "parquet"])
def test_unwritable_path_raises(to: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "no" / "x", tmp_path / "file" / "x", Path("/proc/x")):
        with pytest.raises(ConfigError, match="cannot be written") as e:
            to([], place)
        assert e.value.fix
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigError, match="not a regular file"):
            to([], place)
    assert Path("/dev/null").is_char_device()


def test_full_disk_keeps_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table, "_write", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_csv([], path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_file_mode_follows_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_csv([], tmp_path / "out.csv")
    finally:
        os.umask(before)
    assert (tmp_path / "out.csv").stat().st_mode & 0o777 == 0o640


def test_parquet_to_stdout_raises() -> None:
    with pytest.raises(UsageError, match="--csv -"):
        write_parquet([], "-")


def test_progress_reaches_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_CELLS", 40)
    calls: list[tuple[int, int]] = []
    write_csv(
        attempt_segments(record(tmp_path)),
        tmp_path / "out.csv",
        progress=lambda done, total: calls.append((done, total)),
    )
    assert len(calls) > 2 and calls == sorted(calls)
    assert calls[-1][0] >= 0.99 * calls[-1][1] and len({total for _, total in calls}) == 1


_TO_STDOUT = """
import sys
from pathlib import Path
from clustertrain.telemetry.export.table import AttemptSegment, write_csv
from clustertrain.telemetry.store.reader import open_node
write_csv([AttemptSegment(1, s) for s in open_node(Path(sys.argv[1]))] * int(sys.argv[2]), "-")
"""


@pytest.mark.long
@pytest.mark.parametrize(("times", "lines"), [(1, None), (2000, 3)])
def test_stdout_reader_may_exit_early(times: int, lines: int | None, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _TO_STDOUT, str(record(tmp_path)), str(times)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        rows = [child.stdout.readline() for _ in range(lines)] if lines else child.stdout.readlines()
        child.stdout.close()
        assert child.wait(120) == 0 and child.stderr.read() == ""
    assert rows[0].startswith('"time_s","attempt"') and rows[1].startswith('1700000000,1,"node1","gpu0"')
    assert len(rows) == (lines or 1 + 25 * 3 + 3)
