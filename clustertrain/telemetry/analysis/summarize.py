"""Telemetry summary of a run: totals of all nodes and attempts, pooled by GPU and by node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from clustertrain import clock, reading, schema
from clustertrain.config.telemetry import TelemetrySpec
from clustertrain.errors import ClusterTrainError, NotFound, UsageError
from clustertrain.plan.layout import Layout
from clustertrain.run import attempts, events, json_files, state
from clustertrain.run.attempts import Attempt
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.run.usage import contract_status
from clustertrain.run.usage.contract_status import ContractStatus
from clustertrain.run.usage.goodput import Goodput, TimeRange, compute_goodput
from clustertrain.telemetry import insights, timeline_events
from clustertrain.telemetry.analysis import aggregate
from clustertrain.telemetry.analysis.aggregate import GpuRecord
from clustertrain.telemetry.analysis.efficiency import Energy, summarize_training
from clustertrain.telemetry.analysis.node_records import (
    NodeRecord,
    limit_to_last,
    list_unreadable,
    load_node_records,
    time_window,
)
from clustertrain.telemetry.analysis.timeline import build_timelines
from clustertrain.telemetry.report_schema import (
    AttemptSummary,
    GpuSummary,
    HostSummary,
    Insight,
    Summary,
    Waste,
    XidRecord,
)
from clustertrain.telemetry.store.writer import GpuFacts

CLOCK_STEP_S = 1.0  # smaller steps are normal corrections by the time service


class SummaryRequest(NamedTuple):
    """Selection of the part of a run to summarize.

    ``state``, ``goodput`` and ``contract`` come from the scheduler if known; by default the run's files decide.
    """

    attempt: int | None = None  # default: all attempts
    gpu: str | None = None  # a UUID or its prefix, an index, or ``node:index``
    since_s: float | None = None  # only the last seconds of the recording
    state: str | None = None
    goodput: Goodput | None = None
    contract: ContractStatus | None = None


def select_attempts(run: RunDir, attempt: int | None) -> list[AttemptDir]:
    """Return the given attempt, or all by default.

    Raises:
        NotFound: there is no such attempt.
    """
    selected = [a for a in run.attempts() if attempt in (None, a.n)]
    if attempt is not None and not selected:
        existing = ", ".join(str(a.n) for a in run.attempts()) or "none"
        raise NotFound(f"run {run.id} has no attempt {attempt}", fix=f"attempts so far: {existing}")
    return selected


def select_records(
    run: RunDir, request: SummaryRequest
) -> tuple[list[NodeRecord], Callable[[str, GpuFacts], bool] | None]:
    """Return the records of a request and a filter for its GPUs (None: all GPUs).

    Raises:
        NotFound, UsageError: see :func:`summarize`.
    """
    selection = _select(run, request, _load_settings(run)[0])
    if request.gpu is None:
        return selection.records, None
    return selection.records, lambda node, facts: (node, facts.uuid) in selection.gpu_records


class _Selection(NamedTuple):
    """Part of a run that a request selects."""

    attempts: list[AttemptDir]
    logs: dict[int, list[events.Event]]  # by attempt
    records: list[NodeRecord]
    gpu_records: dict[tuple[str, str], list[GpuRecord]]  # by node and UUID
    cutoff: float | None  # start of the selected time, UTC s


def _select(run: RunDir, request: SummaryRequest, settings: TelemetrySpec) -> _Selection:
    selected = select_attempts(run, request.attempt)
    logs = {a.n: events.for_attempt(a) for a in selected}
    records = [p for a in selected for p in load_node_records(a, logs[a.n], settings.flush_s)]
    if not settings.enabled:
        records = [p for p in records if p.segment is not None]  # nodes without a file were not expected to record
    cutoff = None
    if request.since_s is not None:
        records, cutoff = limit_to_last(records, request.since_s)
        logs = {n: [e for e in log if not _is_before(e, cutoff)] for n, log in logs.items()}
    gpu_records = _gpu_records(records)
    gpu_filter = request.gpu
    matching = {
        key: found for key, found in gpu_records.items() if gpu_filter is None or _matches(gpu_filter, key, found)
    }
    if gpu_filter is not None and not matching:
        raise UsageError(
            f"--gpu {gpu_filter}: no allocated GPU of {run.id} matches", fix=_format_known_gpus(gpu_records)
        )
    return _Selection(selected, logs, records, matching, cutoff)


WHOLE_RUN = SummaryRequest()


def summarize(run: RunDir, request: SummaryRequest = WHOLE_RUN) -> Summary:
    """Summarize a run, over all attempts or one of them.

    Raises:
        NotFound: there is no such attempt.
        UsageError: no GPU matches.
    """
    settings, spec_error = _load_settings(run)
    selected, logs, records, gpu_records, cutoff = _select(run, request, settings)
    window = time_window(records)
    xids = _collect_xids(logs)
    gpu_timelines = build_timelines(records, window)
    owner = aggregate.find_owners(gpu_records)
    owned = {key: aggregate.select_owned(key, found, owner) for key, found in gpu_records.items()}
    gpus = [
        aggregate.summarize_gpu(key, found, owned[key], gpu_timelines.get(key), xids.get(key[1], []))
        for key, found in gpu_records.items()
    ]
    clock_steps = _clock_steps(logs)
    by_node = _group_by(records, lambda p: p.node)
    hosts = [aggregate.summarize_host(node, found, clock_steps.get(node, [])) for node, found in by_node.items()]
    if request.gpu is not None:
        hosts = [h for h in hosts if h.node in {g.node for g in gpus}]
    history = attempts.load_attempts(run)
    plan = _load_plan_info(run)
    goodput = _goodput(run, history, request, cutoff)
    energy = _total_energy(gpus, owned, records, request.gpu)
    unrecorded = _find_unrecorded(records, logs, history, cutoff)
    if unrecorded:
        energy = energy._replace(is_complete=False)
    summary = Summary(
        run=run.id,
        job_id=next(iter(reversed(attempts.list_job_ids(run, history))), None),
        window=window,
        coverage=_coverage(gpus, hosts),
        attempts=[_summarize_attempt(run, a, [p for p in records if p.attempt == a.n], logs[a.n]) for a in selected],
        gpus=sorted(gpus, key=lambda g: (g.node, g.index is None, g.index or 0, g.uuid)),
        hosts=sorted(hosts, key=lambda h: h.node),
        insights=[],
        state=request.state or (history[-1].ending if history and history[-1].ending else None),
        user=_owner(run),
        layout=plan.layout,
        device=plan.device,
        enabled=settings.enabled,
        watched=run.watched.exists(),
        ranks=aggregate.summarize_ranks(records),
        training=summarize_training(run, [a for a in history if a.n in logs], energy, gpus, cutoff),
        goodput=goodput,
        contract=request.contract or contract_status.load_contract_status(run, history, None),
        waste=_waste(gpus, owned, goodput),
        unrecorded_attempts=unrecorded,
        read_errors=[
            *([spec_error] if spec_error else []),
            *attempts.list_read_errors(run, history),
            *(w for a in selected for w in list_unreadable(a)),
            *(p.read_error for p in records if p.read_error),
        ],
    )
    if request.gpu is None:
        found = insights.build_insights(summary, [e for log in logs.values() for e in log])
    else:  # a GPU is judged beside all others
        whole = summarize(run, request._replace(gpu=None))
        found = [insight for insight in whole.insights if _is_about(insight, summary)]
    return msgspec.structs.replace(summary, insights=found)


def _is_about(insight: Insight, summary: Summary) -> bool:
    """Return whether an insight is about one of the summary's GPUs, their ranks, or their nodes as a whole."""
    if insight.uuid is not None:
        return any((g.node, g.uuid) == (insight.node, insight.uuid) for g in summary.gpus)
    if insight.rank is not None:
        return any(insight.rank in g.ranks for g in summary.gpus)
    return any(h.node == insight.node for h in summary.hosts)


