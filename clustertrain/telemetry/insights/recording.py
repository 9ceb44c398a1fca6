"""Insights on missing recordings, and on alerts and metrics that were not delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clustertrain.documentation import page_url
from clustertrain.run import events, state
from clustertrain.telemetry.findings import CRITICAL, INFO, WARNING
from clustertrain.telemetry.insights.context import (
    JobContext,
    gpu_insight,
    gpu_key,
    gpu_label,
    pluralize,
)
from clustertrain.telemetry.report_schema import GpuSummary, Insight

MIN_COVERAGE = 0.9
_SEE_LOG = "the report covers only recorded samples; check the agent's log and events for the cause"
_PERMANENT_REASONS = ("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "IMPLAUSIBLE")
_MAX_LISTED = 6  # fields, files or reasons


def _no_telemetry(job: JobContext) -> Iterable[Insight]:
    summary = job.summary
    if summary.hosts or summary.gpus:
        return
    fix, yet = None, "" if summary.state in state.FINAL else " yet"
    if summary.read_errors:
        text = "there is no recording that this user may read"
        fix = "ask the owner of the run, or the administrators, for read access to its folder"
    elif not summary.enabled:
        text, fix = "nothing was recorded: the recipe disables telemetry", "set telemetry.enabled = true in the recipe"
    elif not summary.attempts:
        text = f"nothing has been recorded{yet}: no attempt has started"
        fix = f"check `clustertrain status {summary.run}` for the reason"
    else:
        text = (
            f"nothing has been recorded{yet}, although {pluralize(len(summary.attempts), 'attempt')} began: no agent"
            " started"
        )
        fix = f"check `clustertrain status {summary.run}` and `clustertrain logs {summary.run}` for the newest attempt"
    yield Insight(severity=INFO, code="no_telemetry", text=text, fix=fix)


def _unrecorded_attempts(job: JobContext) -> Iterable[Insight]:
    summary = job.summary
    missing = list(map(str, summary.unrecorded_attempts))
    if summary.hosts and summary.enabled and missing:
        attempts = f"attempt{'s' * (len(missing) > 1)} {', '.join(missing)}"
        text = f"{attempts} trained, but recorded nothing: figures of GPUs and hosts cover the others"
        fix = f"check `clustertrain logs {summary.run} --job` for the messages of the agents"
        yield Insight(severity=WARNING, code="no_telemetry", text=text, fix=fix)


def _silent_agents(job: JobContext) -> Iterable[Insight]:
    for host in job.summary.hosts:
        if host.agent_lost_s:
            text = f"the agent of {host.node} was silent for the last {host.agent_lost_s:,.0f} s of the attempt"
            fix = (
                f"check `clustertrain logs {job.summary.run} --node {host.node}` and --job for its end; requeue the run"
            )
            yield Insight(severity=CRITICAL, code="agent_gone", text=text, fix=fix, node=host.node)


def _low_coverage(job: JobContext) -> Iterable[Insight]:
    damaged = " ".join(job.summary.read_errors)
    for host in job.summary.hosts:
        if host.agent_lost_s or (not host.samples and f"/{host.node}/" in damaged):
            continue
        if host.samples >= MIN_COVERAGE * host.samples_expected:
            continue
        if not host.samples:
            text = f"{host.node} recorded nothing, although its agent ran"
            yield Insight(severity=WARNING, code="no_telemetry", text=text, fix=_SEE_LOG, node=host.node)
            continue
        share = host.samples / host.samples_expected
        text = f"{host.node} recorded {share:.0%} of its samples ({host.samples} of {host.samples_expected})"
        yield Insight(severity=WARNING, code="low_coverage", text=text, fix=_SEE_LOG, node=host.node)


def _sampler_failures(job: JobContext) -> Iterable[Insight]:
    for event in events.filter_by_name(job.log, "telemetry_failed"):
        text = f"the sampler on {event.get('host')} reported: {event.get('reason')}"
        yield Insight(severity=WARNING, code="telemetry_failed", text=text, fix=_SEE_LOG)


def _unreadable(job: JobContext) -> Iterable[Insight]:
    files = job.summary.read_errors
    if files:
        more = f" and {len(files) - _MAX_LISTED:,} more" if len(files) > _MAX_LISTED else ""
        text = f"{pluralize(len(files), 'file')} could not be read: {'; '.join(files[:_MAX_LISTED])}{more}"
        fix = "the report covers only the other files"
        if any("may not read" in file for file in files):
            fix += "; the run's owner can open it to its group (submit --share)"
        yield Insight(severity=WARNING, code="unreadable", text=text, fix=fix)


def _is_whole_run(reason: str) -> bool:
    """Return whether a reason applies to all samples, and samples exist."""
    return "samples)" not in reason and not reason.startswith(("NOT_FOUND", "no sample", "NO_DATA: a mean needs two"))


def _missing_fields(job: JobContext) -> Iterable[Insight]:
    """Return one insight for all fields that the same GPUs lack for the same reason in the whole run."""
    gpus_by_field: dict[tuple[str, str], list[GpuSummary]] = {}
    for gpu in job.summary.gpus:
        for name, reason in gpu.missing.items():
            if reason.startswith(_PERMANENT_REASONS) or (gpu_key(gpu) not in job.lost_gpus and _is_whole_run(reason)):
                gpus_by_field.setdefault((name, reason.partition(" (")[0]), []).append(gpu)
    fields_by_gpus: dict[tuple[str, tuple[int, ...]], tuple[list[str], list[GpuSummary]]] = {}
    for (name, reason), gpus in gpus_by_field.items():
        fields_by_gpus.setdefault((reason, tuple(map(id, gpus))), ([], gpus))[0].append(name)
    for (reason, _), (names, gpus) in fields_by_gpus.items():
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        where = gpu_label(gpus[0]) if len(gpus) == 1 else f"{len(gpus):,} GPUs"
        text = f"not recorded on {where}: {', '.join(names[:_MAX_LISTED])}{more} ({reason})"
        if len(gpus) == 1:
            yield gpu_insight(gpus[0], INFO, "field_missing", text, None)
        else:
            yield Insight(severity=INFO, code="field_missing", text=text)


def _alerts_not_delivered(job: JobContext) -> Iterable[Insight]:
    """Return one insight for each channel, with the reasons of all nodes."""
    by_channel: dict[tuple[str, str], list[events.Event]] = {}
    for event in events.filter_by_name(job.log, "alert_not_delivered"):
        by_channel.setdefault((str(event.get("channel")), str(event.get("to") or "")), []).append(event)
    for (channel, to), failures in by_channel.items():
        text = (
            f"alerts were not delivered by {channel}{f' {to}' if to else ''}{_on_hosts(failures)}:"
            f" {_format_reasons(failures)}"
        )
        fix = f"read the alerts in the run's events; see {page_url('guides/monitor')} for messages and timeouts"
        yield Insight(severity=WARNING, code="alerts_not_delivered", text=text, fix=fix)


def _exporter_failures(job: JobContext) -> Iterable[Insight]:
    """Report failures of the exporter; they are informational if it recovered."""
    by_failure: dict[tuple[str, str | None, bool], list[events.Event]] = {}
    for event in events.filter_by_name(job.log, "exporter_failed"):
        fix = event.get("fix")
        failure_key = (str(event.get("reason")), None if fix is None else str(fix), _has_recovered(job, event))
        by_failure.setdefault(failure_key, []).append(event)
    for (reason, fix, recovered), occurrences in by_failure.items():
        text = f"the Prometheus exporter failed{' for a while' if recovered else ''}{_on_hosts(occurrences)}: {reason}"
        yield Insight(severity=INFO if recovered else WARNING, code="exporter_failed", text=text, fix=fix)


def _has_recovered(job: JobContext, failure: events.Event) -> bool:
    """Return whether a file was written later; its path starts the reason. A port is tried only once."""
    return any(
        e.get("host") == failure.get("host") and float(e["t"]) > float(failure["t"])
        for e in events.filter_by_name(job.log, "exporter_started")
        if e.get("textfile") and str(failure.get("reason")).startswith(f"{e['textfile']}: ")
    )


def _on_hosts(failures: Iterable[events.Event]) -> str:
    hosts = list(dict.fromkeys(str(e["host"]) for e in failures if e.get("host")))
    return f" on {hosts[0] if len(hosts) == 1 else pluralize(len(hosts), 'node')}" if hosts else ""


def _format_reasons(failures: Iterable[events.Event]) -> str:
    reasons = list(dict.fromkeys(str(e.get("reason")) for e in failures))
    more = f"; and {len(reasons) - _MAX_LISTED:,} more" if len(reasons) > _MAX_LISTED else ""
    return "; ".join(reasons[:_MAX_LISTED]) + more


RULES: tuple[Callable[[JobContext], Iterable[Insight]], ...] = (
    _no_telemetry,
    _unrecorded_attempts,
    _silent_agents,
    _low_coverage,
    _sampler_failures,
    _unreadable,
    _missing_fields,
    _alerts_not_delivered,
    _exporter_failures,
)
