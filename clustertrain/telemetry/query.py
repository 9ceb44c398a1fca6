"""What a run's telemetry adds up to: reads the files of all nodes and attempts, pools them by GPU and by node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from clustertrain.errors import NotFound, UsageError
from clustertrain.run import attempts, events
from clustertrain.run.folder import AttemptDir, RunDir
from clustertrain.telemetry import notes
from clustertrain.telemetry.nvml import FIELDS
from clustertrain.telemetry.parts import Part, of_attempt, since, window_of
from clustertrain.telemetry.series import Column, Series
from clustertrain.telemetry.store import GpuFacts
from clustertrain.telemetry.summary import (
    AttemptSummary,
    GpuSummary,
    HostSummary,
    ProcessSummary,
    Stats,
    Summary,
    Timeline,
    Window,
)

GIB = 1 << 30
_TIMELINE_STEPS = 160
_REPORTED = {"memory_used_bytes": "memory_used_gib"}  # names that differ between the file and the report
_GAP = 5  # sampling intervals without a sample, over which power is not integrated


@dataclass
class _Piece:
    """One GPU's columns in one part; empty where nothing was recorded."""

    part: Part
    facts: GpuFacts
    t: Column
    values: dict[str, Column]
    reasons: dict[str, str] = field(default_factory=dict)


def summarize(run: RunDir, attempt: int | None = None, gpu: str | None = None, since_s: float | None = None) -> Summary:
    """The per-job report, over all attempts or one of them.

    Args:
        gpu: only GPUs that fit: a UUID or its beginning, an index, or ``node:index``.
        since_s: only the last so many seconds of what was recorded.

    Raises:
        NotFound: there is no such attempt.
        UsageError: no GPU fits ``gpu``.
    """
    chosen = [a for a in run.attempts() if attempt in (None, a.n)]
    if attempt is not None and not chosen:
        known = ", ".join(str(a.n) for a in run.attempts()) or "none"
        raise NotFound(f"run {run.id} has no attempt {attempt}", fix=f"attempts so far: {known}")
    logs = {a.n: events.of_attempt(a) for a in chosen}
    parts = [p for a in chosen for p in of_attempt(a, logs[a.n])]
    if since_s is not None:
        parts = since(parts, since_s)
    window = window_of(parts)
    pieces = _pieces(parts)
    gpus = [_gpu(key, found, window) for key, found in pieces.items() if gpu is None or _fits(gpu, key, found)]
    if gpu is not None and not gpus:
        raise UsageError(f"--gpu {gpu}: no allocated GPU of {run.id} fits", fix=_known(pieces))
    hosts = [_host(node, found) for node, found in _grouped(parts, lambda p: p.node).items()]
    if gpu is not None:
        hosts = [h for h in hosts if h.node in {g.node for g in gpus}]
    summary = Summary(
        run=run.id,
        job_id=next(iter(reversed(attempts.job_ids(run))), None),
        window=window,
        coverage=_coverage(gpus, hosts),
        attempts=[_attempt(run, a, [p for p in parts if p.attempt == a.n]) for a in chosen],
        gpus=sorted(gpus, key=lambda g: (g.node, g.index is None, g.index or 0, g.uuid)),
        hosts=sorted(hosts, key=lambda h: h.node),
        notes=[],
    )
    return msgspec.structs.replace(summary, notes=notes.of(summary, [e for log in logs.values() for e in log]))


def _attempt(run: RunDir, attempt: AttemptDir, parts: list[Part]) -> AttemptSummary:
    job_id = attempts.read_one(run, attempt).job_id
    return AttemptSummary(attempt.n, job_id or None, window_of(parts), sorted({p.node for p in parts}))


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _pieces(parts: list[Part]) -> dict[tuple[str, str], list[_Piece]]:
    found = []
    for part in parts:
        for i, facts in enumerate(part.gpus):
            s = part.series
            if s is None:
                found.append(_Piece(part, facts, np.empty(0), {}))
            else:
                found.append(_Piece(part, facts, s.t, s.gpus[i], s.reasons[i]))
    return _grouped(found, lambda p: (p.part.node, p.facts.uuid))


def _fits(wanted: str, key: tuple[str, str], pieces: list[_Piece]) -> bool:
    node, uuid = key
    where, colon, number = wanted.rpartition(":")
    if number.isdigit() and (not colon or where == node):
        return pieces[-1].facts.index == int(number)
    return not wanted.isdigit() and uuid.lower().startswith(wanted.lower())


def _known(pieces: dict[tuple[str, str], list[_Piece]]) -> str:
    names = [f"{node}:{found[-1].facts.index} ({uuid})" for (node, uuid), found in pieces.items()]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ("give one of " + ", ".join(names[:8]) + more) if names else "the run recorded no GPU at all"


def _stats(column: Column, scale: float = 1.0) -> Stats | None:
    values = column[np.isfinite(column)] / scale
    if not len(values):
        return None
    p5, p50, p95 = np.percentile(values, (5, 50, 95))
    numbers = (values.mean(), p5, p50, p95, values.max())
    return Stats(*(round(float(v), 4) for v in numbers))


def _pooled(columns: Iterable[Column]) -> Column:
    return np.concatenate([np.empty(0), *columns])


