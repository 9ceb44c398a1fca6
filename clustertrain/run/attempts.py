"""The attempts of a run, read from their events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from clustertrain.run import event_types, events, json_files, metrics, safe_names
from clustertrain.run.run_dir import AttemptDir, RunDir


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the run."""

    n: int
    job_id: str
    restart: int
    nodes: tuple[str, ...]
    host: str
    start: float | None
    end: float | None
    ending: str | None
    """One of :data:`clustertrain.run.endings.Ending`; None until it is recorded."""
    reason: str | None
    first_step: int | None
    """Steps completed after the attempt's first step."""
    last_step: int | None
    """The newest step that is known to be complete."""
    restored_step: int | None
    committed_step: int | None
    """Step of the newest checkpoint that this attempt committed."""
    requeued: str | None
    """How the run was continued: ``requeue``, ``resubmit`` or ``slurm``."""
    stopped: str | None
    """Why the run will not be continued."""
    record_error: str | None = None
    """The error in reading attempt.json."""
    roll_backs: int = 0
    """Number of returns to an earlier checkpoint because training went wrong."""
    ended_by_script: bool = False
    """The script itself exited with 0 before its session finished, so only the script knows what it saved."""
    ended_by_signal: bool = False
    """The stop signal ended a command that does not handle it."""
    rolled_back_to: int | None = None
    """The oldest step that the attempt rolled back to, or restored because newer checkpoints were damaged."""
    checkpoint_times: tuple[float, float] | None = None
    """Of a command whose checkpoints ``job.checkpoints`` names: when the newest one was saved, at the first and at the
    last look (UTC epoch s). None: not named."""
    newest_checkpoint: str | None = None
    """Path of that checkpoint, or of the newest one of another framework; None while the run has saved none."""
    saved_checkpoint: bool = False
    """The attempt saved such a checkpoint."""
    earlier_step: int = 0
    """The newest step that earlier attempts committed."""

    @property
    def made_progress(self) -> bool:
        """Whether the attempt saved something newer than it started from.

        A program that restored nothing has begun again: its steps count if no earlier attempt has committed them.
        """
        start = self.earlier_step if self.restored_step is None else self.restored_step
        return self.saved_checkpoint or (self.committed_step is not None and self.committed_step > start)


_RECORD_TYPES = {"job_id": str, "restart": float, "nodes": list, "host": str, "t": float}


def load_attempt(run: RunDir, attempt: AttemptDir) -> Attempt:
    """Load one attempt, as far as its files are readable."""
    log = events.for_attempt(attempt)
    record, record_error = json_files.load_document(attempt.record, _RECORD_TYPES)
    if (invalid_fields := safe_names.sanitize(record)) and record_error is None:
        record_error = f"{attempt.record}: invalid fields: {', '.join(invalid_fields)}"
    started = events.select_last(log, event_types.Started)
    ended = events.select_last(log, event_types.Ended)
    first = next(events.select(log, event_types.FirstStep), None)
    # Not the restores of a script's later loops, which continue from an earlier loop of the same attempt.
    startup_log = log if first is None else [e for e in log if e["t"] <= first.t]
    restored = events.select_last(startup_log, event_types.Restored)
    requeued = events.select_last(log, event_types.Requeued)
    stopped = events.select_last(log, event_types.Stopped)
    checkpoints = _list_committed_steps(log)
    looks = list(events.select(log, event_types.ProgramCheckpoint))
    framework_paths = [saved.path for saved in events.select(log, event_types.Checkpoint) if saved.path]
    newest_row = metrics.find_newest_row(run, attempt.n)
    last_step = ended.last_step if ended else None
    if first is None and restored is None:
        last_step = last_step or None  # 0: a rank that reported no step
    newest_row_step = newest_row.get("step") if newest_row else None
    steps = [s for s in (last_step, newest_row_step, *checkpoints) if s is not None]
    record_t = record.get("t")
    return Attempt(
        n=attempt.n,
        job_id=record.get("job_id", ""),
        restart=int(record.get("restart", 0)),
        nodes=tuple(record.get("nodes", ())),
        host=record.get("host", ""),
        start=started.t if started else record_t if events.is_timestamp(record_t) else None,
        end=None if ended is None else ended.t if ended.ended_at is None else ended.ended_at,
        ending=ended.ending if ended else None,
        reason=ended.reason if ended else None,
        first_step=first.step if first else None,
        last_step=max(steps, default=None),
        restored_step=restored.step if restored else None,
        committed_step=max(checkpoints, default=None),
        requeued=requeued.method if requeued else None,
        stopped=stopped.reason if stopped else None,
        record_error=record_error,
        roll_backs=len(list(events.filter_by_name(log, "rolled_back"))),
        ended_by_script=ended is not None and ended.ended_by_script is True,
        ended_by_signal=ended is not None and ended.ended_by_signal is True,
        rolled_back_to=_oldest_rolled_back_step(log),
        checkpoint_times=(looks[0].modified or 0.0, looks[-1].modified or 0.0) if looks else None,
        newest_checkpoint=looks[-1].path if looks else framework_paths[-1] if framework_paths else None,
        saved_checkpoint=len(looks) > 1,
    )


