"""The schema of the event logs: one struct per event. docs/reference/events.md is generated from it.

Writers pass the fields to :meth:`clustertrain.run.events.EventLog.write` by name, and
``tests/unit/run/test_event_types.py`` compares all calls with these structs. Readers get an event as a struct from
:func:`clustertrain.run.events.select`. A field without a value may be null or absent, and older versions lack some
fields, so nearly all have a default.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from clustertrain.run.results import RankEnding


def _event_name(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_event_name):
    """The fields of every event. The event's name is the class name in snake case, or the tag of the class."""

    writer: ClassVar[str] = ""

    t: float
    """Time of the write, at the end of what the event describes (UTC epoch s)."""
    monotonic_s: float | None = None
    """The same in the monotonic clock of the host (s)."""
    host: str | None = None
    pid: int | None = None


class Submitted(Event, frozen=True, kw_only=True):
    """The scheduler accepted a job."""

    writer = "submit (`events/submit.jsonl` of the run)"

    job_id: str | None = None
    backend: str | None = None


class Started(Event, frozen=True, kw_only=True):
    """The attempt started."""

    writer = "batch process"

    job_id: str | None = None
    restart: int | None = None
    """Number of earlier requeues of the job."""
    nodes: list[str] | None = None
    """Node names."""
    end_time: float | None = None
    """End of the allocation (UTC epoch s)."""


class AgentStarted(Event, frozen=True, kw_only=True):
    """The agent of a node started."""

    writer = "agent"

    node: str | None = None
    node_rank: int | None = None
    gpus: list[dict[str, Any]] | None = None
    """Identity of each GPU."""


class NodeSettings(Event, frozen=True, kw_only=True):
    """The environment that the agent set for its ranks."""

    writer = "agent, on a cluster"

    node: str | None = None
    settings: dict[str, dict[str, str]] | None = None
    """`{NAME: {"value", "reason"}}`, the variables added."""
    notes: list[str] | None = None
    """Problems of the node, and checks that could not be made."""


class EnvironmentCopied(Event, frozen=True, kw_only=True):
    """The ranks of a node run from a copy of their environment.

    See [Ship the environment](../guides/submit.md#ship-the-environment).
    """

    writer = "agent"

    node: str | None = None
    hash: str | None = None
    path: str | None = None
    """Folder of the copy on the node."""
    reused: bool | None = None
    """It was there already."""
    copy_s: float | None = None
    """Time until it could be used, with waits for another agent that unpacked it."""
    bytes: int | None = None


class EnvironmentNotCopied(Event, frozen=True, kw_only=True):
    """The ranks of a node run from the shared folder of their environment, although it was to be shipped."""

    writer = "agent"

    node: str | None = None
    reason: str | None = None


class RanksStarted(Event, frozen=True, kw_only=True):
    """torchrun was started."""

    writer = "agent"

    world_size: int | None = None
    rendezvous: str | None = None
    """Id of the rendezvous."""


class SessionStarted(Event, frozen=True, kw_only=True):
    """The ranks opened their session."""

    writer = "rank 0"

    t_begin: float | None = None
    world_size: int | None = None
    device: str | None = None
    strategy: str | None = None
    layout: str | None = None
    """Parallel layout as text."""
    threads: int | None = None
    """CPU threads per rank."""


class Optimizer(Event, frozen=True, kw_only=True):
    """The optimizer was built."""

    writer = "rank 0"

    optimizer: str | None = None
    """Name or class."""
    groups: list[dict[str, Any]] | None = None
    """`[{"group", "tensors", "parameters", "weight_decay", "lr_scale"}]` of rank 0."""
    frozen: int | None = None
    """Number of parameters that are never trained."""


class Restored(Event, frozen=True, kw_only=True):
    """The state was restored from a checkpoint."""

    writer = "rank 0"

    t_begin: float | None = None
    step: int | None = None
    path: str | None = None
    restore_s: float | None = None
    skipped: list[dict[str, Any]] | None = None
    """Newer checkpoints that did not verify."""
    from_local: int | None = None
    """Bytes read from node-local copies."""


class PretrainedLoaded(Event, frozen=True, kw_only=True):
    """The model's pretrained weights were loaded."""

    writer = "rank 0"

    t_begin: float | None = None
    path: str | None = None
    tensors: int | None = None
    """Number of tensors."""
    load_s: float | None = None


