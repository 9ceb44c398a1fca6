"""Schema of ``clustertrain telemetry --json``; scripts rely on these names. Ratios are 0-1, times UTC epoch seconds.

Points in time have other keys in the JSON: ``start`` is ``start_unix_s`` (``report/documents/encode.py``).
"""

from __future__ import annotations

import msgspec

from clustertrain.run.usage.contract_status import ContractStatus
from clustertrain.run.usage.goodput import Goodput


class Stats(msgspec.Struct, frozen=True):
    """Statistics over all samples that have a value; percentiles come from histograms with 2 % bins."""

    mean: float
    p5: float
    p50: float
    p95: float
    max: float


class TimeWindow(msgspec.Struct, frozen=True):
    """First and last moment with telemetry; None without telemetry."""

    start: float | None
    end: float | None


class Timeline(msgspec.Struct, frozen=True):
    """Mean utilization in equal steps over the job's window; None for steps without samples."""

    step_s: float
    utilization: list[float | None]


class ThrottleShares(msgspec.Struct, frozen=True):
    """Shares of the samples in which the clock was throttled, by cause; None if the driver does not report it."""

    power: float | None = None
    thermal: float | None = None
    hardware: float | None = None


class PhaseStats(msgspec.Struct, frozen=True):
    """One GPU while its rank was in one phase (``run/heartbeat.py``); values are means over the phase's samples."""

    share: float  # of the GPU's samples
    utilization: float | None
    power_w: float | None
    sm_clock_mhz: float | None
    sm_activity: float | None = None
    tensor_activity: float | None = None
    throttle_ratio: ThrottleShares = ThrottleShares()


class ErrorCounts(msgspec.Struct, frozen=True):
    """Increases of error counters over the run; None if the driver does not report them."""

    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    nvlink_errors: int | None = None
    pcie_replays: int | None = None
    xids: list[XidRecord] = []  # oldest first


class XidRecord(msgspec.Struct, frozen=True):
    """Occurrences of one XID between two polls of the driver."""

    t: float  # of the later poll
    xid: int
    count: int = 1


class GpuSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One allocated GPU, over all attempts that used it. A value is None if no sample has it."""

    node: str
    uuid: str
    index: int | None
    name: str | None
    ranks: list[int]
    attempts: list[int]
    samples: int
    samples_expected: int
    utilization: Stats | None
    memory_used_gib: Stats | None
    memory_total_gib: float | None
    power_w: Stats | None
    energy_j: float | None
    energy_source: str | None
    """``counter`` (the GPU's energy counter), ``power`` (integrated from power samples) or ``mixed``."""
    temperature_c: Stats | None
    sm_clock_mhz: Stats | None
    memory_clock_mhz: Stats | None
    timeline: Timeline
    missing: dict[str, str]
    """Reason by field, for fields that all or some samples lack."""
    sm_activity: Stats | None = None
    tensor_activity: Stats | None = None
    dram_activity: Stats | None = None
    pcie_bytes_per_s: Stats | None = None
    nvlink_bytes_per_s: Stats | None = None
    processes_max: int | None = None
    nvlinks_active_min: int | None = None
    nvlinks_active_max: int | None = None
    throttle_ratio: ThrottleShares = ThrottleShares()
    errors: ErrorCounts = ErrorCounts()
    phases: dict[str, PhaseStats] = {}
    """Statistics by phase name; empty without heartbeats of a rank."""
    parent: str | None = None  # for a MIG slice, the GPU's UUID
    power_limit_w: float | None = None  # enforced by the board


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in the newest attempt with heartbeats of it. Times are means per step."""

    rank: int
    node: str
    uuid: str | None
    step: int | None
    data_wait_s: float | None
    forward_s: float | None
    """None if the layout has collectives in the forward pass."""
    memory_gib: Stats | None = None
    cpu_cores: float | None = None


class ProcessSummary(msgspec.Struct, frozen=True):
    """The agent's descendant processes, sampled every 10 s. Shared pages count once for each process that maps them."""

    rss_gib: Stats
    cpu_cores: Stats | None
    count_max: int


class HostSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One node, over all attempts that used it."""

    node: str
    attempts: list[int]
    samples: int
    samples_expected: int
    nvml_error: str | None
    """Why GPU samples are missing for ``nvml_missing_s``; None if none are missing."""
    driver: str | None
    allocation_source: str | None
    cpu: Stats | None
    cpu_count: int | None
    memory_used_gib: Stats | None
    memory_total_gib: float | None
    load1: Stats | None
    processes: ProcessSummary | None
    missing: dict[str, str]
    cpu_allocated: int | None = None
    """Processors of the job on this node; None if unknown."""
    memory_allocated_gib: float | None = None
    """Memory of the job on this node; None if unknown."""
    network_bytes_per_s: Stats | None = None
    infiniband_bytes_per_s: Stats | None = None
    disk_bytes_per_s: Stats | None = None
    samplers_max: int = 1
    """Most samplers that recorded the node at the same time; only the longest recording counts."""
    agent_lost_s: float = 0.0
    """Seconds without an agent on this node while the attempt continued."""
    clock_steps_s: list[float] = []
    """Steps of the wall clock, in seconds; negative if it was set back."""
    nvml_missing_s: float = 0.0


class AttemptSummary(msgspec.Struct, frozen=True):
    """One attempt of the run and the events on its timeline."""

    n: int
    job_id: str | None
    window: TimeWindow
    nodes: list[str]
    start: float | None = None
    end: float | None = None
    ending: str | None = None
    events: list[TimelineEvent] = []


class TimelineEvent(msgspec.Struct, frozen=True):
    """One event on the timeline, or an interval if ``end`` is set."""

    t: float
    kind: str  # the event's name
    text: str
    end: float | None = None


class TrainingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Training progress and its energy cost. A repeated step costs energy but counts once."""

    steps: int
    tokens: float | None
    step_s: Stats | None
    tokens_per_s: float | None  # while training
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    energy_j: float | None
    """Energy of the selected GPUs in the selected time."""
    joules_per_token: float | None
    """None if only some GPUs are selected, or if some do not report their energy."""
    data_wait_share: float | None  # of the step time of rank 0
    loss: float | None
    samples: float | None = None
    """Samples, for data without tokens such as images; None for a script that splits its batch itself."""
    samples_per_s: float | None = None  # while training


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours without training progress, while the agents were up.

    All hours of an idle GPU are wasted. Of the other GPUs, the share outside productive steps in the goodput ledger is
    wasted, except ``other_s``: a script without ``session.steps`` trains in it.
    """

    gpu_hours: float  # allocated
    wasted_gpu_hours: float
    by_cause: dict[str, float]  # GPU-hours by ``idle_gpus`` or a field of :class:`Goodput` without ``_s``


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """A finding for the user."""

    severity: str  # ``critical``, ``warning`` or ``info``
    code: str
    text: str
    fix: str | None = None
    node: str | None = None
    uuid: str | None = None
    rank: int | None = None
    gpu_hours: float | None = None
    """Estimated GPU-hours that it cost, for a slow GPU or rank those in which all others waited; None if unknown."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry report of a run, limited to the selected attempt and time."""

    run: str
    job_id: str | None
    window: TimeWindow
    coverage: float | None
    """Received / expected samples while the agents were up; None if none were expected."""
    attempts: list[AttemptSummary]
    gpus: list[GpuSummary]
    hosts: list[HostSummary]
    insights: list[Insight]
    state: str | None = None
    user: str | None = None
    layout: str | None = None
    ranks: list[RankSummary] = []
    training: TrainingSummary | None = None
    goodput: Goodput | None = None
    waste: Waste | None = None
    read_errors: list[str] = []  # files that this user cannot read or that are damaged, each with the reason
    enabled: bool = True  # whether the recipe enables telemetry
    watched: bool = False  # whether the job was started without clustertrain, so that nothing of its training is known
    device: str | None = None  # ``cuda`` or ``cpu``, as planned
    contract: ContractStatus | None = None
