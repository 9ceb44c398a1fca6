"""What is missing from the record, or did not reach whom it was for, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.run import events
from clustertrain.telemetry.insights.context import CRITICAL, INFO, WARNING, Job, counted, key, of_gpu, where
from clustertrain.telemetry.report_schema import GpuSummary, Note

ENOUGH_COVERAGE = 0.9
_SEE_LOG = "the figures stand for what was recorded; the agent's log and events say what held the sampler up"
_LASTING = ("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "IMPLAUSIBLE")
_SPELT_OUT = 6  # fields, files or reasons


def _nothing(job: Job) -> Iterable[Note]:
    s = job.summary
    if s.hosts or s.gpus:
        return
    fix = None
    if s.unreadable:
        text = "nothing that this user may read has been recorded"
        fix = "ask the owner of the run, or the administrators, for read access to its folder"
    elif not s.enabled:
        text, fix = "nothing was recorded: the recipe turns telemetry off", "telemetry.enabled = true in the recipe"
    elif not s.attempts:
        text = "nothing has been recorded yet: no attempt has started"
        fix = f"`clustertrain status {s.run}` says what the run waits for"
    else:
        text = f"nothing has been recorded yet, though {counted(len(s.attempts), 'attempt')} began: no agent came up"
        fix = f"`clustertrain status {s.run}` and `clustertrain logs {s.run}` say how far the newest attempt came"
    yield Note(severity=INFO, code="no_telemetry", text=text, fix=fix)


def _silent(job: Job) -> Iterable[Note]:
    for host in job.summary.hosts:
        if host.silent_s:
            text = f"the agent of {host.node} fell silent {host.silent_s:,.0f} s before the attempt's last sign of life"
            fix = (
                f"`clustertrain logs {job.summary.run} --node {host.node}` and --job say how it ended; requeue the run"
            )
            yield Note(severity=CRITICAL, code="agent_gone", text=text, fix=fix, node=host.node)


def _coverage(job: Job) -> Iterable[Note]:
    damaged = " ".join(job.summary.unreadable)
    for host in job.summary.hosts:
        if host.silent_s or (not host.samples and f"/{host.node}/" in damaged):
            continue
        if host.samples >= ENOUGH_COVERAGE * host.expected:
            continue
        if not host.samples:
            text = f"{host.node} recorded nothing, though its agent ran"
            yield Note(severity=WARNING, code="no_telemetry", text=text, fix=_SEE_LOG, node=host.node)
            continue
        share = host.samples / host.expected
        text = f"{host.node} recorded {share:.0%} of its samples ({host.samples} of {host.expected})"
        yield Note(severity=WARNING, code="low_coverage", text=text, fix=_SEE_LOG, node=host.node)


def _failed(job: Job) -> Iterable[Note]:
    for event in events.named(job.log, "telemetry_failed"):
        text = f"the sampler on {event.get('host')} reported: {event.get('reason')}"
        yield Note(severity=WARNING, code="telemetry_failed", text=text, fix=_SEE_LOG)


def _unreadable(job: Job) -> Iterable[Note]:
    files = job.summary.unreadable
    if files:
        more = f" and {len(files) - _SPELT_OUT:,} more" if len(files) > _SPELT_OUT else ""
        text = f"{counted(len(files), 'file')} could not be read: {'; '.join(files[:_SPELT_OUT])}{more}"
        fix = "the figures are those of the other files"
        if any("may not read" in file for file in files):
            fix += "; the run's owner can open it to its group (submit --share)"
        yield Note(severity=WARNING, code="unreadable", text=text, fix=fix)


def _is_throughout(reason: str) -> bool:
    """Not of some samples alone, and not because there were none."""
    return "samples)" not in reason and not reason.startswith(("NOT_FOUND", "no sample"))


def _missing_fields(job: Job) -> Iterable[Note]:
    """One note for all fields that the same GPUs lack for the same reason, throughout or for good."""
    lacking: dict[tuple[str, str], list[GpuSummary]] = {}
    for gpu in job.summary.gpus:
        for name, reason in gpu.nulls.items():
            if reason.startswith(_LASTING) or (key(gpu) not in job.lost and _is_throughout(reason)):
                lacking.setdefault((name, reason.partition(" (")[0]), []).append(gpu)
    alike: dict[tuple[str, tuple[int, ...]], tuple[list[str], list[GpuSummary]]] = {}
    for (name, reason), gpus in lacking.items():
        alike.setdefault((reason, tuple(map(id, gpus))), ([], gpus))[0].append(name)
    for (reason, _), (names, gpus) in alike.items():
        more = f" and {len(names) - _SPELT_OUT} more" if len(names) > _SPELT_OUT else ""
        text = f"{', '.join(names[:_SPELT_OUT])}{more} {'is' if len(names) == 1 else 'are'} missing on"
        if len(gpus) == 1:
            yield of_gpu(gpus[0], INFO, "field_missing", f"{text} {where(gpus[0])} ({reason})", None)
        else:
            yield Note(severity=INFO, code="field_missing", text=f"{text} {len(gpus):,} GPUs ({reason})")


def _alerts_not_delivered(job: Job) -> Iterable[Note]:
    """One note for each way, with what the nodes told."""
    ways: dict[tuple[str, str], list[events.Event]] = {}
    for event in events.named(job.log, "alert_not_delivered"):
        ways.setdefault((str(event.get("way")), str(event.get("to") or "")), []).append(event)
    for (way, to), told in ways.items():
        text = f"alerts were not delivered by {way}{f' {to}' if to else ''}{_on(told)}: {_reasons(told)}"
        fix = "the alerts stand in the events all the same; docs/alerts.md says what is sent, and how long it may take"
        yield Note(severity=WARNING, code="alerts_not_delivered", text=text, fix=fix)


def _exporter(job: Job) -> Iterable[Note]:
    """What has worked since is information."""
    failures: dict[tuple[str, str | None, bool], list[events.Event]] = {}
    for event in events.named(job.log, "exporter_failed"):
        fix = event.get("fix")
        kind = (str(event.get("reason")), None if fix is None else str(fix), _works_again(job, event))
        failures.setdefault(kind, []).append(event)
    for (reason, fix, again), told in failures.items():
        text = f"the Prometheus exporter failed{' for a while' if again else ''}{_on(told)}: {reason}"
        yield Note(severity=INFO if again else WARNING, code="exporter_failed", text=text, fix=fix)


def _works_again(job: Job, failed: events.Event) -> bool:
    """Of a file, which is tried again: a reason begins with its path. A port is tried once."""
    return any(
        e.get("host") == failed.get("host") and float(e["t"]) > float(failed["t"])
        for e in events.named(job.log, "exporter_started")
        if e.get("textfile") and str(failed.get("reason")).startswith(f"{e['textfile']}: ")
    )


def _comment(job: Job) -> Iterable[Note]:
    told = list(events.named(job.log, "comment_refused"))
    if told:
        text = f"Slurm refused the line of figures in the job's comment: {_reasons(told)}"
        yield Note(severity=INFO, code="comment_refused", text=text, fix="telemetry.comment = false asks for none")


def _on(told: Iterable[events.Event]) -> str:
    hosts = list(dict.fromkeys(str(e["host"]) for e in told if e.get("host")))
    return f" on {hosts[0] if len(hosts) == 1 else counted(len(hosts), 'node')}" if hosts else ""


def _reasons(told: Iterable[events.Event]) -> str:
    found = list(dict.fromkeys(str(e.get("reason")) for e in told))
    more = f"; and {len(found) - _SPELT_OUT:,} more" if len(found) > _SPELT_OUT else ""
    return "; ".join(found[:_SPELT_OUT]) + more


RULES: tuple[Callable[[Job], Iterable[Note]], ...] = (
    _nothing,
    _silent,
    _coverage,
    _failed,
    _unreadable,
    _missing_fields,
    _alerts_not_delivered,
    _exporter,
    _comment,
)
