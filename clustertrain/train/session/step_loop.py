"""The step loop. Between two steps, all ranks stop, save, roll back or evaluate together, at the same step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from clustertrain import clock
from clustertrain.checkpoint.core.failures import DeadlineExceeded
from clustertrain.checkpoint.format.manifest import SaveReason
from clustertrain.checkpoint.load.rollback import RollbackTarget
from clustertrain.config.evaluation import VALIDATION_PREFIX
from clustertrain.run import heartbeat, metrics
from clustertrain.train.evaluation import logging as result_logging
from clustertrain.train.evaluation.schedule import EvaluationSchedule
from clustertrain.train.session import state_check
from clustertrain.train.session.runtime import SessionRuntime
from clustertrain.train.stability.divergence import Rollback
from clustertrain.train.stability.monitor import STATE_KEY
from clustertrain.train.stability.warnings import WARNING_EVENT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepDecision:
    """What all ranks do between two steps."""

    is_last: bool
    """No step follows."""
    should_stop: bool
    """The ranks leave here; the run continues in a later attempt."""
    is_late: bool
    """The ranks stop and there is no time for a save."""
    save_due: bool
    """A checkpoint is due."""
    has_failed_save: bool
    """A save has failed on some rank."""


class StepLoop:
    """One loop over the steps of a session."""

    def __init__(
        self, runtime: SessionRuntime, total: int, state: dict[str, Any], evaluations: EvaluationSchedule | None
    ) -> None:
        """``total`` counts the steps of the whole run. The loop adds entries to ``state``, which checkpoints hold."""
        self._runtime = runtime
        self._session_state = runtime.state
        self._total = total
        self._state = state
        self._evaluations = evaluations
        self._agreement, self._checkpointer = runtime.agreement, runtime.checkpointer
        self._metrics_processor = runtime.metrics_processor
        self._start_step = 0  # the step restored at the start or by the last rollback
        self._eval_caught_up = False  # a missed evaluation of that step was run; its checkpoint lacks the results

    def run(self, every: int | str | None, keep: int | None) -> Iterator[int]:
        """Yield the steps; ``every`` and ``keep`` are ``checkpoint_every`` and ``keep`` of ``Session.steps``."""
        self._prepare(every, keep)
        self._restore()
        while True:
            decision = self._decide()
            rollback = self._check_rollback(decision)
            if decision.should_stop:
                self._stop_and_exit(decision, rollback)
            if rollback is not None:
                self._roll_back(*rollback)
                continue
            self._save_if_due(decision)
            if decision.is_last:
                self._finish()
                return
            yield from self._run_step()

    @property
    def _step(self) -> int:
        return self._session_state.step

    # -- start and rollback

    def _prepare(self, every: int | str | None, keep: int | None) -> None:
        self._warn_of_incomplete_state()
        if self._runtime.loss_scale is not None:
            self._state["loss_scale"] = self._runtime.loss_scale
        monitor = self._runtime.metrics_processor.monitor
        if monitor is not None:
            self._state[STATE_KEY] = monitor
            monitor.track_loaders(self._state)
        if self._evaluations is not None:
            self._state["evaluations"] = self._evaluations
        early_stopping = self._evaluations.early_stopping if self._evaluations is not None else None
        self._checkpointer.open(self._total, every, keep, early_stopping)
        self._metrics_processor.begin_loop(self._total)

    def _warn_of_incomplete_state(self) -> None:
        warning = state_check.find_missing_scheduler(self._state)
        if warning is not None and self._runtime.context.rank == 0:
            self._runtime.events.emit(
                WARNING_EVENT, code=warning.code, step=None, text=warning.text, fix=warning.fix, value=None, limit=None
            )
            log.warning("%s\n  fix: %s", warning.text, warning.fix)

    def _restore(self) -> None:
        with self._runtime.progress.in_phase(heartbeat.RESTORE):
            self._start_step = self._session_state.step = self._checkpointer.restore(self._state, self._runtime.seed)
            if self._start_step == 0 and self._session_state.load_initial_weights is not None:
                self._session_state.load_initial_weights()
            self._session_state.load_initial_weights = None
        if self._start_step == 0 and self._session_state.prepare_start is not None:
            self._session_state.prepare_start()
        self._eval_caught_up = self._run_missed_evaluation()

    def _roll_back(self, rollback: Rollback, target: RollbackTarget) -> None:
        """Restore the newest checkpoint from before the bad steps. Collective."""
        with self._runtime.progress.in_phase(heartbeat.RESTORE):
            self._metrics_processor.writer.flush(wait=True)
            self._start_step = self._checkpointer.roll_back(self._state, self._runtime.seed, rollback, target)
        self._runtime.result.step = self._session_state.step = self._start_step
        self._metrics_processor.on_rollback()
        self._runtime.profiler.close()
        self._session_state.eval_results = {}
        self._eval_caught_up = self._run_missed_evaluation()

    # -- between two steps

    def _decide(self) -> StepDecision:
        """Return what all ranks do now. Collective."""
        is_last = self._step >= self._final_step()
        should_stop = self._should_stop(is_last)
        is_requested = self._step > self._start_step and self._agreement.take_flag("save")
        is_best = (
            self._evaluations is not None and self._checkpointer.keeps_best and self._evaluations.is_best(self._step)
        )
        # Also before the final save: the ranks adopt a common deadline, so that they give up waiting together.
        is_too_late = (should_stop or is_last) and self._checkpointer.is_too_late_to_save(self._agreement)
        return StepDecision(
            is_last=is_last,
            should_stop=should_stop,
            is_late=should_stop and is_too_late,
            save_due=is_requested or is_best or self._checkpointer.is_due(self._step),
            has_failed_save=not should_stop and self._agreement.take_flag("failed_save"),
        )

    def _final_step(self) -> int:
        """Return ``total``, or the current step if early stopping ends the run."""
        stops_early = self._evaluations is not None and self._evaluations.stop_reason
        return min(self._step, self._total) if stops_early else self._total

    def _should_stop(self, is_last: bool) -> bool:
        """Return whether the ranks have agreed to stop and work is left: a step, or an evaluation cut short."""
        evaluation_due = self._evaluations is not None and self._evaluations.is_due(self._step, self._total)
        return ((not is_last or evaluation_due) and self._agreement.poll()) or (not is_last and self._is_budget_spent())

    def _is_budget_spent(self) -> bool:
        """Return whether all ranks know that the run's budget is spent. They then stop as on a warning signal."""
        if not self._agreement.take_flag("budget"):
            return False
        self._agreement.wait_for_pending()
        self._runtime.result.reason = self._runtime.budget.spent_reason() or None
        self._runtime.result.budget_spent = True
        return True

    def _check_rollback(self, decision: StepDecision) -> tuple[Rollback, RollbackTarget] | None:
        """Return the rollback that bad steps require, or None.

        Before a save, all steps are checked: a checkpoint must not contain unchecked ones.
        """
        monitor = self._runtime.metrics_processor.monitor
        if monitor is None:
            return None
        return monitor.check(self._step, check_all=decision.should_stop or decision.save_due or decision.is_last)

    def _stop_and_exit(self, decision: StepDecision, rollback: tuple[Rollback, RollbackTarget] | None) -> NoReturn:
        """Save and end the process.

        After bad steps, nothing is saved: the rollback is recorded and the next attempt carries it out, since the time
        until the kill is short. If it is too short for a save, the run continues from the newest committed checkpoint.
        """
        save = not decision.is_late and rollback is None
        self._runtime.events.emit("stop_agreed", step=self._step, save=save)
        with self._exit_when_too_late():
            if save and self._has_unsaved_progress():
                self._save("stop")
            self._checkpointer.wait_for_saves()  # even if it is too late for another one
            if rollback is not None and not decision.is_late:
                self._checkpointer.record_rollback(*rollback)
        self._exit()

    def _save_if_due(self, decision: StepDecision) -> None:
        """Save if a checkpoint is due, and raise the error of a failed save."""
        if self._step == self._start_step + 1 and not decision.is_last:
            self._checkpointer.reserve(self._state)
        save = (decision.save_due or decision.is_last) and self._has_unsaved_progress()
        if not save and not decision.has_failed_save:
            return
        with self._exit_when_too_late():
            if decision.has_failed_save:
                self._checkpointer.wait_for_saves()  # raises, on all ranks at this step
            if save:
                self._save("end" if decision.is_last else "interval")

    def _has_unsaved_progress(self) -> bool:
        """Return whether a checkpoint made now would differ from the one restored."""
        return self._checkpointer.is_enabled and (self._step > self._start_step or self._eval_caught_up)

    @contextmanager
    def _exit_when_too_late(self) -> Iterator[None]:
        """End the process, on all ranks, if the deadline comes before the saves in the block are committed."""
        try:
            with self._runtime.progress.in_phase(heartbeat.CHECKPOINT):
                yield
        except DeadlineExceeded as e:
            self._checkpointer.report_abandoned_save(self._step, e)
            self._exit()

    def _save(self, reason: SaveReason) -> None:
        self._metrics_processor.writer.flush(wait=True)
        self._checkpointer.save(self._step, self._state, reason, self._latest_metrics())

    def _latest_metrics(self) -> dict[str, Any]:
        """Return the scalars that rate a checkpoint made now, without validation results of an earlier step."""
        latest = self._metrics_processor.writer.latest.items()
        logged = {
            k: v for k, v in latest if not k.startswith(VALIDATION_PREFIX) or self._metrics_processor.has_logged(k)
        }
        return {**logged, **self._session_state.eval_results}

    def _finish(self) -> None:
        if self._evaluations is not None and self._evaluations.stop_reason and self._step < self._total:
            self._runtime.result.reason = self._evaluations.stop_reason
            self._runtime.events.emit("early_stop", step=self._step, reason=self._evaluations.stop_reason)
        self._session_state.is_finished = self._runtime.result.finished = True
        self._runtime.progress.enter_phase(heartbeat.SHUTDOWN)

    def _exit(self) -> NoReturn:
        """End the process as stopped; the run continues from its newest checkpoint."""
        self._metrics_processor.writer.close()
        self._runtime.result.record_stopped()
        self._runtime.barrier()
        raise SystemExit(self._runtime.exit_policy.exit_code(resumable=self._checkpointer.is_enabled))

    # -- a step and its evaluation

    def _run_step(self) -> Iterator[int]:
        self._session_state.eval_results = {}
        t_begin = clock.now()
        self._metrics_processor.begin_step(self._step)
        self._runtime.profiler.begin(self._step)
        yield self._step
        self._runtime.profiler.end(self._step)
        self._session_state.step += 1
        self._runtime.result.step = self._step
        if self._evaluations is not None and self._evaluations.is_due(self._step, self._total):
            self._metrics_processor.log(self._evaluate(self._evaluations) or metrics.CUT_SHORT)
        self._metrics_processor.end_step(self._step, self._session_state.tokens_per_step)
        if self._step == self._start_step + 1:
            self._runtime.events.emit("first_step", step=self._step, total=self._total, t_begin=t_begin)

    def _evaluate(self, evaluations: EvaluationSchedule) -> dict[str, float]:
        results = evaluations.run(self._step)
        if results:
            result_logging.report_evaluation(
                evaluations, self._step, self._runtime.events.emit, to_log=self._runtime.is_main
            )
        return results

    def _run_missed_evaluation(self) -> bool:
        """Run an evaluation that a stop cut short, write its step's row again, and return whether it has results."""
        if self._evaluations is None or not self._evaluations.is_due(self._step, self._total):
            return False
        results = self._evaluate(self._evaluations)
        if results:
            self._metrics_processor.writer.enqueue(
                result_logging.load_previous_row(self._runtime.context, self._step), dict(results), is_repeat=True
            )
        return bool(results)
