"""Marks on the timelines of the report, from recorded events."""

from __future__ import annotations

from typing import Any

from clustertrain.report import timeline
from clustertrain.report.html import charts
from clustertrain.run import event_types
from clustertrain.telemetry import timeline_events
from clustertrain.telemetry.report_schema import AttemptSummary, TimelineEvent, TimeWindow


def event(name: str, t: float = 100.0, **fields: Any) -> dict[str, Any]:
    return {"t": t, "monotonic_s": t, "host": "n1", "pid": 1, "event": name, **fields}


def single_mark(log: list[dict[str, Any]]) -> TimelineEvent:
    (mark,) = timeline_events.timeline_from_events(log)
    return mark


def test_driver_error_is_fault_on_both_timelines() -> None:
    mark = single_mark([event("gpu_event", uuid="GPU-b", index=1, kind="xid", xid=79, count=3)])
    assert (mark.kind, mark.text) == ("xid", "XID 79 3 times on GPU 1 of n1: GPU fell off the bus")
    assert timeline._event_style(mark).label == "XID"
    attempt = AttemptSummary(1, "1", TimeWindow(0.0, 200.0), ["n1"], events=[mark])
    assert charts.used_lanes([charts._assign_lane(m, attempt.n) for m in attempt.events]) == ["Faults"]


def test_memory_error_is_not_xid() -> None:
    mark = single_mark([event("gpu_event", uuid="GPU-b", index=1, kind="ecc_uncorrected", xid=None, count=1)])
    assert (mark.kind, mark.text) == ("ecc", "uncorrected memory error on GPU 1 of n1")


def test_interval_mark_covers_its_duration() -> None:
    checkpoint = single_mark(
        [event("checkpoint", t=110.0, t_begin=104.0, step=5, save_s=6.0, stall_s=0.5, reason="stop")]
    )
    assert (checkpoint.t, checkpoint.end, checkpoint.text) == (104.0, 110.0, "checkpoint of step 5 (stop)")
    older = single_mark([event("evaluation", t=110.0, step=5, eval_s=4.0)])
    assert (older.t, older.end) == (106.0, 110.0)


def test_every_mark_has_lane_and_sign() -> None:
    marks = (timeline_events.timeline_from_events([event(name, step=1)]) for name in event_types.EVENTS)
    kinds = {"xid", *(mark.kind for group in marks for mark in group)}
    kinds_with_lane = {kind for _, lane_kinds in charts._LANES.values() for kind in lane_kinds}
    assert kinds <= kinds_with_lane
    assert kinds <= timeline._EVENT_STYLES.keys()
    assert kinds_with_lane <= kinds
    signs = [k.sign for k in timeline._EVENT_STYLES.values()]
    assert len(set(signs)) == len(signs)


def test_marks_are_filtered_and_sorted() -> None:
    log = [event("ended", t=9.0, ending="completed", reason="all ranks completed"), event("agent_started", t=2.0)]
    log.append(event("started", t=1.0, nodes=["n1", "n2"]))
    assert [m.text for m in timeline_events.timeline_from_events(log)] == [
        "started on 2 nodes",
        "completed: all ranks completed",
    ]


def test_duplicate_marks_are_dropped() -> None:
    log = [
        event("gpu_event", t=5.0, uuid="GPU-b", index=1, kind="xid", xid=79, count=1, node="node02"),
        event("alert", t=5.1, code="xid", text="XID 79"),
        event("alert", t=6.0, code="gpu_idle", state="raised", text="GPU 0 is idle"),
        event("signal", t=7.2, source="batch"),
        event("signal", t=7.0, source="signal:SIGTERM"),
        event("signal", t=7.4, source="batch"),
    ]
    marks = timeline_events.timeline_from_events(log)
    assert [m.kind for m in marks] == ["xid", "alert", "signal"]
    assert marks[0].text == "XID 79 on GPU 1 of node02: GPU fell off the bus"
    assert marks[2].text == "stop requested (signal:SIGTERM)"
