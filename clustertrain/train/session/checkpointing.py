"""A session's checkpoints: restored before the first step, saved on the way, given up where the kill comes first."""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

import clustertrain
from clustertrain import clock, fsio, settings
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.core.failures import DeadlineExceeded
from clustertrain.checkpoint.core.interval import CheckpointInterval, FailureHistory, count_failures
from clustertrain.checkpoint.core.retention import RetentionPolicy
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.manifest import CheckpointMetric, SaveReason
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.checkpoint.manager import CheckpointManager, CheckpointOrigin, RestoreResult, SaveResult
from clustertrain.checkpoint.save.writer_client import JobOutcome
from clustertrain.config.checkpoint import AUTO
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError, Diverged, UsageError
from clustertrain.run import attempts
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.result import RankResult
from clustertrain.train.core.stop import StopAgreement
from clustertrain.train.core.time_left import DeadlineTracker
from clustertrain.train.data.loader import Loader
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.evaluation.best_metric import EarlyStopping
from clustertrain.train.session import checkpointing_config, resume_check
from clustertrain.train.stability.divergence import Rollback

log = logging.getLogger(__name__)

MIN_REPORTED_CHANGE = 0.1  # a change of the interval by less is not worth an event
MAX_CLOSE_WAIT_S = 20.0  # for a save under way when the rank fails; torchrun kills it 30 s after


