"""The checkpoints of a run for its pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustertrain.checkpoint.load import rollback
from clustertrain.checkpoint.offline import inspect
from clustertrain.report import checkpoint as checkpoint_text
from clustertrain.report.html.text import clean
from clustertrain.run.run_dir import RunDir, explain_permission_errors


def list_rows(run: RunDir) -> dict[str, Any]:
    """Return the rows of ``checkpoint list --json``, newest first, with the time (UTC epoch s) and state of each."""
    with explain_permission_errors():
        rows = inspect.list_checkpoints(run.checkpoints) if run.checkpoints.exists() else []
    record_error = rollback.find_record_error(run.checkpoints)
    record_problems = [checkpoint_text.format_record_error(record_error)] if record_error is not None else []
    document = {
        "folder": str(run.checkpoints),
        "rows": [
            {
                **row,
                "t": _committed_at(Path(row["path"])),
                "state": checkpoint_text.format_state(row),
                "layout": checkpoint_text.format_layout(row["layout"]),
            }
            for row in reversed(rows)
        ],
        "damage": [*checkpoint_text.damage_messages(rows), *record_problems],
        "total_bytes": sum(row["bytes"] if row["new_bytes"] is None else row["new_bytes"] for row in rows),
        "verify_command": f"clustertrain checkpoint verify {run.id}",
    }
    return clean(document)


def _committed_at(folder: Path) -> float | None:
    try:
        return (folder / "COMMITTED").stat().st_mtime
    except OSError:
        return None