class DataDescribed(Event, frozen=True, kw_only=True):
    """The data set: [Prepare data](../guides/data.md)."""

    writer = "rank 0, built-in trainer"

    data: str | None = None
    """Name of the data set."""
    samples: int | None = None
    validation_samples: int | None = None
    version: str | None = None
    padding: float | None = None
    """Padding as a share of packed samples."""
    lengths: dict[str, Any] | None = None
    """Distribution of document lengths, in tokens."""
    answer_share: float | None = None
    """Share of the tokens of conversations that are answers, which alone are learned."""
    cut: int | None = None
    """Conversations whose end is missing, because they are longer than a sample."""
    left_out: int | None = None
    """Conversations of which no answer would be left."""
    attention: str | None = None
    """Kernel that keeps attention inside documents, with the reason; null: tokens attend to the whole sample."""


class StreamDescribed(Event, frozen=True, kw_only=True):
    """The data is a stream, and positions are not exact: [Stream data](../guides/data.md#stream-your-data)."""

    writer = "rank 0, built-in trainer"

    data: str | None = None
    """Key and value of the entry."""
    version: str | None = None
    sharded: bool | None = None
    """Whether each data-parallel rank reads its own part."""
    own_state: bool | None = None
    """Whether the stream saves its own state; otherwise a resume reads it again."""
    text: str | None = None
    """What is exact."""
    validation_samples: int | None = None


class ReferenceComputed(Event, frozen=True, kw_only=True):
    """The start weights' log-probabilities of all answers are known: [DPO](../guides/objectives.md#preferences)."""

    writer = "rank 0, built-in trainer"

    answers: int | None = None
    """Number of answers, two per pair."""
    reference_s: float | None = None
    """Duration of the pass over the data."""


class FirstStep(Event, frozen=True, kw_only=True):
    """The first step of the attempt is done."""

    writer = "rank 0"

    t_begin: float | None = None
    """Start of that step."""
    step: int | None = None
    """Steps completed after it."""
    total: int | None = None
    """Last step of the loop."""


class Signal(Event, frozen=True, kw_only=True):
    """A stop was requested."""

    writer = "agent, batch process"

    node: str | None = None
    source: str | None = None
    """`signal:SIGTERM`, `batch`, `deadline`, …"""
    signal: str | None = None
    """The source in logs of older versions."""


class RolledBack(Event, frozen=True, kw_only=True):
    """Training returned to an earlier step; after a stop the next attempt restores it.

    See [Handle loss spikes and NaN](../guides/stability.md).
    """

    writer = "rank 0"

    t_begin: float | None = None
    step: int | None = None
    """The last bad step."""
    to_step: int | None = None
    reason: str | None = None
    samples: int | None = None
    """Number of samples excluded."""
    restore_s: float | None = None


class TrainingWarningEvent(Event, frozen=True, kw_only=True, tag="training_warning"):
    """A problem of the training: [Handle loss spikes and NaN](../guides/stability.md)."""

    writer = "rank 0"

    code: str | None = None
    step: int | None = None
    text: str | None = None
    fix: str | None = None
    value: float | str | None = None
    """Measured value; NaN and Inf as strings."""
    limit: float | None = None
    suppressed: int | None = None
    """Repetitions suppressed since the last warning with this code."""


class SaveAbandoned(Event, frozen=True, kw_only=True):
    """The process had to end before a save was committed."""

    writer = "rank 0"

    step: int | None = None
    reason: str | None = None


class StopAgreed(Event, frozen=True, kw_only=True):
    """All ranks agreed to stop."""

    writer = "rank 0"

    step: int | None = None
    save: bool | None = None
    """False if a save would not end before the kill, or the run rolls back."""


class Checkpoint(Event, frozen=True, kw_only=True):
    """A checkpoint was committed. If the process is killed before this event, readers go by the folder itself or by
    the step that the next attempt restored."""

    writer = "rank 0"

    t_begin: float | None = None
    """Start of the stall."""
    step: int
    """Readers drop the event without it."""
    stall_s: float | None = None
    """Time that training was blocked."""
    save_s: float | None = None
    """Time from the call to the commit."""
    bytes: int | None = None
    """Size of its files."""
    written: int | None = None
    """Bytes that were written; the others are in files that an earlier checkpoint has too."""
    reason: str | None = None
    """`interval`, `best`, `stop`, `end`."""
    path: str | None = None
    """Where another framework wrote it; None in the run's own folder."""
    source: str | None = None
    """Which training of a command wrote it."""


class ProgramCheckpoint(Event, frozen=True, kw_only=True):
    """The files that match `job.checkpoints` were looked through: at the start of the attempt, and when a newer
    complete checkpoint was there."""

    writer = "batch process (`checkpoints.jsonl`)"

    path: str | None = None
    """The latest complete checkpoint of this run; None if there is none yet."""
    modified: float | None = None
    """When it was changed last; in the first attempt, the newest change of what matched before (UTC epoch s)."""
    is_new: bool | None = None
    """The attempt has saved it, so it has made progress."""