class SessionCheckpointer:
    """``is_enabled`` says whether there is a folder for checkpoints at all: outside a run only where the script names
    one."""

    def __init__(
        self,
        context: RankContext,
        groups: ProcessGroups,
        folder: Path | None,
        num_threads: int,
        result: RankResult,
        emit_event: Callable[..., None],
        get_deadline: Callable[[], float | None],
    ) -> None:
        """``get_deadline`` says by when the process must have ended (UTC epoch s), once somebody has said so."""
        self._context = context
        self._groups = groups
        self._folder = folder or (context.run.checkpoints if context.run else None)
        self._num_threads = num_threads
        self._result = result
        self._emit_event = emit_event
        self._deadline_tracker = DeadlineTracker(get_deadline)
        self._save_started_at: dict[int, float] = {}  # by step when its save began, UTC epoch s
        self._interval: CheckpointInterval | None = None
        self._save_requested = False
        self._about: dict[str, Any] = {}
        self._policy = RetentionPolicy()
        self._early_stopping: EarlyStopping | None = None  # where the best by it is kept
        self._manager: CheckpointManager | None = None

    @property
    def is_enabled(self) -> bool:
        return self._manager is not None

    @property
    def keeps_best(self) -> bool:
        """Whether a checkpoint is worth making for what it was measured at alone."""
        return self._early_stopping is not None

    def open(
        self, total: int, every: int | str | None, keep: int | None, early_stopping: EarlyStopping | None = None
    ) -> None:
        """For a loop that ends at step ``total``. From now on save ``every`` so often (None: only at the end) and keep
        the ``keep`` newest (None: as many as the recipe says). The recipe's table has the last word on everything else;
        where it is silent, the best one by ``early_stopping`` is kept.

        Raises:
            UsageError: in a run, a loop before this one counts as far.
        """
        if self._context.run is not None:
            self._result.begin_loop(total)
        if self._folder is None:
            return
        if self._manager is not None:  # of an earlier loop of the same session
            self._manager.wait_for_saves()
            self._manager.close()
        context = self._context
        checkpoint_spec = checkpointing_config.get_checkpoint_spec(context)
        self._interval = self._build_interval(every, checkpoint_spec.keep_every) if every is not None else None
        self._about = build_about(context)
        self._policy = policy = checkpointing_config.build_policy(context, keep, early_stopping)
        self._early_stopping = (
            early_stopping if early_stopping is not None and policy.best == early_stopping.metric else None
        )
        self._manager = CheckpointManager(
            self._folder,
            Ranks(self._groups.checkpoint),
            attempt=str(context.attempt.n) if context.attempt else "local",
            layout={f: getattr(context.layout, f) for f in context.layout.__struct_fields__},
            policy=policy,
            engine=checkpoint_spec.engine,
            background=checkpoint_spec.background,
            device=context.device,
            # The local backend's nodes are all on this machine.
            local_world_size=context.world_size if settings.LOCAL_JOB in os.environ else context.local_world_size,
            about=self._about,
            local=checkpointing_config.build_local_tier(context),
            remote=checkpointing_config.build_remote_tier(context, policy),
            fence=_build_fence(context),
            get_deadline=self._deadline_tracker.save_deadline,
            on_commit=self._on_commit,
            on_copy=self._on_copy,
        )
        self._manager.start()

    def _build_interval(self, every: int | str, milestone: int) -> CheckpointInterval:
        failures = FailureHistory()
        run = self._context.run
        if every == AUTO and run is not None and self._context.rank == 0:
            nodes = self._context.world_size // self._context.local_world_size
            failures = count_failures(attempts.load_attempts(run)[:-1], max(1, nodes))  # the last one is this
        return CheckpointInterval(every, milestone=milestone, history=failures)

    def _on_copy(self, outcome: JobOutcome) -> None:
        if outcome.trouble is None:
            self._emit_event("copied", step=outcome.step, copy_s=outcome.seconds, bytes=outcome.bytes)
            return
        self._emit_event("copy_failed", step=outcome.step, why=outcome.trouble.why)
        log.warning("the checkpoint of step %d is not copied: %s", outcome.step, outcome.trouble.why)

    def restore(self, state: dict[str, Any], seed: int) -> int:
        """Fill ``state`` from the newest checkpoint that verifies; returns its step, 0 where there is none.

        Raises:
            UsageError: loops before this one have done more steps of the run.
        """
        t_begin = clock.now()
        restored = self._manager.restore(state, self._check_origin) if self._manager is not None else None
        step = restored.step if restored else 0
        if self._context.run is not None and step < self._result.step:
            raise UsageError(
                f"session.steps: would begin at step {step}, and {self._result.step} steps of the run are done",
                fix="give all sessions of a run the same checkpoint_dir, and let a loop end by itself: it then saves",
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
            self._check_best_exists()
        self._restore_rng_state(restored, seed, step)
        self._exclude_samples(state)
        if self._interval is not None:
            self._interval.restart_timer()
            self._report_interval()
        return step

    def roll_back(self, state: dict[str, Any], seed: int, rollback: Rollback, target: RollbackTarget) -> int:
        """Collective: fill ``state`` from a checkpoint before what went wrong, without the samples of that; returns its
        step.

        Raises:
            Diverged: on all ranks, where that was done too often, or there is no such checkpoint.
        """
        t_begin = clock.now()
        manager = self._wait_for_manager(rollback)
        restored = manager.roll_back(state, target)
        if restored is None:
            raise Diverged(f"{rollback.reason}: no checkpoint of step {target.max_step} or before is left")
        step = self._result.committed_step = restored.step
        self._check_best_exists()
        self._restore_rng_state(restored, seed, step)
        self._exclude_samples(state)
        self._save_requested = False
        if self._interval is not None:
            self._interval.restart_timer()
        self._report_rollback(t_begin, rollback, target, step)
        return step

    def record_rollback(self, rollback: Rollback, target: RollbackTarget) -> None:
        """Collective, for ranks that leave: write down that the run goes back, so that the next attempt begins there.

        Raises:
            DeadlineExceeded: the process must end before that, on all ranks. The next attempt finds out by itself.
            Diverged: as :meth:`roll_back`.
        """
        t_begin = clock.now()
        step = self._result.committed_step = self._wait_for_manager(rollback).invalidate(target)
        self._report_rollback(t_begin, rollback, target, step)

    def _wait_for_manager(self, rollback: Rollback) -> CheckpointManager:
        """A checkpoint that is committed later the record of the way back would not know."""
        if self._manager is None:
            raise Diverged(
                f"{rollback.reason}: there are no checkpoints to go back to", fix="give session() a checkpoint_dir"
            )
        self._manager.wait_for_saves()
        return self._manager

    def _report_rollback(self, t_begin: float, rollback: Rollback, target: RollbackTarget, step: int) -> None:
        self._emit_event(
            "rolled_back",
            t_begin=t_begin,
            step=rollback.last_step,
            to_step=step,
            why=rollback.reason,
            samples=sum(end - first for ranges in target.excluded.values() for first, end in ranges),
            restore_s=clock.now() - t_begin,
        )
        log.warning("%s: back to step %d, without that data", rollback.reason, step)

    def _check_best_exists(self) -> None:
        """The checkpoint of what was best may be gone: it went when a better one came, to which the run did not come
        back."""
        early_stopping = self._early_stopping
        if self._manager is None or early_stopping is None or early_stopping.best_step is None:
            return
        lost_step, remaining = (
            early_stopping.best_step,
            self._manager.metric_values_if_missing(early_stopping.best_step, early_stopping.metric),
        )
        if remaining is None:
            return
        early_stopping.forget_best(remaining)
        if self._context.rank == 0:
            new_best = (
                "the next evaluation's"
                if early_stopping.best_step is None
                else f"that of step {early_stopping.best_step}"
            )
            log.warning(
                "the best checkpoint, of step %d, is not there any more; the best is now %s", lost_step, new_best
            )

    def _restore_rng_state(self, restored: RestoreResult | None, seed: int, step: int) -> None:
        if restored is not None and restored.rank_state is not None:
            self._num_threads = restored.rank_state["threads"]
            torch.set_num_threads(self._num_threads)
            seeds.restore_rng_state(restored.rank_state["random"], self._context.device)
        else:
            seeds.seed_everything(seeds.derive_seed(seed, "rank", step, self._context.rank))

    def _exclude_samples(self, state: Mapping[str, Any]) -> None:
        """A checkpoint from before a roll-back does not know of it."""
        if self._manager is None:
            return
        for name, ranges in self._manager.excluded_ranges().items():
            if isinstance(state.get(name), Loader):
                state[name].leave_out(ranges)

    def _check_origin(self, origin: CheckpointOrigin) -> None:
        """Whether to go on from a checkpoint that was made like that, as the contract says. Collective: nodes need not
        be like each other.

        Raises:
            ConfigError: on all ranks; only under the same circumstances, and they are others on one of them.
        """
        own_differences = resume_check.find_differences(origin, self._context, self._about)
        gathered = Ranks(self._groups.checkpoint).all_gather_optional(
            (self._context.node, own_differences) if own_differences else None
        )
        differences = resume_check.merge_differences(gathered)
        if not differences:
            return
        if _is_exact_resume(self._context):
            raise ConfigError(
                f"contract.resume = 'exact', and this is not how the checkpoint was made: {'; '.join(differences)}",
                fix="start it as it was, or begin a new run with contract.resume = 'elastic'",
            )
        if self._context.rank == 0:
            log.warning("the run goes on under other circumstances: %s", "; ".join(differences))

    def reserve(self, state: dict[str, Any]) -> None:
        """Collective, after the first step, when the optimizer has its state: make room for the first save on the
        way."""
        if self._manager is not None and self._interval is not None:
            self._manager.reserve(state, self._rank_state())

    def is_due(self, step: int) -> bool:
        """Whether a save is due because of the step's number, which all ranks know."""
        return self._interval is not None and self._interval.is_due_at(step)

    def is_overdue(self) -> bool:
        """Whether rank 0's clock says that a save is due; said once for each, since it takes a step to be heard."""
        if self._interval is None or self._context.rank != 0 or self._save_requested or not self._interval.is_timed:
            return False
        self._save_requested = self._interval.is_overdue()
        return self._save_requested

    def save(
        self,
        step: int,
        state: dict[str, Any],
        reason: SaveReason,
        latest_metrics: Mapping[str, Any],
    ) -> None:
        """Collective. On the way in the background; at a stop and at the end until it is committed. ``latest_metrics``
        are the scalars that were logged last.

        Raises:
            DeadlineExceeded: the process must end before that, on all ranks.
            StorageError, CheckpointError: on all ranks, for what any could not save.
        """
        if self._manager is None:
            return
        metric = None
        if self._policy.best:
            value = latest_metrics.get(self._policy.best)
            is_finite = isinstance(value, (int, float)) and math.isfinite(value)
            metric_value = float(value) if is_finite else None  # type: ignore[arg-type]
            metric = CheckpointMetric(name=self._policy.best, value=metric_value, mode=self._policy.best_mode)
        rank_state, wait = self._rank_state(), reason != "interval"
        if reason == "interval" and self._is_best_only(step):
            reason = "best"
        self._save_started_at[step] = clock.now()
        self._manager.save(step, state, rank_state, reason=reason, metric=metric, wait=wait)
        if reason == "best":  # the regular ones come as they would without
            return
        self._save_requested = False
        if self._interval is not None:
            self._interval.restart_timer()

    def _is_best_only(self, step: int) -> bool:
        """Rank 0, which commits, knows; the others do not know whether a clock has asked."""
        return (
            self._early_stopping is not None
            and self._early_stopping.best_step == step
            and not (self.is_due(step) or self._save_requested)
        )

    def _rank_state(self) -> dict[str, Any]:
        return {"random": seeds.capture_rng_state(self._context.device), "threads": self._num_threads}

    def _report_interval(self) -> None:
        if self._interval is not None and self._interval.is_timed:
            self._emit_event(
                "checkpoint_interval", seconds=self._interval.seconds, why=self._interval.format_explanation()
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
            reason=result.reason,
        )
        if self._interval is not None:
            previous_s = self._interval.seconds
            self._interval.record_save(result.stall_s, result.save_s)
            if previous_s and abs((self._interval.seconds or previous_s) / previous_s - 1) > MIN_REPORTED_CHANGE:
                self._report_interval()

    def has_failed_save(self) -> bool:
        """Whether a save of this rank's has failed since. Looks at what the writing process has said, and does not
        wait."""
        return self._manager is not None and self._manager.poll()

    def wait_for_saves(self) -> None:
        """Collective: wait for the saves under way. Raises as :meth:`save`."""
        if self._manager is not None:
            self._manager.wait_for_saves()

    def is_too_late_to_save(self, agreement: StopAgreement) -> bool:
        """Whether it is too late for a save after what is still under way, on all ranks alike. Collective."""
        return self._deadline_tracker.is_too_late_to_save(
            agreement, 1 + (self._manager.num_pending if self._manager is not None else 0)
        )

    def report_abandoned_save(self, step: int, e: DeadlineExceeded) -> None:
        """Say that what should have been saved is not."""
        self._emit_event("save_given_up", step=step, why=e.message)
        log.warning("%s; the run goes on from step %d", e.message, self._result.committed_step or 0)

    def close(self) -> None:
        """Not collective: other ranks may be gone, so a save under way is waited for as long as one takes."""
        if self._manager is None:
            return
        completed = self._result.ending == "completed"
        if completed and not self._manager.wait_for_copies(lambda: not self._is_stop_requested()):
            reason = f"the run's end was not put off any longer for it; it is in {self._folder}"
            self._emit_event("copy_failed", step=self._result.committed_step, why=reason)
            log.warning("the last checkpoint is not copied: %s", reason)
        self._manager.close(
            min(MAX_CLOSE_WAIT_S, 2.0 + 3 * self._deadline_tracker.slowest_save_s), run_finished=completed
        )
        self._manager = None

    def _is_stop_requested(self) -> bool:
        return self._context.rank_dir is not None and (self._context.rank_dir / "stop").exists()


def _build_fence(context: RankContext) -> Fence | None:
    if context.run is None or context.attempt is None:
        return None
    return Fence(run=str(context.run.path), attempt=context.attempt.n)


def build_about(context: RankContext) -> dict[str, Any]:
    """What made a checkpoint. Checkpoints are copied and handed on, so no secret of the recipe's is in it."""
    spec, run = context.spec, context.run
    record = (fsio.read_json(run.record) or {}) if run is not None else {}
    return {
        "clustertrain": clustertrain.__version__,
        "python": platform.python_version(),
        "recipe": msgspec.to_builtins(_without_secrets(spec.recipe))
        if spec is not None and spec.script is None
        else None,
        "git": record.get("git"),
        # Read by one rank, and where it matters: it may be 100 MiB.
        "code": resume_check.checksum_files(run.code)
        if run is not None and context.rank == 0 and _is_exact_resume(context)
        else None,
        "precision": context.precision,
    }


def _is_exact_resume(context: RankContext) -> bool:
    return context.spec is not None and context.spec.recipe.contract.resume == "exact"


def _without_secrets(recipe: Recipe) -> Recipe:
    telemetry = msgspec.structs.replace(recipe.telemetry, alerts=recipe.telemetry.alerts.redacted())
    return msgspec.structs.replace(recipe, telemetry=telemetry)