def _gpu(key: tuple[str, str], pieces: list[_Piece], window: Window) -> GpuSummary:
    facts = pieces[-1].facts
    columns = {f: _pooled(p.values.get(f, np.full(len(p.t), np.nan)) for p in pieces) for f in FIELDS}
    answered = np.any(np.isfinite(np.stack(list(columns.values()))), axis=0)
    energy_j, source = _energy(pieces)
    total = next((p.facts.memory_total_bytes for p in reversed(pieces) if p.facts.memory_total_bytes), None)
    nulls = _nulls(columns, [r for p in pieces for r in p.reasons.items()], facts.reason)
    if energy_j is not None:
        nulls.pop("energy_j", None)
    if total is None:
        nulls["memory_total_gib"] = facts.reason or "the driver did not say"
    return GpuSummary(
        node=key[0],
        uuid=key[1],
        index=facts.index,
        name=next((p.facts.name for p in reversed(pieces) if p.facts.name), None),
        ranks=facts.ranks,
        attempts=sorted({p.part.attempt for p in pieces}),
        samples=int(answered.sum()),
        expected=sum(p.part.expected for p in pieces),
        utilization=_stats(columns["utilization"]),
        memory_used_gib=_stats(columns["memory_used_bytes"], GIB),
        memory_total_gib=None if total is None else round(total / GIB, 3),
        power_w=_stats(columns["power_w"]),
        energy_j=energy_j,
        energy_source=source,
        temperature_c=_stats(columns["temperature_c"]),
        sm_clock_mhz=_stats(columns["sm_clock_mhz"]),
        memory_clock_mhz=_stats(columns["memory_clock_mhz"]),
        timeline=_timeline(_pooled(p.t for p in pieces), columns["utilization"], window),
        nulls=nulls,
    )


def _nulls(columns: dict[str, Column], reasons: list[tuple[str, str]], lost: str | None) -> dict[str, str]:
    """Why a field is missing, with the share of samples where it is not missing throughout."""
    known = dict(reasons)
    found = {}
    for name, column in columns.items():
        missing = int(np.isnan(column).sum())
        if not missing and len(column):
            continue
        reason = known.get(name) or lost or ("no sample was recorded" if not len(column) else "no reason was recorded")
        partly = f" ({missing} of {len(column)} samples)" if missing < len(column) else ""
        found[_REPORTED.get(name, name)] = reason + partly
    return found


def _energy(pieces: list[_Piece]) -> tuple[float | None, str | None]:
    """Joules over all pieces, and where they come from."""
    total, sources = 0.0, set()
    for piece in pieces:
        for source, joules in (("counter", _counted(piece)), ("power", _integrated(piece))):
            if joules is not None:
                total += joules
                sources.add(source)
                break
    if not sources:
        return None, None
    return round(total, 1), sources.pop() if len(sources) == 1 else "mixed"


def _counted(piece: _Piece) -> float | None:
    counter = piece.values.get("energy_j", np.empty(0))
    counter = counter[np.isfinite(counter)]
    if len(counter) < 2:
        return None
    steps = np.diff(counter)
    return float(steps[steps >= 0].sum())  # it begins anew when the driver is loaded again


def _integrated(piece: _Piece) -> float | None:
    power = piece.values.get("power_w", np.empty(0))
    there = np.isfinite(power)
    if there.sum() < 2:
        return None
    t, power = piece.t[there], power[there]
    width = np.diff(t)
    area = (power[1:] + power[:-1]) / 2 * width
    return float(area[width <= _GAP * piece.part.interval_s].sum())


def _timeline(t: Column, utilization: Column, window: Window) -> Timeline:
    if window.start is None or window.end is None:
        return Timeline(1.0, [])
    step = max((window.end - window.start) / _TIMELINE_STEPS, 1.0)
    count = int((window.end - window.start) / step + 1e-6) + 1
    there = np.isfinite(utilization)
    at = np.clip(((t[there] - window.start) / step).astype(int), 0, count - 1)
    number = np.bincount(at, minlength=count)
    total = np.bincount(at, weights=utilization[there], minlength=count)
    means = [round(float(s / n), 4) if n else None for s, n in zip(total, number, strict=True)]
    return Timeline(round(step, 3), means)


def _host(node: str, parts: list[Part]) -> HostSummary:
    recorded = [p.series for p in parts if p.series is not None]
    header = recorded[-1].header if recorded else None
    columns = {f: _pooled(s.host.get(f, np.empty(0)) for s in recorded) for f in ("cpu", "memory_used_bytes", "load1")}
    nulls = {k: v for s in recorded for k, v in s.host_reasons.items()}
    total = header.memory_total_bytes if header else None
    return HostSummary(
        node=node,
        attempts=sorted({p.attempt for p in parts}),
        samples=sum(p.received for p in parts),
        expected=sum(p.expected for p in parts),
        nvml=header.nvml if header else None,
        driver=header.driver if header else None,
        allocation=header.allocation if header else None,
        cpu=_stats(columns["cpu"]),
        cpu_count=header.cpu_count if header else None,
        memory_used_gib=_stats(columns["memory_used_bytes"], GIB),
        memory_total_gib=None if total is None else round(total / GIB, 3),
        load1=_stats(columns["load1"]),
        processes=_processes(recorded),
        nulls={_REPORTED.get(k, k): v for k, v in nulls.items()},
    )


def _processes(series: list[Series]) -> ProcessSummary | None:
    taken = [p for s in series for p in s.processes]
    rss = _stats(np.array([p.rss_bytes for p in taken], dtype=np.float64), GIB)
    cores = _stats(np.array([p.cpu_cores for p in taken], dtype=np.float64))
    return None if rss is None else ProcessSummary(rss, cores, max(p.count for p in taken))


def _coverage(gpus: list[GpuSummary], hosts: list[HostSummary]) -> float | None:
    """Over GPUs where there are any, since a lost one is what it must show; over hosts else."""
    with_gpu = {g.node for g in gpus}
    counted = [(g.samples, g.expected) for g in gpus]
    counted += [(h.samples, h.expected) for h in hosts if h.node not in with_gpu]
    expected = sum(e for _, e in counted)
    return None if not expected else round(sum(min(n, e) for n, e in counted) / expected, 4)