class CheckpointOverwriting(Event, frozen=True, kw_only=True):
    """A save into the folder of an earlier checkpoint began: until the next `checkpoint`, neither is whole."""

    writer = "rank 0 of a command"

    step: int | None = None
    path: str | None = None


class CheckpointIntervalEvent(Event, frozen=True, kw_only=True, tag="checkpoint_interval"):
    """The interval of `every = "10min"` or `"auto"` was chosen or changed."""

    writer = "rank 0"

    seconds: float | None = None
    reason: str | None = None


class Copied(Event, frozen=True, kw_only=True):
    """A checkpoint was copied to its remote storage."""

    writer = "rank 0"

    step: int | None = None
    copy_s: float | None = None
    bytes: int | None = None


class CopyFailed(Event, frozen=True, kw_only=True):
    """A checkpoint was not copied to its remote storage."""

    writer = "rank 0"

    step: int | None = None
    reason: str | None = None


class Compiled(Event, frozen=True, kw_only=True):
    """torch.compile succeeded."""

    writer = "rank 0"

    eager_s: float | None = None
    """Forward and backward of one step, not compiled."""
    compiled_s: float | None = None
    """The same, compiled."""
    compile_s: float | None = None
    loss_difference: float | None = None
    """Largest relative difference of a rank's loss on the same batch; unknown with torch's dropout."""
    grad_norm_difference: float | None = None
    """The same of the norm of the gradients."""


class CompileFailed(Event, frozen=True, kw_only=True):
    """torch.compile failed, and the layers run uncompiled."""

    writer = "rank 0"

    reason: str | None = None
    fix: str | None = None


class Profiled(Event, frozen=True, kw_only=True):
    """A profile was written."""

    writer = "rank 0"

    steps: list[int] | None = None
    """First and last."""
    path: str | None = None
    """Path of the files without their suffixes."""


class PredictionsSaved(Event, frozen=True, kw_only=True):
    """An evaluation wrote predictions (`evaluation.save_predictions`)."""

    writer = "rank 0"

    step: int | None = None
    path: str | None = None


class Evaluation(Event, frozen=True, kw_only=True):
    """An evaluation ended."""

    writer = "rank 0"

    t_begin: float | None = None
    step: int | None = None
    eval_s: float | None = None


class Evaluated(Event, frozen=True, kw_only=True):
    """The deciding metric after an evaluation."""

    writer = "rank 0"

    step: int | None = None
    metric: str | None = None
    higher_is_better: bool | None = None
    value: float | None = None
    best: float | None = None
    best_step: int | None = None
    slices: dict[str, dict[str, float | None]] | None = None
    """`{NAME: {"value", "best"}}`, the slices in the contract."""


class EarlyStop(Event, frozen=True, kw_only=True):
    """The evaluations ended the run early."""

    writer = "rank 0"

    step: int | None = None
    reason: str | None = None


class SessionEnded(Event, frozen=True, kw_only=True):
    """The session closed."""

    writer = "rank 0"

    t_begin: float | None = None
    """Start of closing."""
    step: int | None = None
    ending: RankEnding | None = None
    """`completed`, `stopped`, `failed`."""
    skipped_steps: int | None = None


class RanksEnded(Event, frozen=True, kw_only=True):
    """All ranks of a node ended."""

    writer = "agent"

    node: str | None = None
    ending: RankEnding | None = None
    """`completed`, `stopped`, `failed`."""
    exit_code: int | None = None


class GpuLost(Event, frozen=True, kw_only=True):
    """A GPU cannot be reached."""

    writer = "agent (sampler)"

    node: str | None = None
    uuid: str | None = None
    index: int | None = None
    reason: str | None = None
    """NVML's error name and message."""


class GpuBack(Event, frozen=True, kw_only=True):
    """A lost GPU can be reached again."""

    writer = "agent (sampler)"

    node: str | None = None
    uuid: str | None = None
    index: int | None = None


class GpuEvent(Event, frozen=True, kw_only=True):
    """An error that the driver reported."""

    writer = "agent (sampler)"

    node: str | None = None
    uuid: str | None = None
    index: int | None = None
    kind: str | None = None
    """`xid`, `ecc_corrected`, `ecc_uncorrected`."""
    xid: int | None = None
    count: int | None = None
    """Number of errors in this event."""


class TelemetryNotCompacted(Event, frozen=True, kw_only=True):
    """The samples of this attempt were not compacted."""

    writer = "agent"

    reason: str | None = None


class TelemetryFailed(Event, frozen=True, kw_only=True):
    """The samples cannot be written, or a part of the telemetry has ended."""

    writer = "agent (sampler, alerts)"

    node: str | None = None
    reason: str | None = None


class TrackingFailed(Event, frozen=True, kw_only=True):
    """A tracker did not accept rows, which wait for the next try."""

    writer = "agent, tracking process"

    tracker: str | None = None
    """Null: the tracking process itself."""
    reason: str | None = None


