"""The events of a run as marks on the timeline of its report."""

from __future__ import annotations

from collections.abc import Iterable

from clustertrain.plan.layout import pluralize
from clustertrain.run import event_types
from clustertrain.run.events import Event, to_struct
from clustertrain.telemetry import xids
from clustertrain.telemetry.report_schema import TimelineEvent

_DUPLICATE_ALERTS = ("xid", "gpu_lost", "ecc_uncorrected")  # alerts about something that is an event itself


def timeline_from_events(events: Iterable[Event]) -> list[TimelineEvent]:
    """Return the marks of one attempt's events, oldest first, without duplicates and events that belong on no timeline.

    Every agent logs the signal that ends the attempt; only the first one gets a mark.
    """
    structs = (to_struct(e) for e in events)
    timeline = [mark for e in structs if e is not None and (mark := _build_mark(e)) is not None]
    timeline.sort(key=lambda m: m.t)
    first = next((m for m in timeline if m.kind == "signal"), None)
    return [m for m in timeline if m.kind != "signal" or m is first]


def _build_mark(e: event_types.Event) -> TimelineEvent | None:
    match e:
        case event_types.GpuEvent():
            return _build_gpu_mark(e)
        case event_types.Restored():
            return _build_interval(e.t_begin, e.restore_s, e.t, "restored", f"restored step {e.step}")
        case event_types.Checkpoint():
            text = f"checkpoint of step {e.step} ({'interval' if e.reason is None else e.reason})"
            return _build_interval(e.t_begin, e.save_s, e.t, "checkpoint", text)
        case event_types.Evaluation():
            return _build_interval(e.t_begin, e.eval_s, e.t, "evaluation", f"evaluation at step {e.step}")
    description = _describe_instant(e)
    return None if description is None else TimelineEvent(e.t, str(e.__struct_config__.tag), description)


def _build_interval(begin: float | None, duration_s: float | None, end: float, kind: str, text: str) -> TimelineEvent:
    """Return the mark of an event that was written at its ``end``; older versions did not write its begin."""
    return TimelineEvent(end - (duration_s or 0.0) if begin is None else begin, kind, text, end)


def _describe_instant(e: event_types.Event) -> str | None:
    match e:
        case event_types.Started():
            return f"started on {pluralize(len(e.nodes or ()), 'node')}"
        case event_types.FirstStep():
            return f"first step, number {e.step}"
        case event_types.Signal():
            return f"stop requested ({e.source or e.signal})"
        case event_types.StopAgreed():
            return f"all ranks stop at step {e.step}"
        case event_types.SaveAbandoned():
            return f"no time for the checkpoint of step {e.step}"
        case event_types.GpuLost():
            return f"{_format_gpu(e)} was lost"
        case event_types.GpuBack():
            return f"{_format_gpu(e)} is back"
        case event_types.AlertEvent() if e.code not in _DUPLICATE_ALERTS:
            return f"alert {e.state or 'raised'}: {e.text or ''}"
        case event_types.TelemetryFailed():
            return f"the sampler of {e.host}: {e.reason}"
        case event_types.Ended():
            return f"{e.ending}: {e.reason}"
        case event_types.Stopped():
            return f"not continued: {e.reason}"
        case event_types.Requeued():
            return f"requeued ({e.method})"
    return None


def _format_gpu(e: event_types.GpuLost | event_types.GpuBack | event_types.GpuEvent) -> str:
    if e.index is None:
        return e.uuid or "a GPU"
    return f"GPU {e.index} of {e.node or e.host or '?'}"


def _build_gpu_mark(e: event_types.GpuEvent) -> TimelineEvent:
    """Return a mark of kind ``xid``, or ``ecc`` for a memory error."""
    repeats = f" {e.count} times" if (e.count or 1) > 1 else ""
    if e.kind == "xid" and e.xid is not None:
        text = f"XID {e.xid}{repeats} on {_format_gpu(e)}: {xids.lookup_xid(e.xid).name}"
        return TimelineEvent(e.t, "xid", text)
    return TimelineEvent(e.t, "ecc", f"uncorrected memory error{repeats} on {_format_gpu(e)}")
