"""The shape of ``clustertrain telemetry --json``; scripts lean on these names. Ratios are 0-1, times UTC epoch s."""

from __future__ import annotations

import msgspec


class Stats(msgspec.Struct, frozen=True):
    """Over all samples that have a value."""

    mean: float
    p5: float
    p50: float
    p95: float
    max: float


class Window(msgspec.Struct, frozen=True):
    """First and last moment with telemetry, None where there is none."""

    start: float | None
    end: float | None


class Timeline(msgspec.Struct, frozen=True):
    """Mean utilization in equal steps over the job's window; None where nothing was recorded."""

    step_s: float
    utilization: list[float | None]


class GpuSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One allocated GPU, over all attempts that had it.

    A figure is None when no sample has it; ``nulls`` then gives the reason, and also where only some samples lack it.
    ``energy_source`` is ``counter`` (the GPU's own), ``power`` (integrated from the power samples) or ``mixed``.
    """

    node: str
    uuid: str
    index: int | None
    name: str | None
    ranks: list[int]
    attempts: list[int]
    samples: int
    expected: int
    utilization: Stats | None
    memory_used_gib: Stats | None
    memory_total_gib: float | None
    power_w: Stats | None
    energy_j: float | None
    energy_source: str | None
    temperature_c: Stats | None
    sm_clock_mhz: Stats | None
    memory_clock_mhz: Stats | None
    timeline: Timeline
    nulls: dict[str, str]


class ProcessSummary(msgspec.Struct, frozen=True):
    """The processes below the agent, taken every 10 s. Shared pages count once for each process that maps them."""

    rss_gib: Stats
    cpu_cores: Stats | None
    count_max: int


class HostSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One node. ``nvml`` says why it has no GPU figures, else None."""

    node: str
    attempts: list[int]
    samples: int
    expected: int
    nvml: str | None
    driver: str | None
    allocation: str | None
    cpu: Stats | None
    cpu_count: int | None
    memory_used_gib: Stats | None
    memory_total_gib: float | None
    load1: Stats | None
    processes: ProcessSummary | None
    nulls: dict[str, str]


class AttemptSummary(msgspec.Struct, frozen=True):
    n: int
    job_id: str | None
    window: Window
    nodes: list[str]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the user should know. ``severity`` is ``critical``, ``warning`` or ``info``."""

    severity: str
    code: str
    text: str
    fix: str | None = None
    node: str | None = None
    uuid: str | None = None
    rank: int | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``coverage`` is samples received / samples expected while the agents were up, None when none was expected."""

    run: str
    job_id: str | None
    window: Window
    coverage: float | None
    attempts: list[AttemptSummary]
    gpus: list[GpuSummary]
    hosts: list[HostSummary]
    notes: list[Note]
