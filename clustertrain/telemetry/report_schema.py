"""The shape of ``clustertrain telemetry --json``; scripts lean on these names. Ratios are 0-1, times UTC epoch s."""

from __future__ import annotations

import msgspec

from clustertrain.run.contract_status import ContractStatus
from clustertrain.run.goodput import Goodput


class Stats(msgspec.Struct, frozen=True):
    """Over all samples that have a value. The percentiles come from histograms with bins of 2 %."""

    mean: float
    p5: float
    p50: float
    p95: float
    max: float


class TimeWindow(msgspec.Struct, frozen=True):
    """First and last moment with telemetry, None where there is none."""

    start: float | None
    end: float | None


class Timeline(msgspec.Struct, frozen=True):
    """Mean utilization in equal steps over the job's window; None where nothing was recorded."""

    step_s: float
    utilization: list[float | None]


class ThrottleShares(msgspec.Struct, frozen=True):
    """Shares of the samples in which the clock was held down; None where the driver does not tell."""

    power: float | None = None
    thermal: float | None = None
    hardware: float | None = None


class PhaseStats(msgspec.Struct, frozen=True):
    """A GPU while its rank was in one phase (``run/heartbeat.py``). ``share`` is of the GPU's samples; the others are
    means over those of the phase."""

    share: float
    utilization: float | None
    power_w: float | None
    sm_clock_mhz: float | None
    sm_activity: float | None = None
    tensor_activity: float | None = None
    throttled: ThrottleShares = ThrottleShares()


class ErrorCounts(msgspec.Struct, frozen=True):
    """Increases over the run, None where the driver does not tell; ``xids`` with their times, oldest first."""

    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    nvlink_errors: int | None = None
    pcie_replays: int | None = None
    xids: list[XidRecord] = []


class XidRecord(msgspec.Struct, frozen=True):
    """``count``: so many came by ``t``, since the driver was asked before."""

    t: float
    xid: int
    count: int = 1


class GpuSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One allocated GPU, over all attempts that had it.

    A figure is None when no sample has it; ``nulls`` then gives the reason, and also where only some samples lack it.
    ``energy_source`` is ``counter`` (the GPU's own), ``power`` (integrated from the power samples) or ``mixed``.
    ``phases`` has what its rank was in, by name; empty where no rank told.
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
    sm_activity: Stats | None = None
    tensor_activity: Stats | None = None
    dram_activity: Stats | None = None
    pcie_bytes_per_s: Stats | None = None
    nvlink_bytes_per_s: Stats | None = None
    processes_max: int | None = None
    nvlinks_active_min: int | None = None
    nvlinks_active_max: int | None = None
    throttled: ThrottleShares = ThrottleShares()
    errors: ErrorCounts = ErrorCounts()
    phases: dict[str, PhaseStats] = {}
    parent: str | None = None  # of a MIG slice: the GPU's UUID
    power_limit_w: float | None = None  # that the board keeps to


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in the newest attempt that it told of itself. Times are a step's mean; ``forward_s`` is None where the
    layout has collectives in the forward pass."""

    rank: int
    node: str
    uuid: str | None
    step: int | None
    data_wait_s: float | None
    forward_s: float | None
    memory_gib: Stats | None = None
    cpu_cores: float | None = None


class ProcessSummary(msgspec.Struct, frozen=True):
    """The processes below the agent, taken every 10 s. Shared pages count once for each process that maps them."""

    rss_gib: Stats
    cpu_cores: Stats | None
    count_max: int


class HostSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One node. ``nvml`` says why it had no GPU figures for ``nvml_missing_s``, else None. ``cpu_allocated`` and
    ``memory_allocated_gib`` are the job's on this node, None where nothing says. ``agents_max``: so many samplers
    recorded it at the same time, of which the longest recording is counted; ``silent_s``: its agent was gone for so
    long while the attempt went on; ``clock_steps_s``: by how much its wall clock was set forward (or, below 0, back),
    each time."""

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
    cpu_allocated: int | None = None
    memory_allocated_gib: float | None = None
    network_bytes_per_s: Stats | None = None
    infiniband_bytes_per_s: Stats | None = None
    disk_bytes_per_s: Stats | None = None
    agents_max: int = 1
    silent_s: float = 0.0
    clock_steps_s: list[float] = []
    nvml_missing_s: float = 0.0


class AttemptSummary(msgspec.Struct, frozen=True):
    """``events`` are what stands on the timeline: (time, name, words)."""

    n: int
    job_id: str | None
    window: TimeWindow
    nodes: list[str]
    start: float | None = None
    end: float | None = None
    ending: str | None = None
    events: list[TimelineEvent] = []


class TimelineEvent(msgspec.Struct, frozen=True):
    """Something that happened, or with ``end`` lasted: ``kind`` is the event's name."""

    t: float
    kind: str
    text: str
    end: float | None = None


class TrainingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the watts bought, over the steps that count. ``energy_j`` is of the GPUs and the time that were asked for,
    ``joules_per_token`` is None where those are not all GPUs, or some do not tell what they draw; a step that was
    repeated costs energy and counts once. Of what has no tokens, images say, ``samples`` are counted; None for a script
    that splits its batch itself."""

    steps: int
    tokens: float | None
    step_s: Stats | None
    tokens_per_s: float | None  # while training
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    energy_j: float | None
    joules_per_token: float | None
    data_wait_share: float | None  # of the step time of rank 0
    loss: float | None
    samples: float | None = None
    samples_per_s: float | None = None  # while training


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours allocated while the agents were up, and those of them that trained nothing: idle GPUs whole; of the
    others the share that the ledger has outside of productive steps, but for ``other_s``: a script without
    ``session.steps`` trains in it. ``by_cause``: ``idle_gpus``, else the name in :class:`Goodput` without ``_s``."""

    gpu_hours: float
    wasted_gpu_hours: float
    by_cause: dict[str, float]


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the user should know. ``severity`` is ``critical``, ``warning`` or ``info``."""

    severity: str
    code: str
    text: str
    fix: str | None = None
    node: str | None = None
    uuid: str | None = None
    rank: int | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``coverage`` is samples received / samples expected while the agents were up, None when none was expected.
    ``goodput`` and ``waste`` are of the attempt and the time that were asked for. ``enabled``: the recipe has telemetry
    on. ``device``: ``cuda`` or ``cpu``, as planned."""

    run: str
    job_id: str | None
    window: TimeWindow
    coverage: float | None
    attempts: list[AttemptSummary]
    gpus: list[GpuSummary]
    hosts: list[HostSummary]
    notes: list[Insight]
    state: str | None = None
    user: str | None = None
    layout: str | None = None
    ranks: list[RankSummary] = []
    training: TrainingSummary | None = None
    goodput: Goodput | None = None
    waste: Waste | None = None
    unreadable: list[str] = []  # files that this user may not read, or that are damaged, and why
    enabled: bool = True
    device: str | None = None
    contract: ContractStatus | None = None
