"""Synthetic samples of a node during training, for the benchmarks of the store: steps, checkpoints, noise."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from clustertrain import fsio
from clustertrain.run import heartbeat
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.telemetry import fields
from clustertrain.telemetry.fields import FAST, SLOW, Pace
from clustertrain.telemetry.store import totals
from clustertrain.telemetry.store.writer import HEADER, GpuFacts, Header, Writer

GIB = 2**30
Column = npt.NDArray[np.float64]
_STEP_S = 3.7
_CHECKPOINT_S = 1800.0
_SAVE_S = 25.0


def make_header(node: str, gpus: int, first_rank: int, t: float, interval_s: float = 1.0) -> Header:
    ranks = list(range(first_rank, first_rank + gpus))
    facts = [
        GpuFacts(
            uuid=f"GPU-{node}-{i:04d}-5a9e-4f0d", index=i, minor=i, name="NVIDIA H200", memory_total_bytes=141 * GIB,
            ranks=[first_rank + i],
        )
        for i in range(gpus)
    ]  # fmt: skip
    return Header(
        node=node,
        t=t,
        mono=1234.5,
        interval_s=interval_s,
        gpus=facts,
        ranks=ranks,
        driver="570.124.06",
        allocation_source="SLURM_JOB_GPUS",
        cpu_count=192,
        cpu_allocated=96,
        memory_total_bytes=2048 * GIB,
        memory_allocated_bytes=1024 * GIB,
        fast=fields.column_names(gpus, ranks, FAST),
        slow=fields.column_names(gpus, ranks, SLOW),
    )


class Node:
    """Generator of what one node records.

    The noise is realistic: utilization in whole percent with dips at the end of a step, power that drifts slowly with
    2 % noise, a constant clock except at the power limit, counters that are integrals of noisy rates, memory that
    depends on the phase, no errors.
    """

    def __init__(self, seed: int = 1) -> None:
        self._random = np.random.default_rng(seed)

    def rows(self, header: Header, pace: Pace, d: Column) -> Column:
        """Return the values [n, columns of the pace] at the times ``d`` (s), in the header's order, as the store rounds
        them."""
        values = {c: np.full(len(d), np.nan) for c in header.columns(pace)}
        saving = (d % _CHECKPOINT_S) > _CHECKPOINT_S - _SAVE_S
        if pace == FAST:
            for i, rank in enumerate(header.ranks):
                self._gpu(values, i, d, saving)
                self._rank(values, rank, d, saving)
        else:
            self._slow(values, header, d)
        columns = header.columns(pace)
        scale = np.array([fields.scale(c) for c in columns])
        return np.rint(np.column_stack([values[c] for c in columns]) * scale) / scale

    def _noise(self, n: int, scale: float) -> Column:
        return self._random.normal(0.0, scale, n)

    def _gpu(self, out: dict[str, Column], i: int, d: Column, saving: npt.NDArray[np.bool_]) -> None:
        n, random = len(d), self._random
        interval = np.diff(d, prepend=d[0] - (d[1] - d[0] if n > 1 else 1.0))
        dip = random.random(n) < 1 / _STEP_S / 3
        busy = np.where(saving, 0.0, np.where(dip, random.integers(88, 99, n), 99 + (random.random(n) < 0.7)) / 100)
        wander = np.interp(d, np.arange(d[0], d[-1] + 120, 60), self._noise(int((d[-1] - d[0]) / 60) + 3, 6.0))
        power = np.where(saving, 128 + self._noise(n, 1.5), 655 + 3 * i + wander + self._noise(n, 11.0))
        active = np.where(saving, 0.0, np.clip(0.78 + self._noise(n, 0.012), 0, 1))
        capped = power > 690
        values = {
            "utilization": busy,
            "memory_busy": np.where(saving, 0.0, np.rint(46 + self._noise(n, 2.2)) / 100),
            "memory_used_bytes": np.where(saving, 118.2, 118.0) * GIB + (np.cumsum(random.random(n) < 2e-4) << 21),
            "power_w": power,
            "temperature_c": np.rint(np.where(saving, 48, 61 + i % 3 + wander / 6 + self._noise(n, 0.3))),
            "sm_clock_mhz": np.where(capped, 1980 - 15 * random.integers(1, 5, n), 1980),
            "memory_clock_mhz": np.full(n, 3201.0),
            "throttle_power": capped * 1.0,
            "throttle_thermal": np.zeros(n),
            "throttle_hardware": np.zeros(n),
            "sm_activity": active,
            "tensor_activity": active * 0.55 + self._noise(n, 0.003) * (active > 0),
            "dram_activity": active * 0.47 + self._noise(n, 0.004) * (active > 0),
            "energy_j": 5.1e7 + np.cumsum(power * interval),
        }
        traffic = {"pcie_tx_bytes": 3e8, "pcie_rx_bytes": 9e8, "nvlink_tx_bytes": 8.8e10, "nvlink_rx_bytes": 8.8e10}
        for name, per_s in traffic.items():
            rate = np.where(saving, per_s / 40, per_s) * (1 + self._noise(n, 0.03))
            values[name] = np.rint(np.cumsum(rate * interval) / 1024) * 1024  # the counters count KiB
        for name, column in values.items():
            out[fields.column_name(f"gpu{i}", name)] = column

    def _rank(self, out: dict[str, Column], rank: int, d: Column, saving: npt.NDArray[np.bool_]) -> None:
        step = np.floor(d / _STEP_S)
        waited = np.cumsum(self._random.gamma(2.0, 0.004, int(step[-1] - step[0]) + 1))[(step - step[0]).astype(int)]
        values = {
            "step": step,
            "phase": np.where(saving, heartbeat.CHECKPOINT, heartbeat.TRAIN),
            "tokens": step * 524_288,
            "data_wait_s": waited,
        }
        for name, column in values.items():
            out[fields.column_name(f"rank{rank}", name)] = np.asarray(column, dtype=np.float64)

    def _slow(self, out: dict[str, Column], header: Header, d: Column) -> None:
        n, random = len(d), self._random
        interval = np.diff(d, prepend=d[0] - (d[1] - d[0] if n > 1 else 10.0))
        for i in range(len(header.gpus)):
            values = {"processes": 1.0, "ecc_corrected": 0.0, "ecc_uncorrected": 0.0, "remapped_rows": 0.0}
            values |= {"remap_pending": 0.0, "remap_failed": 0.0, "nvlinks_active": 18.0, "nvlink_errors": 0.0}
            for name, value in values.items():
                out[fields.column_name(f"gpu{i}", name)] = np.full(n, value)
            out[f"gpu{i}.pcie_replays"] = np.cumsum(random.random(n) < 1e-4).astype(np.float64)
            out[f"gpu{i}.memory_temperature_c"] = np.rint(72 + self._noise(n, 0.6))
        out["host.cpu"] = 0.062 + np.abs(self._noise(n, 0.004))
        out["host.memory_used_bytes"] = np.rint((210 + np.cumsum(self._noise(n, 0.02))) * GIB / 4096) * 4096
        out["host.load1"] = 11 + np.abs(self._noise(n, 0.7))
        traffic = {"network_rx": 4e5, "network_tx": 2e5, "infiniband_rx": 4.1e10, "infiniband_tx": 4.1e10}
        for name, per_s in (traffic | {"disk_read": 0.0, "disk_write": 7e4}).items():
            out[f"host.{name}_bytes"] = np.rint(np.cumsum(per_s * (1 + self._noise(n, 0.1)) * interval))
        out["host.job_memory_bytes"] = np.rint((190 + np.cumsum(self._noise(n, 0.02))) * GIB / 4096) * 4096
        out["host.job_cpu_s"] = np.cumsum(11.2 * interval * (1 + self._noise(n, 0.02)))
        out["host.job_processes"] = np.full(n, 89.0)
        for rank in header.ranks:
            out[f"rank{rank}.memory_bytes"] = np.rint((19 + np.cumsum(self._noise(n, 0.003))) * GIB / 4096) * 4096
            out[f"rank{rank}.cpu_s"] = np.cumsum(1.3 * interval * (1 + self._noise(n, 0.02)))


def write_segment(
    folder: Path, header: Header, samples: int, seed: int = 1, flush_s: float = 10.0
) -> tuple[Path, Values]:
    """Write a segment sample by sample, as a sampler does; return its folder and its values."""
    random = np.random.default_rng(seed)
    # Samples are late by some tenths of a millisecond, like those of the sampling thread.
    d = np.round(np.arange(samples) * header.interval_s + np.abs(random.normal(0.0, 0.0006, samples)), 3)
    every = max(1, round(header.slow_s / header.interval_s))
    node = Node(seed)
    values = Values(d, node.rows(header, FAST, d), d[::every], node.rows(header, SLOW, d[::every]))
    writer = Writer(folder)
    writer.begin(header)
    flushed = 0.0
    for i, t in enumerate(d.tolist()):
        writer.fast(t, values.fast[i])
        if i % every == 0:
            writer.slow(t, values.slow[i // every])
        if t - flushed >= flush_s:
            writer.flush()
            flushed = t
    writer.flush()
    segment = writer.segment
    if segment is None:
        raise RuntimeError("flush() claims a segment")
    writer.end(float(d[-1]) + header.interval_s)
    writer.close()
    return segment, values


@dataclass(frozen=True)
class Values:
    """The written times [n] and values [n, columns] of each pace."""

    d: Column
    fast: Column
    slow_d: Column
    slow: Column

    @property
    def stored(self) -> int:
        """The number of values, without missing ones."""
        return int(np.isfinite(self.fast).sum() + np.isfinite(self.slow).sum())


def new_run(home: Path, name: str, nodes: list[str]) -> AttemptDir:
    """Create a run directory with one attempt, which ``clustertrain telemetry`` can read."""
    run = RunDir(home / "runs" / name)
    attempt = run.attempt(1)
    attempt.telemetry.mkdir(parents=True)
    run.spec.write_text("")
    fsio.write_json(attempt.record, {"job_id": "4711", "restart": 0, "nodes": nodes, "host": nodes[0]})
    return attempt


def copy_segment(source: Path, target: Path, header: Header) -> None:
    """Copy a compacted segment to another node: the same values under that node's header."""
    target.mkdir(parents=True)
    (target / HEADER).write_bytes(msgspec.json.encode(header))
    sums = totals.load_totals(source)
    if sums is None:
        raise RuntimeError(f"{source} has no totals")
    sums.columns = header.fast + header.slow
    (target / totals.NAME).write_bytes(totals.dump(sums))
    for path in source.iterdir():
        if path.suffix == ".parquet":
            (target / path.name).hardlink_to(path)  # a report of this length does not read them
        elif not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