class ExporterStarted(Event, frozen=True, kw_only=True):
    """The metrics exporter started."""

    writer = "agent (exporter)"

    address: str | None = None
    port: int | None = None
    textfile: str | None = None
    """Path of the file, instead of address and port."""


class ExporterFailed(Event, frozen=True, kw_only=True):
    """The metrics exporter failed; the run continues without it."""

    writer = "agent (exporter)"

    reason: str | None = None
    fix: str | None = None


class RequeueAnswered(Event, frozen=True, kw_only=True):
    """The answer to a request of `clustertrain requeue`."""

    writer = "batch process"

    accepted: bool | None = None
    reason: str | None = None
    """Why it was not accepted."""


class TakenOver(Event, frozen=True, kw_only=True):
    """A newer attempt runs; this one ends its ranks and decides nothing."""

    writer = "batch process"

    newer_attempt: int | None = None
    """Its number."""


class AlertEvent(Event, frozen=True, kw_only=True, tag="alert"):
    """An alert was raised or cleared: [Watch a run](../guides/monitor.md)."""

    writer = "agent"

    code: str | None = None
    severity: str | None = None
    state: str | None = None
    """`raised`, `cleared`."""
    text: str | None = None
    node: str | None = None
    fix: str | None = None
    uuid: str | None = None
    rank: int | None = None
    value: float | None = None
    limit: float | None = None
    lasted_s: float | None = None
    """Only for a cleared alert."""
    suppressed: int | None = None
    """Alerts of this rule suppressed since the last one."""


class AlertNotDelivered(Event, frozen=True, kw_only=True):
    """An alert was not delivered."""

    writer = "agent"

    channel: str | None = None
    """`command`, `webhook`, `queue`, `thread`."""
    to: str | None = None
    reason: str | None = None


class Continued(Event, frozen=True, kw_only=True):
    """The owner continued an ended run; written before and after the submission."""

    writer = "`requeue` (`events/` of the run)"

    user: str | None = None
    job_id: str | None = None
    """Only after the submission."""
    options: dict[str, str] | None = None
    """Options of the submission; only after it."""


class Cancelled(Event, frozen=True, kw_only=True):
    """The owner cancelled the run."""

    writer = "`cancel` (`events/` of the run)"

    user: str | None = None


class Ended(Event, frozen=True, kw_only=True):
    """The attempt ended."""

    writer = "batch process; if it was killed, the first node's agent or the next attempt's batch process"

    ending: str | None = None
    """One of :data:`clustertrain.run.endings.Ending`."""
    reason: str | None = None
    last_step: int | None = None
    job_id: str | None = None
    ended_at: float | None = None
    """End of the attempt, if the scheduler knows it (UTC epoch s)."""
    step_exit_code: int | None = None
    """Exit code of the step launcher."""
    ended_by_script: bool | None = None
    """The attempt stopped because its script itself exited with 0."""
    ended_by_signal: bool | None = None
    """The stop signal ended a command that does not handle it."""
    lost_nodes: list[str] | None = None


class Requeued(Event, frozen=True, kw_only=True):
    """The run continues."""

    writer = "batch process, or as for `ended`"

    method: str | None = None
    """`requeue`, `resubmit`, `slurm`."""
    job_id: str | None = None
    exclude: list[str] | None = None
    """Nodes that a resubmission leaves out."""
    options: dict[str, str] | None = None
    """sbatch options of a resubmission."""


class Stopped(Event, frozen=True, kw_only=True):
    """The run will not be continued."""

    writer = "batch process"

    reason: str | None = None


EVENTS: dict[str, type[Event]] = {str(cls.__struct_config__.tag): cls for cls in Event.__subclasses__()}
"""Every event by its name."""

_JSON_TYPES: dict[str, type] = {
    "int": float,
    "float": float,
    "str": str,
    "RankEnding": str,
    "bool": bool,
    "list": list,
    "dict": dict,
}


def collect_field_types() -> dict[str, type]:
    """Return the JSON type of each field name that has the same in all events; ``float`` stands for all numbers.

    Reads the annotations as text: msgspec.inspect takes 20 ms for all events.
    """
    types: dict[str, set[type]] = {}
    event_classes: tuple[type[Event], ...] = (Event, *EVENTS.values())
    for event_type in event_classes:
        for name, annotation in event_type.__annotations__.items():
            if name in event_type.__struct_fields__:
                members = re.sub(r"\[.*\]", "", annotation).split(" | ")  # list[str] | None: list, None
                types.setdefault(name, set()).update(_JSON_TYPES[m] for m in members if m != "None")
    return {name: next(iter(json_types)) for name, json_types in types.items() if len(json_types) == 1}