def _find_unrecorded(
    records: Sequence[NodeRecord],
    logs: Mapping[int, list[events.Event]],
    history: Sequence[Attempt],
    cutoff: float | None,
) -> list[int]:
    """Return the attempts that trained after the cutoff, but of which there is no record."""
    recorded = {p.attempt for p in records}
    ends = {a.n: a.end for a in history}
    return [
        n
        for n, log in logs.items()
        if n not in recorded
        and events.find_last(log, "first_step")
        and (cutoff is None or (end := ends.get(n)) is None or end > cutoff)
    ]


def _goodput(run: RunDir, history: Sequence[Attempt], request: SummaryRequest, cutoff: float | None) -> Goodput:
    """Return the goodput of the selected part of the run."""
    if request.goodput is not None and request.attempt is None and cutoff is None:
        return request.goodput
    finished = state.is_settled(history) if request.state is None else request.state in state.FINAL
    waiting = request.state in (state.PENDING, state.REQUEUED)
    stretch = TimeRange(request.attempt, -math.inf if cutoff is None else cutoff)
    return compute_goodput(run, history, clock.now(), finished, is_queued=waiting, time_range=stretch)


def _owner(run: RunDir) -> str | None:
    try:
        return run.path.owner()
    except (OSError, KeyError):  # a user unknown to this machine
        return None


