"""The view that ``clustertrain top`` shows of a run, and the shape of its JSON."""

from __future__ import annotations

import msgspec


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU and its rank, in the newest sample of the node; unknown values are null."""

    node: str
    """Node on which it is."""
    gpu: int | None = None
    """Number of the GPU on its node, as NVML counts; null for a rank without a GPU."""
    uuid: str | None = None
    """NVIDIA's id of the device; null for a rank without a GPU."""
    name: str | None = None
    """Model name of the GPU."""
    rank: int | None = None
    """Global rank; null for a GPU without a rank."""
    utilization: float | None = None
    """Share of time in which a kernel ran, 0 to 1."""
    sm_activity: float | None = None
    """Share of time and multiprocessors with a warp resident, 0 to 1; Hopper or later."""
    tensor_activity: float | None = None
    """Share of time in which the tensor cores were active, 0 to 1; Hopper or later."""
    memory_used_gib: float | None = None
    """Device memory in use by all processes, GiB."""
    memory_total_gib: float | None = None
    """Device memory, GiB."""
    power_w: float | None = None
    """Power drawn by the board, W."""
    temperature_c: float | None = None
    """Temperature of the chip, °C."""
    sm_clock_mhz: float | None = None
    """Clock of the multiprocessors, MHz."""
    throttled: list[str] = []
    """Causes that hold the clock down now: `power`, `thermal`, `hardware`."""
    reason: str | None = None
    """Why the GPU's metrics are unknown; null if they are known."""
    phase: str | None = None
    """What the rank does: `idle`, `startup`, `restore`, `train`, `checkpoint`, `evaluation` or `shutdown`."""
    step: int | None = None
    """Optimizer steps that the rank has completed."""
    behind: int | None = None
    """Steps behind the most advanced rank, at the time of the newest sample of all nodes."""
    step_s: float | None = None
    """Seconds per step since the node's previous sample."""
    data_wait_share: float | None = None
    """Share of the time since the node's previous sample for which the rank waited for data, 0 to 1."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest sample of one node; unknown values are null."""

    node: str
    """Name of the node."""
    age_s: float | None = None
    """Age of the newest sample, seconds."""
    cpu: float | None = None
    """Busy share of all processors, of all users, 0 to 1."""
    memory_used_gib: float | None = None
    """Memory in use by all users, without the page cache, GiB."""
    memory_total_gib: float | None = None
    """Memory of the node, GiB."""
    ended: bool = False
    """The sampler of the node has ended."""
    problem: str | None = None
    """Why there are no samples, no GPU metrics, or no new samples; null without a problem."""


class EventView(msgspec.Struct, frozen=True):
    """One event of the newest attempt."""

    t: float
    """When it happened."""
    event: str
    """Name of the event; the reference of events lists all."""
    text: str
    """The event in words."""
    severity: str | None = None
    """Of an alert: `critical`, `warning` or `info`; null for other events."""


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a run; unknown values are null."""

    t: float
    """When the state was read."""
    run: str
    """Id of the run."""
    job_id: str | None = None
    """The newest job: Slurm's id, or one that starts with `local-`."""
    backend: str | None = None
    """`slurm` or `local`."""
    state: str | None = None
    """`pending`, `running`, `requeued`, `completed`, `failed` or `cancelled`."""
    cancelling: bool = False
    """The run is cancelled, and its job has not ended yet."""
    attempt: int | None = None
    """Number of the newest attempt, from 1."""
    step: int | None = None
    """Completed optimizer steps."""
    total_steps: int | None = None
    """Optimizer steps to complete; null for a script that has not said it."""
    step_s: float | None = None
    """Recent time per step, seconds."""
    tokens_per_s: float | None = None
    """Recent tokens per second of all ranks."""
    loss: float | None = None
    """Newest loss."""
    since_step_s: float | None = None
    """Seconds since the last logged step; null unless the run runs."""
    eta_s: float | None = None
    """Time for the remaining steps at the recent rate, including ``overhead``, seconds; null unless the run runs."""
    overhead: float | None = None
    """Time of checkpoints and evaluations relative to training time; null before the first of them, and in the first
    minute."""
    allocation_end: float | None = None
    """When the allocation of a running job ends."""
    goodput: float | None = None
    """Productive time over wall time of the run, 0 to 1."""
    wall_s: float | None = None
    """Time from submission to now or to the end of the run, seconds."""
    pending_reason: str | None = None
    """Why the job waits, in the scheduler's words; null unless it waits."""
    start_estimate: float | None = None
    """When the scheduler expects to start the job; null unless it waits."""
    scheduler_error: str | None = None
    """Why the scheduler did not answer; null if it did."""
    ending: str | None = None
    """Why the last attempt ended, such as `preempted`; null until that is recorded."""
    telemetry: bool = True
    """The recipe enables telemetry."""
    nodes: list[NodeView] = []
    """The nodes of the newest attempt."""
    rows: list[GpuRow] = []
    """Its GPUs and ranks."""
    events: list[EventView] = []
    """Its newest events, oldest first."""
