"""Events of a run as marks on the timeline of its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.plan.layout import pluralize
from clustertrain.run.events import Event
from clustertrain.telemetry import xids
from clustertrain.telemetry.report_schema import TimelineEvent


def timeline_from_events(events: Iterable[Event]) -> list[TimelineEvent]:
    """Return the timeline marks of one attempt's events, oldest first.

    Duplicates are dropped: alerts about something that is an event itself, and all but the first report of the signal
    that ends the attempt (every agent writes one).
    """
    timeline = [_BUILDERS[str(e["event"])](e) for e in events if e["event"] in _BUILDERS and not _is_duplicate_alert(e)]
    timeline.sort(key=lambda m: m.t)
    first = next((m for m in timeline if m.kind == "signal"), None)
    return [m for m in timeline if m.kind != "signal" or m is first]


def _is_duplicate_alert(e: Event) -> bool:
    return e["event"] == "alert" and e.get("code") in ("xid", "gpu_lost", "ecc_uncorrected")


def _instant(describe: Callable[[Event], str]) -> Callable[[Event], TimelineEvent]:
    return lambda e: TimelineEvent(float(e["t"]), str(e["event"]), describe(e))


def _interval(duration_key: str, describe: Callable[[Event], str]) -> Callable[[Event], TimelineEvent]:
    """Return a builder of intervals; an event is written at the end, and starts at ``t_begin`` or by its duration."""

    def build_event(e: Event) -> TimelineEvent:
        end = float(e["t"])
        begin = e.get("t_begin")
        return TimelineEvent(
            float(begin) if begin is not None else end - float(e.get(duration_key) or 0.0),
            str(e["event"]),
            describe(e),
            end,
        )

    return build_event


def _checkpoint_event(e: Event) -> TimelineEvent:
    end = float(e["t"])
    begin = float(e["t_begin"]) if e.get("t_begin") is not None else end - float(e.get("save_s") or 0.0)
    return TimelineEvent(
        begin, "checkpoint", f"checkpoint of step {e.get('step')} ({e.get('reason', 'interval')})", end
    )


def _format_gpu(e: Event) -> str:
    if e.get("index") is None:
        return str(e.get("uuid", "a GPU"))
    return f"GPU {e['index']} of {e.get('node') or e.get('host', '?')}"


def _gpu_event(e: Event) -> TimelineEvent:
    """Return a mark of kind ``xid``, or ``ecc`` for memory errors."""
    repeats = f" {count} times" if (count := int(e.get("count") or 1)) > 1 else ""
    if e.get("kind") == "xid" and e.get("xid") is not None:
        return TimelineEvent(
            float(e["t"]), "xid", f"XID {e['xid']}{repeats} on {_format_gpu(e)}: {xids.lookup_xid(int(e['xid'])).name}"
        )
    return TimelineEvent(float(e["t"]), "ecc", f"uncorrected memory error{repeats} on {_format_gpu(e)}")


def _format_alert(e: Event) -> str:
    return f"alert {e.get('state', 'raised')}: {e.get('text', e.get('rule', ''))}"


_BUILDERS: dict[str, Callable[[Event], TimelineEvent]] = {
    "started": _instant(lambda e: f"started on {pluralize(len(e.get('nodes') or ()), 'node')}"),
    "first_step": _instant(lambda e: f"first step, number {e.get('step')}"),
    "restored": _interval("restore_s", lambda e: f"restored step {e.get('step')}"),
    "checkpoint": _checkpoint_event,
    "evaluation": _interval("eval_s", lambda e: f"evaluation at step {e.get('step')}"),
    "signal": _instant(lambda e: f"stop requested ({e.get('source') or e.get('signal')})"),
    "stop_agreed": _instant(lambda e: f"all ranks stop at step {e.get('step')}"),
    "save_given_up": _instant(lambda e: f"no time for the checkpoint of step {e.get('step')}"),
    "gpu_lost": _instant(lambda e: f"{_format_gpu(e)} was lost"),
    "gpu_back": _instant(lambda e: f"{_format_gpu(e)} is back"),
    "gpu_event": _gpu_event,
    "alert": _instant(_format_alert),
    "telemetry_failed": _instant(lambda e: f"the sampler of {e.get('host')}: {e.get('reason')}"),
    "ended": _instant(lambda e: f"{e.get('ending')}: {e.get('reason')}"),
    "stopped": _instant(lambda e: f"not continued: {e.get('why')}"),
    "requeued": _instant(lambda e: f"requeued ({e.get('how')})"),
}
