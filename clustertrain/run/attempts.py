"""What happened in each attempt, read from its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from clustertrain.run import events, json_files, metrics, safe_names
from clustertrain.run.run_dir import AttemptDir, RunDir


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the run. ``ending`` is None while nobody has written one."""

    n: int
    job_id: str
    restart: int
    nodes: tuple[str, ...]
    host: str
    start: float | None
    end: float | None
    ending: str | None
    reason: str | None
    first_step: int | None  # the step it started from
    last_step: int | None  # the newest step that it is known to have done
    restored_step: int | None
    committed_step: int | None  # the newest that this attempt committed
    requeued: str | None  # how: requeue, resubmit, slurm
    stopped: str | None  # why the run will not be continued
    trouble: str | None = None  # what of its attempt.json does not read, and was left out
    roll_backs: int = 0  # how often it went back to an earlier checkpoint because training went wrong
    by_script: bool = False  # it stopped because its script exited with 0 by itself: only that knows what it has saved
    back_to: int | None = None  # the oldest step that it went back to, or restored because newer ones were damaged

    @property
    def progressed(self) -> bool:
        """It committed a step that was not there before."""
        return self.committed_step is not None and self.committed_step > (self.restored_step or 0)


_RECORD = {"job_id": str, "restart": float, "nodes": list, "host": str, "t": float}


def _number(event: events.Event | None, key: str) -> Any:
    return event.get(key) if event else None