class _PlanInfo(NamedTuple):
    layout: str | None = None
    device: str | None = None


def _load_plan_info(run: RunDir) -> _PlanInfo:
    try:
        plan = json_files.poll_document(run.plan)
        device = plan.get("device")
        return _PlanInfo(
            schema.convert(plan.get("layout"), Layout).describe(), device if isinstance(device, str) else None
        )
    except msgspec.ValidationError:  # missing, or of another version
        return _PlanInfo()


def _load_settings(run: RunDir) -> tuple[TelemetrySpec, str | None]:
    """Load the telemetry settings; if spec.toml cannot be read, return the defaults and the reason."""
    try:
        return load_spec(run).recipe.telemetry, None
    except ClusterTrainError as e:
        return TelemetrySpec(), e.message


def _clock_steps(logs: Mapping[int, list[events.Event]]) -> dict[str, list[float]]:
    """Return the steps of each node's wall clock relative to its monotonic clock, in seconds."""
    steps: dict[str, list[float]] = {}
    for log in logs.values():
        # Offsets are compared within an attempt: a reboot resets the monotonic clock, and containers reuse pids.
        offsets: dict[tuple[str, int], float] = {}
        for e in sorted(log, key=lambda e: float(e.get("monotonic_s") or 0.0)):
            if e.get("monotonic_s") is None or e.get("host") is None:
                continue
            process = str(e["host"]), int(e.get("pid", 0))
            offset = float(e["t"]) - float(e["monotonic_s"])
            if process in offsets and abs(offset - offsets[process]) >= CLOCK_STEP_S:
                steps.setdefault(process[0], []).append(round(offset - offsets[process], 3))
            offsets[process] = offset
    return steps


def _summarize_attempt(
    run: RunDir, attempt: AttemptDir, records: list[NodeRecord], log: list[events.Event]
) -> AttemptSummary:
    stored = attempts.load_attempt(run, attempt)
    return AttemptSummary(
        attempt.n,
        stored.job_id or None,
        time_window(records),
        sorted({p.node for p in records}),
        stored.start,
        stored.end,
        stored.ending,
        timeline_events.timeline_from_events(log),
        stored.reason,
    )


