"""The Parquet form of a segment, for the time after the attempt."""

from __future__ import annotations

from pathlib import Path

from clustertrain.telemetry.fields import Pace
from clustertrain.telemetry.histogram import Column
from clustertrain.telemetry.rollup import Buckets, Table


def exists(folder: Path) -> bool:
    return (folder / "fast.parquet").exists()


def read(folder: Path, pace: Pace, columns: list[str], low: float, high: float) -> tuple[Column, Table]:
    raise FileNotFoundError(folder / f"{pace}.parquet")


def read_rollup(folder: Path, step_s: int, columns: list[str]) -> Buckets:
    raise FileNotFoundError(folder / f"rollup-{step_s}.parquet")
