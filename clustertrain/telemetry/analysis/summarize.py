"""What a run's telemetry adds up to: totals of all nodes and attempts, pooled by GPU and by node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from clustertrain import clock, reading, schema
from clustertrain.config.telemetry import TelemetrySpec
from clustertrain.errors import ClusterTrainError, NotFound, UsageError
from clustertrain.plan.layout import Layout
from clustertrain.run import attempts, contract_status, events, json_files, state
from clustertrain.run.attempts import Attempt
from clustertrain.run.contract_status import Standing
from clustertrain.run.goodput import Goodput, Stretch, ledger
from clustertrain.run.run_dir import AttemptDir, RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.telemetry import insights, timeline_events
from clustertrain.telemetry.analysis import aggregate
from clustertrain.telemetry.analysis.aggregate import Piece
from clustertrain.telemetry.analysis.efficiency import Energy, training_of
from clustertrain.telemetry.analysis.node_records import Part, of_attempt, since, unreadable, window_of
from clustertrain.telemetry.analysis.timeline import timelines
from clustertrain.telemetry.report_schema import (
    AttemptSummary,
    GpuSummary,
    HostSummary,
    Summary,
    Waste,
    Xid,
)
from clustertrain.telemetry.store.writer import GpuFacts

CLOCK_STEP_S = 1.0  # what is less is the time service at work


class Request(NamedTuple):
    """What of a run is wanted.

    ``attempt``: None for all. ``gpu``: only GPUs that fit, a UUID or its beginning, an index, or ``node:index``.
    ``since_s``: only the last so many seconds of what was recorded. ``state``, ``goodput`` and ``contract``: what is
    known of the run with the scheduler's help; None: its own files decide.
    """

    attempt: int | None = None
    gpu: str | None = None
    since_s: float | None = None
    state: str | None = None
    goodput: Goodput | None = None
    contract: Standing | None = None


def chosen_attempts(run: RunDir, attempt: int | None) -> list[AttemptDir]:
    """Raises NotFound where there is no such attempt."""
    chosen = [a for a in run.attempts() if attempt in (None, a.n)]
    if attempt is not None and not chosen:
        known = ", ".join(str(a.n) for a in run.attempts()) or "none"
        raise NotFound(f"run {run.id} has no attempt {attempt}", fix=f"attempts so far: {known}")
    return chosen


def chosen_parts(run: RunDir, request: Request) -> tuple[list[Part], Callable[[str, GpuFacts], bool] | None]:
    """What fits a request, and which of its GPUs do (None: all).

    Raises:
        NotFound, UsageError: as :func:`summarize`.
    """
    found = _choose(run, request, _settings(run)[0])
    if request.gpu is None:
        return found.parts, None
    return found.parts, lambda node, facts: (node, facts.uuid) in found.pieces


class _Chosen(NamedTuple):
    """What fits a request: ``logs`` by attempt, ``pieces`` by GPU; ``cut``: from when on, UTC s, None for all."""

    attempts: list[AttemptDir]
    logs: dict[int, list[events.Event]]
    parts: list[Part]
    pieces: dict[tuple[str, str], list[Piece]]
    cut: float | None


def _choose(run: RunDir, request: Request, settings: TelemetrySpec) -> _Chosen:
    chosen = chosen_attempts(run, request.attempt)
    logs = {a.n: events.of_attempt(a) for a in chosen}
    parts = [p for a in chosen for p in of_attempt(a, logs[a.n], settings.flush_s)]
    if not settings.enabled:
        parts = [p for p in parts if p.segment is not None]  # nobody who is missing was to record anything
    cut = None
    if request.since_s is not None:
        parts, cut = since(parts, request.since_s)
        logs = {n: [e for e in log if not _is_before(e, cut)] for n, log in logs.items()}
    pieces = _pieces(parts)
    wanted = request.gpu
    fitting = {key: found for key, found in pieces.items() if wanted is None or _fits(wanted, key, found)}
    if wanted is not None and not fitting:
        raise UsageError(f"--gpu {wanted}: no allocated GPU of {run.id} fits", fix=_known(pieces))
    return _Chosen(chosen, logs, parts, fitting, cut)


ALL = Request()


def summarize(run: RunDir, request: Request = ALL) -> Summary:
    """The per-job report, over all attempts or one of them.

    Raises:
        NotFound: there is no such attempt.
        UsageError: no GPU fits.
    """
    settings, trouble = _settings(run)
    chosen, logs, parts, pieces, cut = _choose(run, request, settings)
    window = window_of(parts)
    xids = _xids(logs)
    lines = timelines(parts, window)
    owner = aggregate.owners(pieces)
    owned = {key: aggregate.owned(key, found, owner) for key, found in pieces.items()}
    gpus = [
        aggregate.gpu(key, found, owned[key], lines.get(key), xids.get(key[1], [])) for key, found in pieces.items()
    ]
    steps = _clock_steps(logs)
    by_node = _grouped(parts, lambda p: p.node)
    hosts = [aggregate.host(node, found, steps.get(node, [])) for node, found in by_node.items()]
    if request.gpu is not None:
        hosts = [h for h in hosts if h.node in {g.node for g in gpus}]
    history = attempts.read_all(run)
    plan = _planned(run)
    goodput = _goodput(run, history, request, cut)
    energy = _energy(gpus, owned, parts, request.gpu)
    summary = Summary(
        run=run.id,
        job_id=next(iter(reversed(attempts.job_ids(run, history))), None),
        window=window,
        coverage=_coverage(gpus, hosts),
        attempts=[_attempt(run, a, [p for p in parts if p.attempt == a.n], logs[a.n]) for a in chosen],
        gpus=sorted(gpus, key=lambda g: (g.node, g.index is None, g.index or 0, g.uuid)),
        hosts=sorted(hosts, key=lambda h: h.node),
        notes=[],
        state=request.state or (history[-1].ending if history and history[-1].ending else None),
        user=_owner(run),
        layout=plan.words,
        device=plan.device,
        enabled=settings.enabled,
        ranks=aggregate.ranks(parts),
        training=training_of(run, [a for a in history if a.n in logs], energy, gpus, cut),
        goodput=goodput,
        contract=request.contract or contract_status.standing(run, history, None),
        waste=_waste(gpus, owned, goodput),
        unreadable=[
            *([trouble] if trouble else []),
            *attempts.troubles(run, history),
            *(w for a in chosen for w in unreadable(a)),
            *(p.trouble for p in parts if p.trouble),
        ],
    )
    return msgspec.structs.replace(summary, notes=insights.of(summary, [e for log in logs.values() for e in log]))


def _goodput(run: RunDir, history: Sequence[Attempt], request: Request, cut: float | None) -> Goodput:
    """Of the part of the run that is asked for."""
    if request.goodput is not None and request.attempt is None and cut is None:
        return request.goodput
    finished = state.settled(history) if request.state is None else request.state in state.FINAL
    waiting = request.state in (state.PENDING, state.REQUEUED)
    of = Stretch(request.attempt, -math.inf if cut is None else cut)
    return ledger(run, history, clock.now(), finished, waiting=waiting, of=of)


def _owner(run: RunDir) -> str | None:
    try:
        return run.path.owner()
    except (OSError, KeyError):  # a user that this machine does not know
        return None


class _Planned(NamedTuple):
    words: str | None = None
    device: str | None = None


def _planned(run: RunDir) -> _Planned:
    try:
        plan = json_files.peek(run.plan)
        device = plan.get("device")
        return _Planned(schema.convert(plan.get("layout"), Layout).words(), device if isinstance(device, str) else None)
    except msgspec.ValidationError:  # missing, or of another version
        return _Planned()


def _settings(run: RunDir) -> tuple[TelemetrySpec, str | None]:
    """The defaults where spec.toml does not read, and why it does not."""
    try:
        return load_spec(run).recipe.telemetry, None
    except ClusterTrainError as e:
        return TelemetrySpec(), e.message


def _clock_steps(logs: Mapping[int, list[events.Event]]) -> dict[str, list[float]]:
    """By node, by how many seconds its wall clock was set while its monotonic one ran on."""
    found: dict[str, list[float]] = {}
    for log in logs.values():
        # After a reboot the monotonic clock begins anew, and in containers the same numbers of processes do.
        offsets: dict[tuple[str, int], float] = {}
        for e in sorted(log, key=lambda e: float(e.get("mono") or 0.0)):
            if e.get("mono") is None or e.get("host") is None:
                continue
            of = str(e["host"]), int(e.get("pid", 0))
            offset = float(e["t"]) - float(e["mono"])
            if of in offsets and abs(offset - offsets[of]) >= CLOCK_STEP_S:
                found.setdefault(of[0], []).append(round(offset - offsets[of], 3))
            offsets[of] = offset
    return found


def _attempt(run: RunDir, attempt: AttemptDir, parts: list[Part], log: list[events.Event]) -> AttemptSummary:
    known = attempts.read_one(run, attempt)
    return AttemptSummary(
        attempt.n,
        known.job_id or None,
        window_of(parts),
        sorted({p.node for p in parts}),
        known.start,
        known.end,
        known.ending,
        timeline_events.of_events(log),
    )


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _pieces(parts: list[Part]) -> dict[tuple[str, str], list[Piece]]:
    found = [Piece(p, facts, f"gpu{i}") for p in parts for i, facts in enumerate(p.gpus)]
    return _grouped(found, lambda p: (p.part.node, p.facts.uuid))


def _fits(wanted: str, key: tuple[str, str], pieces: list[Piece]) -> bool:
    node, uuid = key
    where, colon, number = wanted.rpartition(":")
    if reading.is_count(number) and (not colon or where == node):
        return pieces[-1].facts.index == int(number)
    return not reading.is_count(wanted) and uuid.lower().startswith(wanted.lower())


def _known(pieces: dict[tuple[str, str], list[Piece]]) -> str:
    names = [f"{node}:{found[-1].facts.index} ({uuid})" for (node, uuid), found in pieces.items()]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ("give one of " + ", ".join(names[:8]) + more) if names else "the run recorded no GPU at all"


def _xids(logs: Mapping[int, list[events.Event]]) -> dict[str, list[Xid]]:
    """By the GPU's UUID."""
    found: dict[str, list[Xid]] = {}
    for log in logs.values():
        for e in events.named(log, "gpu_event"):
            if e.get("xid") is not None and e.get("uuid"):
                found.setdefault(str(e["uuid"]), []).append(
                    Xid(float(e["t"]), int(e["xid"]), max(1, int(e.get("count") or 1)))
                )
    return found