def _known(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def read_one(run: RunDir, attempt: AttemptDir) -> Attempt:
    log = events.of_attempt(attempt)
    record, trouble = json_files.read(attempt.record, _RECORD)
    if (odd := safe_names.clean(record)) and trouble is None:
        trouble = f"{attempt.record}: not what it should be: {', '.join(odd)}"
    started, ended = events.last(log, "started"), events.last(log, "ended")
    first = next(events.named(log, "first_step"), None)
    # Not those of a script's later loops, which take up what an earlier one of the same attempt has left.
    before = log if first is None else [e for e in log if e["t"] <= first["t"]]
    restored = events.last(before, "restored")
    checkpoints = _checkpoints(log)
    rows = metrics.newest_row(run, attempt.n)
    last = _number(ended, "last_step")
    if first is None and restored is None:
        last = last or None  # 0: of a rank that has reported no step
    steps = [s for s in (last, _number(rows, "step"), *checkpoints) if s is not None]
    return Attempt(
        n=attempt.n,
        job_id=record.get("job_id", ""),
        restart=int(record.get("restart", 0)),
        nodes=tuple(record.get("nodes", ())),
        host=record.get("host", ""),
        start=_known(_number(started, "t"), began if events.is_time(began := record.get("t")) else None),
        end=_known(_number(ended, "at"), _number(ended, "t")),
        ending=_number(ended, "ending"),
        reason=_number(ended, "reason"),
        first_step=_number(first, "step"),
        last_step=max(steps, default=None),
        restored_step=_number(restored, "step"),
        committed_step=max(checkpoints, default=None),
        requeued=_number(events.last(log, "requeued"), "how"),
        stopped=_number(events.last(log, "stopped"), "why"),
        trouble=trouble,
        roll_backs=len(list(events.named(log, "rolled_back"))),
        by_script=_number(ended, "by_script") is True,
        back_to=_back_to(log),
    )


def troubles(run: RunDir, history: Sequence[Attempt]) -> list[str]:
    """What of the attempts' records and of the plan does not read, with paths within the run's folder."""
    try:
        plan = json_files.read(run.plan).trouble
    except PermissionError:
        plan = f"{run.plan}: you may not read it"
    found = [words for words in (*(a.trouble for a in history), plan) if words is not None]
    return [words.removeprefix(f"{run.path}/") for words in found]


def _back_to(log: Sequence[events.Event]) -> int | None:
    back = [e.get("to_step") for e in events.named(log, "rolled_back")]
    damaged = [e.get("step") for e in events.named(log, "restored") if e.get("skipped")]
    return min((int(step) for step in (*back, *damaged) if step is not None), default=None)


def _checkpoints(log: Sequence[events.Event]) -> list[int]:
    """The steps that were committed and still count: going back takes away those that are newer."""
    steps: list[int] = []
    for event in log:
        if event["event"] == "checkpoint":
            steps.append(int(event["step"]))
        elif event["event"] == "rolled_back" and "to_step" in event:
            steps = [s for s in steps if s <= event["to_step"]]
    return steps


def read_all(run: RunDir) -> list[Attempt]:
    """All attempts, oldest first."""
    return _with_untold_commits([read_one(run, a) for a in run.attempts()], _newest_committed(run))


def _newest_committed(run: RunDir) -> int | None:
    try:
        return max(run.committed_steps(), default=None)
    except OSError:  # it would only have added to what the events tell
        return None


def _with_untold_commits(history: list[Attempt], newest: int | None) -> list[Attempt]:
    """Whoever is killed just after a commit cannot tell of it, and the commit counts all the same. What a later attempt
    has restored, or ``newest`` of what is there now, is of the last attempt that had begun before that step, unless an
    earlier one has told of it, and it has counted since."""
    told = [0]  # by attempt, the newest step that those before it have told of
    for attempt in history:
        if attempt.back_to is not None:
            told[-1] = min(told[-1], attempt.back_to)
        told.append(max(told[-1], attempt.committed_step or 0))
    for i, attempt in reversed(list(enumerate(history))):
        if attempt.first_step is None:
            newest = newest if attempt.restored_step is None else attempt.restored_step
            continue
        if newest is not None and newest >= attempt.first_step and newest > told[i]:
            history[i] = msgspec.structs.replace(
                attempt,
                committed_step=max(newest, attempt.committed_step or 0),
                last_step=max(newest, attempt.last_step or 0),
            )
        newest = attempt.restored_step
    return history


def charged(run: RunDir) -> list[Attempt]:
    """The attempts that count against the budgets: those since the owner last continued the run by hand."""
    continued = events.last(events.of_run(run), "continued")
    since = float(continued["t"]) if continued else 0.0
    return [a for a in read_all(run) if a.start is None or a.start >= since]


def carried_options(run: RunDir) -> dict[str, str]:
    """What earlier submissions of the run were given besides job.sh, which the next one must not forget: the options of
    ``clustertrain requeue``, the latest of each, and all nodes that were left out."""
    log = events.of_run(run)
    for attempt in run.attempts():
        log += list(events.named(events.of_attempt(attempt), "requeued"))
    options: dict[str, str] = {}
    excluded: dict[str, None] = {}
    for event in sorted(log, key=lambda e: float(e["t"])):
        options.update({k: v for k, v in (event.get("options") or {}).items() if k != "exclude"})
        given = (event.get("options") or {}).get("exclude")  # a list of Slurm's, kept as it is
        excluded.update(dict.fromkeys([*([given] if given else []), *(event.get("exclude") or ())]))
    if excluded:
        options["exclude"] = ",".join(excluded)
    return options


def job_ids(run: RunDir, history: Sequence[Attempt] | None = None) -> list[str]:
    """All job ids that the run has held, the one mentioned last at the end."""
    mentions = [(float(e["t"]), str(e["job_id"])) for e in events.of_run(run) if e.get("job_id")]
    for attempt in history if history is not None else read_all(run):
        mentions.append((attempt.start or 0.0, attempt.job_id))
        requeued = events.named(events.of_attempt(run.attempt(attempt.n)), "requeued")
        mentions += [(float(e["t"]), str(e["job_id"])) for e in requeued if e.get("job_id")]
    newest_first = dict.fromkeys(job_id for _, job_id in sorted(mentions, reverse=True) if job_id)
    return list(reversed(newest_first))
