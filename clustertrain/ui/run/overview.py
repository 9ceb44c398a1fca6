"""What the page of a run says first: state, progress, where the time went, the last failure, the attempts."""

from __future__ import annotations

from typing import Any

import msgspec

from clustertrain.report import status as status_text
from clustertrain.report.documents.runs import build_run_entry
from clustertrain.report.html.text import clean
from clustertrain.run import attempts, json_files
from clustertrain.run.usage.goodput import TIME_CATEGORIES, Goodput
from clustertrain.scheduler.run_status import Unreadable
from clustertrain.ui.run.status import StatusView


def describe(view: StatusView) -> dict[str, Any]:
    """Return the fields of :class:`RunEntry`, the device, the parts of the goodput and the files that cannot be read.

    For a run whose status cannot be read, ``error`` and ``fix`` say why, and ``state`` is null.
    """
    status = view.status
    if isinstance(status, Unreadable):
        return clean({"run": status.run.id, "state": None, "t": view.t, "error": status.error, "fix": status.fix})
    document = {
        **msgspec.to_builtins(build_run_entry(status, view.progress)),
        "t": view.t,
        "error": None,
        "device": json_files.poll_document(status.run.plan).get("device"),
        "is_final": status.is_final,
        "is_held": status.is_held,
        "end_reason": status.end_reason,
        "failure_of": view.progress.failure.who if view.progress.failure is not None else None,
        "goodput_parts": goodput_parts(status.goodput),
        "contract_rows": status_text.contract_rows(status.contract),
        "read_errors": attempts.list_read_errors(status.run, status.history),
        "saved": next((a.newest_checkpoint for a in reversed(status.history) if a.newest_checkpoint), None),
    }
    return clean(document)


def goodput_parts(ledger: Goodput) -> list[dict[str, Any]]:
    """Return the categories that took time: key (without ``_s``), label, seconds, share of the wall time (0-1)."""
    parts = []
    for name in TIME_CATEGORIES:
        seconds = getattr(ledger, name)
        if seconds > 0 and ledger.wall_s > 0:
            is_script = name == "other_s" and ledger.ratio is None
            label = "in the script" if is_script else status_text.GOODPUT_LABELS[name]
            parts.append(
                {"key": name.removesuffix("_s"), "label": label, "seconds": seconds, "share": seconds / ledger.wall_s}
            )
    return parts
