"""What happened to a run, as marks on the timeline of its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.plan.layout import counted
from clustertrain.run.events import Event
from clustertrain.telemetry import xids
from clustertrain.telemetry.report_schema import Mark


def of_events(log: Iterable[Event]) -> list[Mark]:
    """The marks of one attempt's events, oldest first; what nobody looks for on a timeline is left out, and what is
    told twice: an alert of what is an event itself, and every agent's word of the signal that ends the attempt."""
    found = [_WORDS[str(e["event"])](e) for e in log if e["event"] in _WORDS and not _is_an_event(e)]
    found.sort(key=lambda m: m.t)
    first = next((m for m in found if m.kind == "signal"), None)
    return [m for m in found if m.kind != "signal" or m is first]


def _is_an_event(e: Event) -> bool:
    return e["event"] == "alert" and e.get("code") in ("xid", "gpu_lost", "ecc_uncorrected")


def _point(text: Callable[[Event], str]) -> Callable[[Event], Mark]:
    return lambda e: Mark(float(e["t"]), str(e["event"]), text(e))


def _lasting(seconds: str, text: Callable[[Event], str]) -> Callable[[Event], Mark]:
    """Events are written at the end of what they tell of; ``t_begin`` says when it began, else its length does."""

    def mark(e: Event) -> Mark:
        end = float(e["t"])
        begin = e.get("t_begin")
        return Mark(
            float(begin) if begin is not None else end - float(e.get(seconds) or 0.0), str(e["event"]), text(e), end
        )

    return mark


def _checkpoint(e: Event) -> Mark:
    end = float(e["t"])
    begin = float(e["t_begin"]) if e.get("t_begin") is not None else end - float(e.get("save_s") or 0.0)
    return Mark(begin, "checkpoint", f"checkpoint of step {e.get('step')} ({e.get('reason', 'interval')})", end)


def _gpu(e: Event) -> str:
    if e.get("index") is None:
        return str(e.get("uuid", "a GPU"))
    return f"GPU {e['index']} of {e.get('node') or e.get('host', '?')}"


def _gpu_event(e: Event) -> Mark:
    """Under the kind ``xid``, or ``ecc`` of memory errors."""
    often = f" {count} times" if (count := int(e.get("count") or 1)) > 1 else ""
    if e.get("kind") == "xid" and e.get("xid") is not None:
        return Mark(float(e["t"]), "xid", f"XID {e['xid']}{often} on {_gpu(e)}: {xids.of(int(e['xid'])).name}")
    return Mark(float(e["t"]), "ecc", f"memory error not corrected{often} on {_gpu(e)}")


def _alert(e: Event) -> str:
    return f"alert {e.get('state', 'raised')}: {e.get('text', e.get('rule', ''))}"


_WORDS: dict[str, Callable[[Event], Mark]] = {
    "started": _point(lambda e: f"started on {counted(len(e.get('nodes') or ()), 'node')}"),
    "first_step": _point(lambda e: f"first step, number {e.get('step')}"),
    "restored": _lasting("restore_s", lambda e: f"restored step {e.get('step')}"),
    "checkpoint": _checkpoint,
    "evaluation": _lasting("eval_s", lambda e: f"evaluation at step {e.get('step')}"),
    "signal": _point(lambda e: f"asked to stop ({e.get('source') or e.get('signal')})"),
    "stop_agreed": _point(lambda e: f"all ranks stop at step {e.get('step')}"),
    "save_given_up": _point(lambda e: f"no time for the checkpoint of step {e.get('step')}"),
    "gpu_lost": _point(lambda e: f"{_gpu(e)} was lost"),
    "gpu_back": _point(lambda e: f"{_gpu(e)} is back"),
    "gpu_event": _gpu_event,
    "alert": _point(_alert),
    "telemetry_failed": _point(lambda e: f"the sampler of {e.get('host')}: {e.get('reason')}"),
    "ended": _point(lambda e: f"{e.get('ending')}: {e.get('reason')}"),
    "stopped": _point(lambda e: f"not continued: {e.get('why')}"),
    "requeued": _point(lambda e: f"requeued ({e.get('how')})"),
}