def list_read_errors(run: RunDir, history: Sequence[Attempt]) -> list[str]:
    """Return the read errors of the records of attempts and rollbacks, and of the plan.

    Their paths are relative to the run's folder.
    """
    try:
        plan_error = json_files.load_document(run.plan).error
    except PermissionError:
        plan_error = f"{run.plan}: you may not read it"
    found = (*(a.record_error for a in history), plan_error, run.find_rollback_record_error())
    errors = [error for error in found if error is not None]
    return [error.removeprefix(f"{run.path}/") for error in errors]


def _oldest_rolled_back_step(log: Sequence[events.Event]) -> int | None:
    targets = [e.to_step for e in events.select(log, event_types.RolledBack)]
    damaged = [e.step for e in events.select(log, event_types.Restored) if e.skipped]
    return min((step for step in (*targets, *damaged) if step is not None), default=None)


def _list_committed_steps(log: Sequence[events.Event]) -> list[int]:
    """Return the committed steps that still count: a rollback removes newer ones."""
    steps: list[int] = []
    for event in log:
        if event["event"] == "checkpoint":
            steps.append(int(event["step"]))
        elif event["event"] == "rolled_back" and "to_step" in event:
            steps = [s for s in steps if s <= event["to_step"]]
    return steps


def load_attempts(run: RunDir) -> list[Attempt]:
    """Load all attempts, oldest first."""
    history = _add_unreported_commits([load_attempt(run, a) for a in run.attempts()], _find_newest_committed(run))
    return _add_earlier_steps(_add_late_checkpoints(history))


def _find_newest_committed(run: RunDir) -> int | None:
    try:
        return max(run.committed_steps(), default=None)
    except OSError:  # the events are the main source; the folder only adds to them
        return None


def _add_unreported_commits(history: list[Attempt], newest: int | None) -> list[Attempt]:
    """Add commits without an event, which a process killed just after the commit cannot write.

    The step that a later attempt restored, or the ``newest`` one in the folder, belongs to the last attempt that
    started before that step, unless an earlier attempt reported it and it has not been rolled back since.
    """
    reported = [0]  # by attempt, the newest step that earlier attempts reported
    for attempt in history:
        if attempt.rolled_back_to is not None:
            reported[-1] = min(reported[-1], attempt.rolled_back_to)
        reported.append(max(reported[-1], attempt.committed_step or 0))
    for i, attempt in reversed(list(enumerate(history))):
        if attempt.first_step is None:
            newest = newest if attempt.restored_step is None else attempt.restored_step
            continue
        if newest is not None and newest >= attempt.first_step and newest > reported[i]:
            history[i] = msgspec.structs.replace(
                attempt,
                committed_step=max(newest, attempt.committed_step or 0),
                last_step=max(newest, attempt.last_step or 0),
            )
        newest = attempt.restored_step
    return history


def _add_late_checkpoints(history: list[Attempt]) -> list[Attempt]:
    """Add checkpoints of commands that only the next attempt has found, because the batch process was killed."""
    for i, (attempt, following) in enumerate(pairwise(history)):
        if attempt.checkpoint_times and following.checkpoint_times:
            is_late = following.checkpoint_times[0] > attempt.checkpoint_times[1]
            history[i] = msgspec.structs.replace(attempt, saved_checkpoint=attempt.saved_checkpoint or is_late)
    return history


def _add_earlier_steps(history: list[Attempt]) -> list[Attempt]:
    newest = 0
    for i, attempt in enumerate(history):
        if attempt.rolled_back_to is not None:
            newest = min(newest, attempt.rolled_back_to)
        history[i] = msgspec.structs.replace(attempt, earlier_step=newest)
        newest = max(newest, attempt.committed_step or 0)
    return history


def load_budgeted_attempts(run: RunDir) -> list[Attempt]:
    """Load the attempts that count against the retry budgets: those since the owner last continued the run."""
    continued = events.select_last(events.for_run(run), event_types.Continued)
    start = continued.t if continued else 0.0
    return [a for a in load_attempts(run) if a.start is None or a.start >= start]


def load_submit_options(run: RunDir) -> dict[str, str]:
    """Return the sbatch options of earlier submissions that the next one must repeat.

    These are the latest value of each option of ``clustertrain requeue``, and all excluded nodes.
    """
    log = events.for_run(run)
    for attempt in run.attempts():
        log += list(events.filter_by_name(events.for_attempt(attempt), "requeued"))
    options: dict[str, str] = {}
    excluded: dict[str, None] = {}
    for event in sorted(log, key=lambda e: float(e["t"])):
        options.update({k: v for k, v in (event.get("options") or {}).items() if k != "exclude"})
        exclude = (event.get("options") or {}).get("exclude")  # a Slurm hostlist, kept as it is
        excluded.update(dict.fromkeys([*([exclude] if exclude else []), *(event.get("exclude") or ())]))
    if excluded:
        options["exclude"] = ",".join(excluded)
    return options


def list_job_ids(run: RunDir, history: Sequence[Attempt] | None = None) -> list[str]:
    """Return all job ids of the run, the one mentioned last at the end."""
    mentions = [(float(e["t"]), str(e["job_id"])) for e in events.for_run(run) if e.get("job_id")]
    for attempt in history if history is not None else load_attempts(run):
        mentions.append((attempt.start or 0.0, attempt.job_id))
        requeued = events.filter_by_name(events.for_attempt(run.attempt(attempt.n)), "requeued")
        mentions += [(float(e["t"]), str(e["job_id"])) for e in requeued if e.get("job_id")]
    newest_first = dict.fromkeys(job_id for _, job_id in sorted(mentions, reverse=True) if job_id)
    return list(reversed(newest_first))
