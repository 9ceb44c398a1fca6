"""Text for the events that users want to see; the files contain all events."""

from __future__ import annotations

from clustertrain.plan.layout import pluralize
from clustertrain.run.events import Event

_TEMPLATES = {
    "started": "started on {nodes}",
    "session_started": "{ranks} connected ({layout}, {device})",
    "restored": "resumed from the checkpoint of step {step}",
    "signal": "asked to stop ({source})",
    "stop_agreed": "all ranks stop at step {step}",
    "save_abandoned": "no time for the checkpoint of step {step}",
    "checkpoint": "checkpoint of step {step} committed in {save_s:.2f} s",
    "profiled": "steps {steps[0]} to {steps[1]} profiled: {path}.txt",
    "compiled": "torch.compile: forward and backward take {compiled_s:.3f} s instead of {eager_s:.3f} s",
    "compile_failed": "torch.compile failed, the layers run uncompiled: {reason}",
    "gpu_lost": "GPU {index} of {host} is lost: {reason}",
    "gpu_back": "GPU {index} of {host} is back",
    "telemetry_failed": "telemetry of {host}: {reason}",
    "tracking_failed": "tracking on {host}: {reason}",
    "alert_not_delivered": "alert not delivered by {channel}: {reason}",
    "ended": "{ending}: {reason}",
    "requeued": "requeued ({method})",
    "stopped": "the run stops: {reason}",
}


def format_event(event: Event) -> str | None:
    """Return the event as text, or None if users need not see it or a field is missing."""
    name = str(event["event"])
    if name == "alert":
        label = "cleared" if event.get("state") == "cleared" else event.get("severity", "alert")
        return f"{label}: {event.get('text', '')}"
    if name == "restored" and event.get("step") is None:
        return None
    template = _TEMPLATES.get(name)
    try:
        nodes = ", ".join(map(str, event.get("nodes", ())))
        ranks = pluralize(event["world_size"], "rank") if name == "session_started" else ""
        return template.format_map({"save_s": 0.0, **event, "nodes": nodes, "ranks": ranks}) if template else None
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
