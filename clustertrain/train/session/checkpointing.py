"""When and why a session saves, restores and rolls back, and the events that it emits for this.

:class:`~clustertrain.checkpoint.manager.CheckpointManager` does the work.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clustertrain import clock
from clustertrain.checkpoint.core.failures import DeadlineExceeded
from clustertrain.checkpoint.core.interval import CheckpointInterval
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format.manifest import CheckpointMetric, SaveReason
from clustertrain.checkpoint.load import restore
from clustertrain.checkpoint.load.restore import CheckpointOrigin, RestoreResult
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.manager import CheckpointManager, SaveResult
from clustertrain.checkpoint.save.writer_jobs import JobOutcome
from clustertrain.errors import Diverged, UsageError
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.result import RankResultWriter
from clustertrain.train.core.stop import StopAgreement
from clustertrain.train.core.time_left import DeadlineTracker
from clustertrain.train.data.loader import Loader
from clustertrain.train.data.streams.loader import StreamLoader
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.session import checkpointing_config, resume_check
from clustertrain.train.stability.divergence import Rollback

log = logging.getLogger(__name__)

MIN_REPORTED_CHANGE = 0.1  # relative change of the interval that is worth an event
MAX_CLOSE_WAIT_S = 20.0  # for a pending save when the rank fails


class SessionCheckpointer:
    """The checkpoints of a session. Outside a run, ``is_enabled`` is False unless the script names a folder.

    Methods are collective, except :meth:`is_due`, :meth:`is_overdue`, :meth:`has_failed_save`,
    :meth:`report_abandoned_save` and :meth:`close`.
    """

    def __init__(
        self,
        context: RankContext,
        groups: ProcessGroups,
        folder: Path | None,
        num_threads: int,
        result: RankResultWriter,
        emit_event: Callable[..., None],
        get_deadline: Callable[[], float | None],
    ) -> None:
        """``get_deadline`` returns when the process must have ended (UTC epoch s), or None while this is unknown."""
        self._context = context
        self._ranks_group = groups.checkpoint
        self._folder = folder or (context.run.checkpoints if context.run else None)
        self._num_threads = num_threads
        self._result = result
        self._emit_event = emit_event
        self._deadline_tracker = DeadlineTracker(get_deadline)
        self._save_started_at: dict[int, float] = {}  # by step, UTC epoch s
        self._interval: CheckpointInterval | None = None
        self._save_requested = False
        self._about: dict[str, Any] = {}
        self.adapter: dict[str, Any] | None = None
        """Settings and base of the model's adapters, which the checkpoints record; None without adapters."""
        self._policy = RetentionPolicy()
        self._early_stopping: EarlyStopping | None = None  # set if the best checkpoint by its metric is kept
        self._manager: CheckpointManager | None = None

    @property
    def is_enabled(self) -> bool:
        return self._manager is not None

    @property
    def keeps_best(self) -> bool:
        """Whether a step is saved because its evaluation is the best so far."""
        return self._early_stopping is not None

    def open(
        self, total: int, every: int | str | None, keep: int | None, early_stopping: EarlyStopping | None = None
    ) -> None:
        """Open the checkpoints for a loop that ends at step ``total``.

        Args:
            every: the interval, as in the recipe; None saves only at the end.
            keep: how many of the newest to keep; None: the recipe's value. Everything else comes from the recipe.
            early_stopping: defines which checkpoints are best if the recipe does not.

        Raises:
            UsageError: in a run, if an earlier loop ends at this step or later.
        """
        if self._context.run is not None:
            self._result.begin_loop(total)
        if self._folder is None:
            return
        if self._manager is not None:  # from an earlier loop of this session
            self._manager.wait_for_saves()
            self._manager.close()
        self._interval = checkpointing_config.build_interval(self._context, every) if every is not None else None
        config = checkpointing_config.build_config(self._context, keep, early_stopping)
        self._about, self._policy = dict(config.about), config.policy
        if self.adapter is not None:
            self._about["adapter"] = self.adapter
        config = replace(config, about=self._about)
        is_best_kept = early_stopping is not None and config.policy.best == early_stopping.metric
        self._early_stopping = early_stopping if is_best_kept else None
        self._manager = CheckpointManager(
            self._folder,
            Ranks(self._ranks_group),
            config,
            get_save_deadline=self._deadline_tracker.save_deadline,
            on_commit=self._on_commit,
            on_copy=self._on_copy,
        )
        self._manager.start()

    # -- restore and roll back

    def has_committed(self) -> bool:
        """Return whether the run has a committed checkpoint, as far as rank 0 sees before :meth:`open`. Collective."""
        folder = self._folder
        has_any: bool = Ranks(self._ranks_group).run_on_rank0(
            lambda: folder is not None and checkpointing_config.has_committed(self._context, folder),
            f"{folder}: the checkpoints cannot be listed",
        )
        return has_any

    def restore(self, state: dict[str, Any], seed: int) -> int:
        """Load the newest valid checkpoint into ``state`` and return its step, or 0 without one.

        Raises:
            UsageError: an earlier loop of this run has already passed that step.
        """
        t_begin = clock.now()
        restored = self._manager.restore(state, self._check_origin) if self._manager is not None else None
        step = restored.step if restored else 0
        if self._context.run is not None and step < self._result.step:
            raise UsageError(
                f"session.steps: would start at step {step}, but {self._result.step} steps of the run are done",
                fix="use the same checkpoint_dir in all sessions of a run, and let each loop run to its end: it then "
                "saves",
            )
        if restored is not None:
            self._result.step = self._result.committed_step = step
            self._emit_event(
                "restored",
                step=step,
                path=str(restored.path),
                t_begin=t_begin,
                restore_s=restored.restore_s,
                skipped=restored.skipped,
                **({} if restored.from_local is None else {"from_local": restored.from_local}),
            )
        self._adopt(restored, state, seed, step)
        self._report_interval()
        return step

    def roll_back(self, state: dict[str, Any], seed: int, rollback: Rollback, target: RollbackTarget) -> int:
        """Load a checkpoint from before the divergence into ``state``, exclude its samples, and return the step.

        Raises:
            Diverged: on all ranks, if the run has rolled back too often or no checkpoint is old enough.
        """
        t_begin = clock.now()
        restored = self._settled_manager(rollback).roll_back(state, target)
        if restored is None:
            raise Diverged(f"{rollback.reason}: there is no checkpoint of step {target.max_step} or earlier")
        step = self._result.committed_step = restored.step
        self._save_requested = False
        self._adopt(restored, state, seed, step)
        self._report_rollback(t_begin, rollback, target, step)
        return step

    def record_rollback(self, rollback: Rollback, target: RollbackTarget) -> None:
        """Record a rollback for the next attempt to carry out, since this attempt ends.

        Raises:
            DeadlineExceeded: on all ranks, if the process must end first. The next attempt then detects the
                divergence itself.
            Diverged: as in :meth:`roll_back`.
        """
        t_begin = clock.now()
        context = self._settled_manager(rollback).restore_context
        step = self._result.committed_step = restore.invalidate(context, target)
        self._report_rollback(t_begin, rollback, target, step)

    def _settled_manager(self, rollback: Rollback) -> CheckpointManager:
        """Wait for pending saves, since a rollback would miss a checkpoint committed later, and return the manager."""
        if self._manager is None:
            raise Diverged(
                f"{rollback.reason}: there are no checkpoints to roll back to", fix="pass checkpoint_dir to session()"
            )
        self._manager.wait_for_saves()
        return self._manager

    def _adopt(self, restored: RestoreResult | None, state: Mapping[str, Any], seed: int, step: int) -> None:
        """Continue from ``restored``: set the best step, random states, excluded samples and the timer of saves."""
        if restored is not None:
            self._check_best_exists()
            for name, loader in _stream_parts(state):
                loader.load_rank_state((restored.rank_state or {}).get("streams", {}).get(name))
        if restored is not None and restored.rank_state is not None:
            self._num_threads = restored.rank_state["threads"]
            torch.set_num_threads(self._num_threads)
            seeds.restore_rng_state(restored.rank_state["random"], self._context.device)
        else:
            seeds.seed_everything(seeds.derive_seed(seed, "rank", step, self._context.rank))
        if self._manager is not None:  # an older checkpoint does not have the exclusions of later rollbacks
            for name, ranges in restore.excluded_ranges(self._manager.restore_context).items():
                if isinstance(state.get(name), Loader):
                    state[name].exclude(ranges)
        if self._interval is not None:
            self._interval.restart_timer()

    def _check_best_exists(self) -> None:
        """Forget the best step if its checkpoint was deleted in favor of a better one that was rolled back later."""
        early_stopping = self._early_stopping
        if self._manager is None or early_stopping is None or early_stopping.best_step is None:
            return
        lost_step = early_stopping.best_step
        remaining_values = restore.metric_values_if_missing(
            self._manager.restore_context, lost_step, early_stopping.metric
        )
        if remaining_values is None:
            return
        early_stopping.forget_best(remaining_values)
        if self._context.rank == 0:
            new_best = (
                "that of the next evaluation"
                if early_stopping.best_step is None
                else f"that of step {early_stopping.best_step}"
            )
            log.warning("the best checkpoint, of step %d, no longer exists; the best is now %s", lost_step, new_best)

    def _check_origin(self, origin: CheckpointOrigin) -> None:
        resume_check.check_origin(origin, self._context, self._about, Ranks(self._ranks_group))
        before = origin.about.get("adapter")
        if self.adapter is not None and isinstance(before, dict):
            # What the first attempt started from, whatever is there now.
            self.adapter.update({key: before[key] for key in ("base", "base_sha256") if key in before})

    def _report_rollback(self, t_begin: float, rollback: Rollback, target: RollbackTarget, step: int) -> None:
        self._emit_event(
            "rolled_back",
            t_begin=t_begin,
            step=rollback.last_step,
            to_step=step,
            reason=rollback.reason,
            samples=sum(end - first for ranges in target.excluded.values() for first, end in ranges),
            restore_s=clock.now() - t_begin,
        )
        log.warning("%s: rolled back to step %d, excluding that data", rollback.reason, step)

    # -- save

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocate memory for the first save, in the background. Call this once the optimizer has its state."""
        if self._manager is not None and self._interval is not None:
            self._manager.reserve(state, self._rank_state(state))

    def is_due(self, step: int) -> bool:
        """Return whether a save is due by the step number, which all ranks know."""
        return self._interval is not None and self._interval.is_due_at(step)

    def is_overdue(self) -> bool:
        """Return whether a save is due by rank 0's clock; true once per save, since the ranks take a step to agree."""
        if self._interval is None or self._context.rank != 0 or self._save_requested or not self._interval.is_timed:
            return False
        self._save_requested = self._interval.is_overdue()
        return self._save_requested

    def save(self, step: int, state: dict[str, Any], reason: SaveReason, latest_metrics: Mapping[str, Any]) -> None:
        """Save ``state`` in the background; at a stop and at the end of the loop, wait for the commit.

        ``latest_metrics`` are the scalars that were logged most recently.

        Raises:
            DeadlineExceeded: on all ranks, if the process must end before the commit.
            StorageError, CheckpointError: on all ranks, if any rank could not save.
        """
        if self._manager is None:
            return
        rank_state, wait = self._rank_state(state), reason != "interval"
        if reason == "interval" and self._is_best_only(step):
            reason = "best"
        self._save_started_at[step] = clock.now()
        metric = self._checkpoint_metric(latest_metrics)
        self._manager.save(step, state, rank_state, reason=reason, metric=metric, wait=wait)
        if reason == "best":  # an extra save does not delay the regular ones
            return
        self._save_requested = False
        if self._interval is not None:
            self._interval.restart_timer()

    def _checkpoint_metric(self, latest_metrics: Mapping[str, Any]) -> CheckpointMetric | None:
        """Return the metric that decides which checkpoints are best, with the value None for NaN or Inf."""
        if not self._policy.best:
            return None
        value = latest_metrics.get(self._policy.best)
        finite_value = float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
        return CheckpointMetric(name=self._policy.best, value=finite_value, mode=self._policy.best_mode)

    def _is_best_only(self, step: int) -> bool:
        """Return whether ``step`` is saved only because its evaluation is the best.

        Correct only on rank 0, which commits and has the clock.
        """
        return (
            self._early_stopping is not None
            and self._early_stopping.best_step == step
            and not (self.is_due(step) or self._save_requested)
        )

    def _rank_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        rank_state = {"random": seeds.capture_rng_state(self._context.device), "threads": self._num_threads}
        streams = {name: loader.rank_state() for name, loader in _stream_parts(state)}
        return {**rank_state, "streams": streams} if streams else rank_state

    def has_failed_save(self) -> bool:
        """Return whether a save of this rank has failed, without waiting."""
        return self._manager is not None and self._manager.poll()

    def wait_for_saves(self) -> None:
        """Wait for the pending saves. Raises the same errors as :meth:`save`."""
        if self._manager is not None:
            self._manager.wait_for_saves()

    def is_too_late_to_save(self, agreement: StopAgreement) -> bool:
        """Return whether the pending saves and one more would miss the deadline; the same on all ranks."""
        num_pending = self._manager.num_pending if self._manager is not None else 0
        return self._deadline_tracker.is_too_late_to_save(agreement, 1 + num_pending)

    # -- events

    def report_abandoned_save(self, step: int, e: DeadlineExceeded) -> None:
        """Report that the save of ``step`` was abandoned at the deadline."""
        self._emit_event("save_abandoned", step=step, reason=e.message)
        log.warning("%s; the run continues from step %d", e.message, self._result.committed_step or 0)

    def _report_interval(self) -> None:
        if self._interval is not None and self._interval.is_timed:
            self._emit_event(
                "checkpoint_interval", seconds=self._interval.seconds, reason=self._interval.format_explanation()
            )

    def _on_commit(self, result: SaveResult) -> None:
        self._deadline_tracker.save_durations_s.append(result.save_s)
        self._result.committed_step = result.step
        self._emit_event(
            "checkpoint",
            step=result.step,
            t_begin=self._save_started_at.pop(result.step, clock.now() - result.save_s),
            save_s=result.save_s,
            stall_s=result.stall_s,
            bytes=result.bytes,
            written=result.written,
            reason=result.reason,
        )
        if self._interval is not None:
            previous_s = self._interval.seconds
            self._interval.record_save(result.stall_s, result.save_s)
            if previous_s and abs((self._interval.seconds or previous_s) / previous_s - 1) > MIN_REPORTED_CHANGE:
                self._report_interval()

    def _on_copy(self, outcome: JobOutcome) -> None:
        if outcome.failure is None:
            self._emit_event("copied", step=outcome.step, copy_s=outcome.seconds, bytes=outcome.bytes)
            return
        self._emit_event("copy_failed", step=outcome.step, reason=outcome.failure.message)
        log.warning("the checkpoint of step %d was not copied: %s", outcome.step, outcome.failure.message)

    # -- end

    def close(self) -> None:
        """Close the manager and its writer process.

        Wait for a pending save as long as one usually takes, but not for other ranks, which may be gone.
        """
        if self._manager is None:
            return
        completed = self._result.ending == "completed"
        if completed and not self._manager.wait_for_copies(lambda: not self._is_stop_requested()):
            reason = f"the run did not wait for it any longer; the checkpoint is in {self._folder}"
            self._emit_event("copy_failed", step=self._result.committed_step, reason=reason)
            log.warning("the last checkpoint was not copied: %s", reason)
        self._manager.close(
            min(MAX_CLOSE_WAIT_S, 2.0 + 3 * self._deadline_tracker.slowest_save_s), run_finished=completed
        )
        self._manager = None

    def _is_stop_requested(self) -> bool:
        return self._context.rank_dir is not None and (self._context.rank_dir / "stop").exists()


def _stream_parts(state: Mapping[str, Any]) -> Iterator[tuple[str, StreamLoader]]:
    """Yield the loaders in ``state`` of which each rank reads a part of a stream, with their names."""
    for name, value in state.items():
        if isinstance(value, StreamLoader) and value.source.is_sharded:
            yield name, value
