"""Schema of ``clustertrain telemetry --json``; scripts rely on these names. Ratios are 0-1, times UTC epoch seconds.

Points in time have other keys in the JSON: ``start`` is ``start_unix_s`` (``report/documents/encode.py``).
"""

from __future__ import annotations

import msgspec

from clustertrain.run import state
from clustertrain.run.usage.contract_status import ContractStatus
from clustertrain.run.usage.goodput import Goodput


class Stats(msgspec.Struct, frozen=True):
    """Statistics over the samples that have a value, in the unit of the key; percentiles within 1 %."""

    mean: float
    """Arithmetic mean."""
    p5: float
    """5th percentile."""
    p50: float
    """Median."""
    p95: float
    """95th percentile."""
    max: float
    """Largest value."""


class TimeWindow(msgspec.Struct, frozen=True):
    """The time with telemetry; null without telemetry."""

    start: float | None
    """First moment with telemetry."""
    end: float | None
    """Last moment with telemetry."""


class Timeline(msgspec.Struct, frozen=True):
    """Utilization of a GPU in equal steps over the window of the report."""

    step_s: float
    """Length of a step, seconds."""
    utilization: list[float | None]
    """Mean utilization in each step, 0 to 1; null for a step without samples."""


class ThrottleShares(msgspec.Struct, frozen=True):
    """Shares of the samples in which the clock was held down, by cause; null if the driver does not report it."""

    power: float | None = None
    """By the power limit, 0 to 1."""
    thermal: float | None = None
    """By heat, 0 to 1."""
    hardware: float | None = None
    """By the board or the power supply, 0 to 1."""


class PhaseStats(msgspec.Struct, frozen=True):
    """One GPU while its rank was in one phase. A mean is null if no sample of the phase has the value."""

    share: float
    """Share of the GPU's samples, 0 to 1."""
    utilization: float | None
    """Mean share of time in which a kernel ran, 0 to 1."""
    power_w: float | None
    """Mean power drawn by the board, W."""
    sm_clock_mhz: float | None
    """Mean clock of the multiprocessors, MHz."""
    sm_activity: float | None = None
    """Mean share of time and multiprocessors with a warp resident, 0 to 1."""
    tensor_activity: float | None = None
    """Mean share of time in which the tensor cores were active, 0 to 1."""
    throttle_ratio: ThrottleShares = ThrottleShares()
    """Throttling in this phase, by cause."""


class ErrorCounts(msgspec.Struct, frozen=True):
    """Increases of error counters over the selected time; null if the driver does not report them."""

    ecc_corrected: int | None = None
    """Memory errors that ECC corrected."""
    ecc_uncorrected: int | None = None
    """Memory errors that ECC could not correct."""
    remapped_rows: int | None = None
    """Memory rows replaced for good; before Ampere, pages."""
    remap_pending: bool | None = None
    """At the end, a memory row waited to be replaced by a reset of the GPU."""
    remap_failed: bool | None = None
    """At the end, a memory row could not be replaced, so that the board has to be."""
    nvlink_errors: int | None = None
    """Replays, recoveries and CRC errors of NVLink."""
    pcie_replays: int | None = None
    """PCIe packets sent again."""
    xids: list[XidRecord] = []
    """Errors that the driver reported by number (XID), oldest first."""


class XidRecord(msgspec.Struct, frozen=True):
    """Occurrences of one XID between two polls of the driver."""

    t: float
    """When the later poll was."""
    xid: int
    """NVIDIA's number of the error."""
    count: int = 1
    """Number of occurrences."""


class GpuSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One allocated GPU or MIG slice, over all attempts that used it. A value is null if no sample has it."""

    node: str
    """Node that recorded it."""
    uuid: str
    """NVIDIA's id of the device; a made-up one, such as `missing-index-3`, if NVML does not list or open it."""
    index: int | None
    """NVML's number of the GPU, or of a slice's GPU, among those that the job sees on the node; null if NVML does not
    list it."""
    name: str | None
    """Model name."""
    ranks: list[int]
    """Global ranks that used it in its last recording; empty if unknown."""
    attempts: list[int]
    """Numbers of the attempts that held it."""
    samples: int
    """Recorded samples, of the field that has most."""
    samples_expected: int
    """Samples that the interval gives for the time in which the agent was up."""
    utilization: Stats | None
    """Share of time in which a kernel ran, 0 to 1."""
    memory_used_gib: Stats | None
    """Device memory in use by all processes, without what the driver reserves, GiB."""
    memory_total_gib: float | None
    """Device memory, GiB."""
    power_w: Stats | None
    """Power drawn by the board, W."""
    energy_j: float | None
    """Energy that it used, J; null if another node with the same GPU counts it."""
    energy_source: str | None
    """``counter`` (the GPU's energy counter), ``power`` (integrated from power samples) or ``mixed``."""
    temperature_c: Stats | None
    """Temperature of the chip, °C."""
    sm_clock_mhz: Stats | None
    """Clock of the multiprocessors, MHz."""
    memory_clock_mhz: Stats | None
    """Clock of the memory, MHz."""
    timeline: Timeline
    """Utilization over time."""
    missing: dict[str, str]
    """Reason by field, for fields that all or some samples lack."""
    sm_activity: Stats | None = None
    """Share of time and multiprocessors with a warp resident, 0 to 1; Hopper or later."""
    tensor_activity: Stats | None = None
    """Share of time in which the tensor cores were active, 0 to 1; Hopper or later."""
    dram_activity: Stats | None = None
    """Share of the memory's bandwidth in use, 0 to 1; Hopper or later."""
    pcie_bytes_per_s: Stats | None = None
    """PCIe traffic, bytes/s: the mean is of both directions together, the rest of the one with more traffic."""
    nvlink_bytes_per_s: Stats | None = None
    """NVLink traffic, bytes/s, as for `pcie_bytes_per_s`."""
    processes_max: int | None = None
    """Most processes that computed on it at the same time."""
    nvlinks_active_min: int | None = None
    """Fewest NVLinks that were up."""
    nvlinks_active_max: int | None = None
    """Most NVLinks that were up."""
    throttle_ratio: ThrottleShares = ThrottleShares()
    """Throttling over all samples, by cause."""
    errors: ErrorCounts = ErrorCounts()
    """Errors of the GPU."""
    phases: dict[str, PhaseStats] = {}
    """Statistics by phase of its rank: `idle`, `startup`, `restore`, `train`, `checkpoint`, `evaluation` and
    `shutdown`; empty without heartbeats of a rank."""
    parent: str | None = None
    """UUID of the GPU that a MIG slice is part of; null for a whole GPU."""
    power_limit_w: float | None = None
    """Power limit that the board enforces, W."""


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in the newest attempt with heartbeats of it."""

    rank: int
    """Global rank."""
    node: str
    """Node on which it ran."""
    uuid: str | None
    """UUID of its GPU; null on the CPU or if unknown."""
    step: int
    """Optimizer steps completed at its newest heartbeat."""
    data_wait_s: float | None
    """Mean time for which a step waited for its data, seconds; null if no step was recorded."""
    forward_s: float | None
    """Mean time of a step's forward passes, seconds; null if the layout has collectives in them or the script does
    not use ``session.train_step``."""
    memory_gib: Stats | None = None
    """Resident memory of its process and that process's descendants, GiB; null without a sample."""
    cpu_cores: float | None = None
    """Mean number of cores that these processes kept busy; null without two samples."""


class ProcessSummary(msgspec.Struct, frozen=True):
    """The agent's descendant processes, sampled every 10 s. Shared pages count once for each process that maps them."""

    rss_gib: Stats
    """Resident memory of all of them, GiB."""
    cpu_cores: Stats | None
    """Number of cores that they kept busy; null without two samples."""
    count_max: int
    """Most processes at the same time."""


class HostSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One node, over all attempts that used it. A value is null if it was not recorded."""

    node: str
    """Name of the node."""
    attempts: list[int]
    """Numbers of the attempts that used it."""
    samples: int
    """Recorded samples, of those taken every second by default."""
    samples_expected: int
    """Samples that the interval gives for the time in which the agent was up."""
    nvml_error: str | None
    """Why GPU samples are missing for ``nvml_missing_s``; null if none are missing."""
    driver: str | None
    """Version of NVIDIA's driver; null without NVML."""
    allocation_source: str | None
    """What names the GPUs of the job on this node, such as an environment variable; null without NVML."""
    cpu: Stats | None
    """Busy share of all processors, of all users, 0 to 1."""
    cpu_count: int | None
    """Logical processors of the node."""
    memory_used_gib: Stats | None
    """Memory in use by all users, without the page cache, GiB."""
    memory_total_gib: float | None
    """Memory of the node, GiB."""
    load1: Stats | None
    """Load average of one minute."""
    processes: ProcessSummary | None
    """The job's processes on this node."""
    missing: dict[str, str]
    """Reason by field, for fields that could not be read."""
    cpu_allocated: int | None = None
    """Processors of the job on this node; null if unknown."""
    memory_allocated_gib: float | None = None
    """Memory of the job on this node, GiB; null if unlimited or unknown."""
    network_bytes_per_s: Stats | None = None
    """Traffic of all interfaces but the loopback, of all users, bytes/s: the mean is of both directions together, the
    rest of the one with more traffic."""
    infiniband_bytes_per_s: Stats | None = None
    """Traffic of all InfiniBand and RoCE ports, bytes/s, as for `network_bytes_per_s`."""
    disk_bytes_per_s: Stats | None = None
    """Traffic of this node's disks, bytes/s, as for `network_bytes_per_s`, with reads and writes as directions."""
    samplers_max: int = 1
    """Most samplers that recorded the node at the same time; only the longest recording counts."""
    agent_lost_s: float = 0.0
    """Seconds without an agent on this node while the attempt continued."""
    clock_steps_s: list[float] = []
    """Steps of the wall clock, in seconds; negative if it was set back."""
    nvml_missing_s: float = 0.0
    """Seconds for which the agent was up without NVML."""


class AttemptSummary(msgspec.Struct, frozen=True):
    """One attempt of the run and the events on its timeline."""

    n: int
    """Number of the attempt, from 1."""
    job_id: str | None
    """Its job; null if it is not recorded."""
    window: TimeWindow
    """The time with telemetry of this attempt."""
    nodes: list[str]
    """Nodes with telemetry of this attempt."""
    start: float | None = None
    """When the attempt started; null if unknown."""
    end: float | None = None
    """When it ended; null until that is recorded."""
    ending: str | None = None
    """Why it ended, such as `completed` or `preempted`; null until that is recorded."""
    events: list[TimelineEvent] = []
    """Its events, oldest first."""
    reason: str | None = None
    """Why it ended so, in words; null until that is recorded."""


class TimelineEvent(msgspec.Struct, frozen=True):
    """One event on the timeline."""

    t: float
    """When it happened or, for an interval, began."""
    kind: str
    """Name of the event, or `xid` or `ecc` for an error of a GPU."""
    text: str
    """What happened, in a few words."""
    end: float | None = None
    """When the interval ended; null for a moment."""


class TrainingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Training progress and its energy cost. A repeated step costs energy but counts once."""

    steps: int
    """Optimizer steps that count."""
    tokens: float | None
    """Tokens of these steps, of all ranks; null for data without tokens."""
    step_s: Stats | None
    """Time per step, seconds, without the first steps of each attempt, in which it warms up; null if no step has a
    time."""
    tokens_per_s: float | None
    """Tokens of all ranks per second of the steps in `step_s`, so without checkpoints and evaluations; null for data
    without tokens."""
    tokens_per_s_per_gpu: float | None
    """The same per GPU; null on the CPU and for data without tokens."""
    mfu: float | None
    """Model FLOPs utilization relative to the data sheet's dense 16-bit rate, 0 to 1; null if the FLOPs of the model or
    the rate of a GPU are unknown."""
    energy_j: float | None
    """Energy of the selected GPUs in the selected time, J; null if none reports it."""
    joules_per_token: float | None
    """Energy per token, J; null if only some GPUs are selected, or if some do not report their energy."""
    data_wait_share: float | None
    """Share of rank 0's step time in which it waited for data, 0 to 1; null if it is not recorded."""
    loss: float | None
    """Loss of the newest step; null if it has none, or NaN or infinite."""
    samples: float | None = None
    """Samples of these steps; null for a script that splits its batch itself."""
    samples_per_s: float | None = None
    """Samples of all ranks per second of the steps in `step_s`; null as `samples` is."""


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours without training progress, while the agents were up.

    All hours of an idle GPU are wasted. Of the other GPUs, the share outside productive steps in the goodput ledger is
    wasted, except ``other_s``: a script without ``session.steps`` trains in it.
    """

    gpu_hours: float
    """GPU-hours that the job held."""
    wasted_gpu_hours: float
    """The part of them without progress."""
    by_cause: dict[str, float]
    """Wasted GPU-hours by cause, without zeros: `idle_gpus`, `startup`, `restore`, `repeated`, `checkpoint_stall`,
    `evaluation`, `shutdown` and `lost`."""


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """A finding for the user."""

    severity: str
    """`critical`, `warning` or `info`."""
    code: str
    """Kind of the finding, such as `straggler`; the reference of insights lists all."""
    text: str
    """The finding in words, with figures."""
    fix: str | None = None
    """What to do about it; null if there is no advice."""
    node: str | None = None
    """The node that it concerns; null if it concerns no single one."""
    uuid: str | None = None
    """UUID of the GPU that it concerns; null if it concerns no single one."""
    rank: int | None = None
    """The rank that it concerns; null if it concerns no single one."""
    gpu_hours: float | None = None
    """Estimated GPU-hours that it cost, for a slow GPU or rank those in which all others waited; null if unknown."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry report of a run, limited to the selected attempt and time."""

    run: str
    """Id of the run."""
    job_id: str | None
    """The newest job; null before the first one."""
    window: TimeWindow
    """The time with telemetry in the selection."""
    coverage: float | None
    """Received / expected samples while the agents were up; null if none were expected."""
    attempts: list[AttemptSummary]
    """The selected attempts, oldest first."""
    gpus: list[GpuSummary]
    """The selected GPUs, by node and index."""
    hosts: list[HostSummary]
    """The nodes, by name; with --gpu, those of the selected GPUs."""
    insights: list[Insight]
    """Findings, the most severe first; with --gpu, those about the selected GPUs, their ranks and their nodes."""
    state: str | None = None
    """State of the run, such as `running`; without an answer of the scheduler, the ending of the last attempt; null if
    neither is known."""
    user: str | None = None
    """Owner of the run folder; null for a user whom this machine does not know."""
    layout: str | None = None
    """The planned layout in words; null without a plan."""
    ranks: list[RankSummary] = []
    """The ranks with heartbeats, in order."""
    training: TrainingSummary | None = None
    """Progress and speed; null before the first recorded step."""
    goodput: Goodput | None = None
    """Where the time of the selection went; never null in a document."""
    waste: Waste | None = None
    """GPU-hours without progress; null without GPUs."""
    read_errors: list[str] = []
    """Files that this user cannot read or that are damaged, each with the reason."""
    enabled: bool = True
    """The recipe enables telemetry."""
    unrecorded_attempts: list[int] = []
    """The selected attempts that trained, but of which nothing was recorded."""
    watched: bool = False
    """The job was started without clustertrain, so that nothing of its training is known."""
    device: str | None = None
    """``cuda`` or ``cpu``, as planned; null without a plan."""
    contract: ContractStatus | None = None
    """The contract of the recipe and the run's progress against it; null if the run's record has none."""

    @property
    def failure_reason(self) -> str | None:
        """Why the run failed; None if it did not, or if nothing recorded it."""
        return self.attempts[-1].reason if self.state == state.FAILED and self.attempts else None