def _group_by(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _gpu_records(records: list[NodeRecord]) -> dict[tuple[str, str], list[GpuRecord]]:
    gpu_records = [GpuRecord(p, facts, f"gpu{i}") for p in records for i, facts in enumerate(p.gpus)]
    return _group_by(gpu_records, lambda p: (p.node_record.node, p.facts.uuid))


def _matches(gpu_filter: str, key: tuple[str, str], records: list[GpuRecord]) -> bool:
    node, uuid = key
    wanted_node, colon, index = gpu_filter.rpartition(":")
    if reading.is_unsigned_int(index) and (not colon or wanted_node == node):
        return records[-1].facts.index == int(index)
    return not reading.is_unsigned_int(gpu_filter) and uuid.lower().startswith(gpu_filter.lower())


def _format_known_gpus(gpu_records: dict[tuple[str, str], list[GpuRecord]]) -> str:
    names = [f"{node}:{found[-1].facts.index} ({uuid})" for (node, uuid), found in gpu_records.items()]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ("give one of " + ", ".join(names[:8]) + more) if names else "omit --gpu: the run recorded no GPU"


def _collect_xids(logs: Mapping[int, list[events.Event]]) -> dict[str, list[XidRecord]]:
    """Return the XIDs by the GPU's UUID."""
    xids: dict[str, list[XidRecord]] = {}
    for log in logs.values():
        for e in events.filter_by_name(log, "gpu_event"):
            if e.get("xid") is not None and e.get("uuid"):
                xids.setdefault(str(e["uuid"]), []).append(
                    XidRecord(float(e["t"]), int(e["xid"]), max(1, int(e.get("count") or 1)))
                )
    return xids


def _is_before(event: events.Event, cutoff: float) -> bool:
    """Return whether the event is about a GPU and before the selected time."""
    return event["event"] in ("gpu_event", "gpu_lost", "gpu_back") and float(event["t"]) < cutoff


def _coverage(gpus: Sequence[GpuSummary], hosts: Sequence[HostSummary]) -> float | None:
    """Return the coverage over GPUs, so that a lost GPU lowers it, and over hosts without GPUs."""
    with_gpu = {g.node for g in gpus}
    samples = [(g.samples, g.samples_expected) for g in gpus]
    samples += [(h.samples, h.samples_expected) for h in hosts if h.node not in with_gpu]
    expected = sum(e for _, e in samples)
    return None if not expected else round(sum(min(n, e) for n, e in samples) / expected, 4)


def _total_energy(
    gpus: Sequence[GpuSummary],
    owned: Mapping[tuple[str, str], list[GpuRecord]],
    records: Sequence[NodeRecord],
    gpu_filter: str | None,
) -> Energy:
    energies = [g.energy_j for g in gpus if g.energy_j is not None]
    has_unseen_gpus = any(p.nvml_error is not None and not p.gpus for p in records)
    is_complete = (
        gpu_filter is None
        and not has_unseen_gpus
        and aggregate.has_energy_data(p for found in owned.values() for p in found)
    )
    return Energy(sum(energies) if energies else None, is_complete)


def _waste(
    gpus: Sequence[GpuSummary], owned: Mapping[tuple[str, str], list[GpuRecord]], goodput: Goodput
) -> Waste | None:
    """Return the wasted GPU-hours, without the time in the queue, in which the job holds no GPU."""
    if not gpus:
        return None
    held_hours = {key: sum(p.node_record.held_s for p in pieces) / 3600 for key, pieces in owned.items()}
    idle_hours = sum(held_hours[g.node, g.uuid] for g in gpus if g.utilization is not None and g.utilization.max == 0)
    busy_hours = sum(held_hours.values()) - idle_hours
    running_s = goodput.wall_s - goodput.queue_s
    causes = {"idle_gpus": idle_hours}
    for name in ("startup_s", "restore_s", "repeated_s", "checkpoint_stall_s", "evaluation_s", "shutdown_s", "lost_s"):
        share = getattr(goodput, name) / running_s if running_s > 0 else 0.0
        causes[name.removesuffix("_s")] = busy_hours * min(1.0, share)
    causes = {name: round(hours, 4) for name, hours in causes.items() if hours > 0}
    return Waste(
        gpu_hours=round(sum(held_hours.values()), 4), wasted_gpu_hours=round(sum(causes.values()), 4), by_cause=causes
    )