def _is_before(event: events.Event, cut: float) -> bool:
    """What the driver told of a GPU before what is asked for."""
    return event["event"] in ("gpu_event", "gpu_lost", "gpu_back") and float(event["t"]) < cut


def _coverage(gpus: Sequence[GpuSummary], hosts: Sequence[HostSummary]) -> float | None:
    """Over GPUs where there are any, since a lost one is what it must show; over hosts else."""
    with_gpu = {g.node for g in gpus}
    counted = [(g.samples, g.expected) for g in gpus]
    counted += [(h.samples, h.expected) for h in hosts if h.node not in with_gpu]
    expected = sum(e for _, e in counted)
    return None if not expected else round(sum(min(n, e) for n, e in counted) / expected, 4)


def _energy(
    gpus: Sequence[GpuSummary], owned: Mapping[tuple[str, str], list[Piece]], parts: Sequence[Part], wanted: str | None
) -> Energy:
    known = [g.energy_j for g in gpus if g.energy_j is not None]
    never_seen = any(p.no_nvml is not None and not p.gpus for p in parts)
    of_all = wanted is None and not never_seen and aggregate.tells_energy(p for found in owned.values() for p in found)
    return Energy(sum(known) if known else None, of_all)


def _waste(gpus: Sequence[GpuSummary], owned: Mapping[tuple[str, str], list[Piece]], goodput: Goodput) -> Waste | None:
    """As :class:`Waste` defines it; without the queue, in which the job held no GPU."""
    if not gpus:
        return None
    held = {key: sum(p.part.held_s for p in pieces) / 3600 for key, pieces in owned.items()}
    unused = sum(held[g.node, g.uuid] for g in gpus if g.utilization is not None and g.utilization.max == 0)
    used = sum(held.values()) - unused
    running_s = goodput.wall_s - goodput.queue_s
    causes = {"idle_gpus": unused}
    for name in ("startup_s", "restore_s", "repeated_s", "checkpoint_stall_s", "evaluation_s", "shutdown_s", "lost_s"):
        share = getattr(goodput, name) / running_s if running_s > 0 else 0.0
        causes[name.removesuffix("_s")] = used * min(1.0, share)
    causes = {name: round(hours, 4) for name, hours in causes.items() if hours > 0}
    return Waste(
        gpu_hours=round(sum(held.values()), 4), wasted_gpu_hours=round(sum(causes.values()), 4), by_cause=causes
    )
