"""The JSON of ``clustertrain status`` and ``list``."""

from __future__ import annotations

from typing import Any

import msgspec

from clustertrain.run.recipe_hash import load_recipe_hash
from clustertrain.scheduler.run_status import RunStatus


def status_json(current: RunStatus) -> dict[str, Any]:
    """Return the keys of ``status --json`` that do not need the run's files of metrics; they are a public interface."""
    job_view = current.view
    return {
        "run": current.run.id,
        "job_id": current.job_id,
        "name": current.name,
        "backend": current.backend,
        "state": current.state,
        "step": current.step,
        "total_steps": current.total_steps,
        "pending_reason": job_view.reason or None if job_view and job_view.state == "PENDING" else None,
        "start_estimate": job_view.start_time if job_view and job_view.state == "PENDING" else None,
        "scheduler_error": current.scheduler_error,
        "cancelling": current.is_cancelling,
        "undecided_reason": current.undecided_reason,
        "continue_command": current.continue_command,
        "attempts": [
            {
                "n": a.n,
                "job_id": a.job_id,
                "restart": a.restart,
                "state": current.attempt_state(a),
                "reason": a.reason,
                "nodes": list(a.nodes),
                "start": a.start,
                "end": a.end,
                "first_step": a.first_step,
                "last_step": a.last_step,
                "committed_step": a.committed_step,
                "roll_backs": a.roll_backs,
                "requeued": a.requeued,
                "stopped": a.stopped,
            }
            for a in current.history
        ],
        "skipped_steps": current.skipped_steps,
        "roll_backs": current.roll_backs,
        "goodput": msgspec.to_builtins(current.goodput),
        "contract": msgspec.to_builtins(current.contract),
        "recipe_hash": current.recipe_hash or load_recipe_hash(current.run),
        "run_dir": str(current.run.path),
    }
