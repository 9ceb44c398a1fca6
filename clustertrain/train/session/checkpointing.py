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
from clustertrain.checkpoint.core.failures import TooLate
from clustertrain.checkpoint.core.interval import Failures, Interval, failures_of
from clustertrain.checkpoint.core.retention import Policy
from clustertrain.checkpoint.format.fence import Fence
from clustertrain.checkpoint.format.manifest import Metric, Reason
from clustertrain.checkpoint.load.rollback import Wanted
from clustertrain.checkpoint.manager import CheckpointManager, Made, Restored, Saved
from clustertrain.checkpoint.save.writer_client import Outcome
from clustertrain.config.recipe import AUTO, Recipe
from clustertrain.errors import ConfigError, Diverged, UsageError
from clustertrain.run import attempts
from clustertrain.train.core import seeds
from clustertrain.train.core.context import RankContext
from clustertrain.train.core.result import RankResult
from clustertrain.train.core.stop import StopAgreement
from clustertrain.train.core.time_left import TimeLeft
from clustertrain.train.data.loader import Loader
from clustertrain.train.distributed.mesh import Groups
from clustertrain.train.evaluation.best_metric import Judge
from clustertrain.train.session import checkpointing_config, resume_check
from clustertrain.train.stability.divergence import Back

log = logging.getLogger(__name__)

TELLING = 0.1  # a change of the interval by less is not worth an event
LAST_WORD_S = 20.0  # for a save under way when the rank fails; torchrun kills it 30 s after


class Keeping:
    """``kept`` says whether there is a folder for checkpoints at all: outside a run only where the script names one."""

    def __init__(
        self,
        context: RankContext,
        groups: Groups,
        folder: Path | None,
        threads: int,
        result: RankResult,
        event: Callable[..., None],
        deadline: Callable[[], float | None],
    ) -> None:
        """``deadline`` says by when the process must have ended (UTC epoch s), once somebody has said so."""
        self._context = context
        self._groups = groups
        self._folder = folder or (context.run.checkpoints if context.run else None)
        self._threads = threads
        self._result = result
        self._event = event
        self._time_left = TimeLeft(deadline)
        self._begun: dict[int, float] = {}  # by step when its save began, UTC epoch s
        self._interval: Interval | None = None
        self._asked = False
        self._about: dict[str, Any] = {}
        self._policy = Policy()
        self._judge: Judge | None = None  # where the best by it is kept
        self._manager: CheckpointManager | None = None

    @property
    def kept(self) -> bool:
        return self._manager is not None

    @property
    def keeps_best(self) -> bool:
        """Whether a checkpoint is worth making for what it was measured at alone."""
        return self._judge is not None

    def open(self, total: int, every: int | str | None, keep: int | None, judge: Judge | None = None) -> None:
        """For a loop that ends at step ``total``. From now on save ``every`` so often (None: only at the end) and keep
        the ``keep`` newest (None: as many as the recipe says). The recipe's table has the last word on everything else;
        where it is silent, the best one by ``judge`` is kept.

        Raises:
            UsageError: in a run, a loop before this one counts as far.
        """
        if self._context.run is not None:
            self._result.counts_to(total)
        if self._folder is None:
            return
        if self._manager is not None:  # of an earlier loop of the same session
            self._manager.settle()
            self._manager.close()
        context = self._context
        asked = checkpointing_config.table(context)
        self._interval = self._chosen_interval(every, asked.keep_every) if every is not None else None
        self._about = about(context)
        self._policy = policy = checkpointing_config.policy(context, keep, judge)
        self._judge = judge if judge is not None and policy.best == judge.metric else None
        self._manager = CheckpointManager(
            self._folder,
            Ranks(self._groups.checkpoint),
            attempt=str(context.attempt.n) if context.attempt else "local",
            layout={f: getattr(context.layout, f) for f in context.layout.__struct_fields__},
            policy=policy,
            engine=asked.engine,
            background=asked.background,
            device=context.device,
            # The local backend's nodes are all on this machine.
            sharers=context.world_size if settings.LOCAL_JOB in os.environ else context.local_world_size,
            about=self._about,
            local=checkpointing_config.local(context),
            remote=checkpointing_config.remote(context, policy),
            fence=_fence(context),
            until=self._time_left.until,
            on_commit=self._committed,
            on_copy=self._copied,
        )
        self._manager.start()

    def _chosen_interval(self, every: int | str, milestone: int) -> Interval:
        failures = Failures()
        run = self._context.run
        if every == AUTO and run is not None and self._context.rank == 0:
            nodes = self._context.world_size // self._context.local_world_size
            failures = failures_of(attempts.read_all(run)[:-1], max(1, nodes))  # the last one is this
        return Interval(every, milestone=milestone, failures=failures)

    def _copied(self, copied: Outcome) -> None:
        if copied.trouble is None:
            self._event("copied", step=copied.step, copy_s=copied.seconds, bytes=copied.bytes)
            return
        self._event("copy_failed", step=copied.step, why=copied.trouble.why)
        log.warning("the checkpoint of step %d is not copied: %s", copied.step, copied.trouble.why)

    def restore(self, state: dict[str, Any], seed: int) -> int:
        """Fill ``state`` from the newest checkpoint that verifies; returns its step, 0 where there is none.

        Raises:
            UsageError: loops before this one have done more steps of the run.
        """
        t_begin = clock.now()
        restored = self._manager.restore(state, self._agree) if self._manager is not None else None
        step = restored.step if restored else 0
        if self._context.run is not None and step < self._result.step:
            raise UsageError(
                f"session.steps: would begin at step {step}, and {self._result.step} steps of the run are done",
                fix="give all sessions of a run the same checkpoint_dir, and let a loop end by itself: it then saves",
            )
        if restored is not None:
            self._result.step = self._result.committed_step = step
            self._event(
                "restored",
                step=step,
                path=str(restored.path),
                t_begin=t_begin,
                restore_s=restored.restore_s,
                skipped=restored.skipped,
                **({} if restored.from_local is None else {"from_local": restored.from_local}),
            )
            self._look_for_best()
        self._continue_random(restored, seed, step)
        self._leave_out(state)
        if self._interval is not None:
            self._interval.begun()
            self._say_interval()
        return step

    def go_back(self, state: dict[str, Any], seed: int, back: Back, wanted: Wanted) -> int:
        """Collective: fill ``state`` from a checkpoint before what went wrong, without the samples of that; returns its
        step.

        Raises:
            Diverged: on all ranks, where that was done too often, or there is no such checkpoint.
        """
        t_begin = clock.now()
        manager = self._settled(back)
        restored = manager.go_back(state, wanted)
        if restored is None:
            raise Diverged(f"{back.why}: no checkpoint of step {wanted.most} or before is left")
        step = self._result.committed_step = restored.step
        self._look_for_best()
        self._continue_random(restored, seed, step)
        self._leave_out(state)
        self._asked = False
        if self._interval is not None:
            self._interval.begun()
        self._tell_of_way_back(t_begin, back, wanted, step)
        return step

    def go_back_later(self, back: Back, wanted: Wanted) -> None:
        """Collective, for ranks that leave: write down that the run goes back, so that the next attempt begins there.

        Raises:
            TooLate: the process must end before that, on all ranks. The next attempt finds out by itself.
            Diverged: as :meth:`go_back`.
        """
        t_begin = clock.now()
        step = self._result.committed_step = self._settled(back).condemn(wanted)
        self._tell_of_way_back(t_begin, back, wanted, step)

    def _settled(self, back: Back) -> CheckpointManager:
        """A checkpoint that is committed later the record of the way back would not know."""
        if self._manager is None:
            raise Diverged(f"{back.why}: there are no checkpoints to go back to", fix="give session() a checkpoint_dir")
        self._manager.settle()
        return self._manager

    def _tell_of_way_back(self, t_begin: float, back: Back, wanted: Wanted, step: int) -> None:
        self._event(
            "rolled_back",
            t_begin=t_begin,
            step=back.last,
            to_step=step,
            why=back.why,
            samples=sum(end - first for ranges in wanted.left_out.values() for first, end in ranges),
            restore_s=clock.now() - t_begin,
        )
        log.warning("%s: back to step %d, without that data", back.why, step)

    def _look_for_best(self) -> None:
        """The checkpoint of what was best may be gone: it went when a better one came, to which the run did not come
        back."""
        judge = self._judge
        if self._manager is None or judge is None or judge.best_step is None:
            return
        was, left = judge.best_step, self._manager.measured_unless(judge.best_step, judge.metric)
        if left is None:
            return
        judge.lose_best(left)
        if self._context.rank == 0:
            now = "the next evaluation's" if judge.best_step is None else f"that of step {judge.best_step}"
            log.warning("the best checkpoint, of step %d, is not there any more; the best is now %s", was, now)

    def _continue_random(self, restored: Restored | None, seed: int, step: int) -> None:
        if restored is not None and restored.rank_state is not None:
            self._threads = restored.rank_state["threads"]
            torch.set_num_threads(self._threads)
            seeds.restore(restored.rank_state["random"], self._context.device)
        else:
            seeds.seed_all(seeds.derive(seed, "rank", step, self._context.rank))

    def _leave_out(self, state: Mapping[str, Any]) -> None:
        """A checkpoint from before a roll-back does not know of it."""
        if self._manager is None:
            return
        for name, ranges in self._manager.left_out().items():
            if isinstance(state.get(name), Loader):
                state[name].leave_out(ranges)

    def _agree(self, made: Made) -> None:
        """Whether to go on from a checkpoint that was made like that, as the contract says. Collective: nodes need not
        be like each other.

        Raises:
            ConfigError: on all ranks; only under the same circumstances, and they are others on one of them.
        """
        mine = resume_check.differences(made, self._context, self._about)
        everybody = Ranks(self._groups.checkpoint).told((self._context.node, mine) if mine else None)
        found = resume_check.of_all(everybody)
        if not found:
            return
        if _exact(self._context):
            raise ConfigError(
                f"contract.resume = 'exact', and this is not how the checkpoint was made: {'; '.join(found)}",
                fix="start it as it was, or begin a new run with contract.resume = 'elastic'",
            )
        if self._context.rank == 0:
            log.warning("the run goes on under other circumstances: %s", "; ".join(found))

    def reserve(self, state: dict[str, Any]) -> None:
        """Collective, after the first step, when the optimizer has its state: make room for the first save on the
        way."""
        if self._manager is not None and self._interval is not None:
            self._manager.reserve(state, self._rank_state())

    def due(self, step: int) -> bool:
        """Whether a save is due because of the step's number, which all ranks know."""
        return self._interval is not None and self._interval.at(step)

    def overdue(self) -> bool:
        """Whether rank 0's clock says that a save is due; said once for each, since it takes a step to be heard."""
        if self._interval is None or self._context.rank != 0 or self._asked or not self._interval.timed:
            return False
        self._asked = self._interval.overdue()
        return self._asked

    def save(
        self,
        step: int,
        state: dict[str, Any],
        reason: Reason,
        newest: Mapping[str, Any],
    ) -> None:
        """Collective. On the way in the background; at a stop and at the end until it is committed. ``newest`` are the
        scalars that were logged last.

        Raises:
            TooLate: the process must end before that, on all ranks.
            StorageError, CheckpointError: on all ranks, for what any could not save.
        """
        if self._manager is None:
            return
        metric = None
        if self._policy.best:
            value = newest.get(self._policy.best)
            number = isinstance(value, (int, float)) and math.isfinite(value)
            found = float(value) if number else None  # type: ignore[arg-type]
            metric = Metric(name=self._policy.best, value=found, mode=self._policy.best_mode)
        rank_state, wait = self._rank_state(), reason != "interval"
        if reason == "interval" and self._only_for_best(step):
            reason = "best"
        self._begun[step] = clock.now()
        self._manager.save(step, state, rank_state, reason=reason, metric=metric, wait=wait)
        if reason == "best":  # the regular ones come as they would without
            return
        self._asked = False
        if self._interval is not None:
            self._interval.begun()

    def _only_for_best(self, step: int) -> bool:
        """Rank 0, which commits, knows; the others do not know whether a clock has asked."""
        return self._judge is not None and self._judge.best_step == step and not (self.due(step) or self._asked)

    def _rank_state(self) -> dict[str, Any]:
        return {"random": seeds.capture(self._context.device), "threads": self._threads}

    def _say_interval(self) -> None:
        if self._interval is not None and self._interval.timed:
            self._event("checkpoint_interval", seconds=self._interval.seconds, why=self._interval.explain())

    def _committed(self, saved: Saved) -> None:
        self._time_left.saves_s.append(saved.save_s)
        self._result.committed_step = saved.step
        self._event(
            "checkpoint",
            step=saved.step,
            t_begin=self._begun.pop(saved.step, clock.now() - saved.save_s),
            save_s=saved.save_s,
            stall_s=saved.stall_s,
            bytes=saved.bytes,
            reason=saved.reason,
        )
        if self._interval is not None:
            before = self._interval.seconds
            self._interval.measured(saved.stall_s, saved.save_s)
            if before and abs((self._interval.seconds or before) / before - 1) > TELLING:
                self._say_interval()

    def in_trouble(self) -> bool:
        """Whether a save of this rank's has failed since. Looks at what the writing process has said, and does not
        wait."""
        return self._manager is not None and self._manager.poll()

    def settle(self) -> None:
        """Collective: wait for the saves under way. Raises as :meth:`save`."""
        if self._manager is not None:
            self._manager.settle()

    def is_late(self, agreement: StopAgreement) -> bool:
        """Whether it is too late for a save after what is still under way, on all ranks alike. Collective."""
        return self._time_left.is_late(agreement, 1 + (self._manager.under_way if self._manager is not None else 0))

    def given_up(self, step: int, e: TooLate) -> None:
        """Say that what should have been saved is not."""
        self._event("save_given_up", step=step, why=e.message)
        log.warning("%s; the run goes on from step %d", e.message, self._result.committed_step or 0)

    def close(self) -> None:
        """Not collective: other ranks may be gone, so a save under way is waited for as long as one takes."""
        if self._manager is None:
            return
        completed = self._result.ending == "completed"
        if completed and not self._manager.await_copies(lambda: not self._told_to_stop()):
            why = f"the run's end was not put off any longer for it; it is in {self._folder}"
            self._event("copy_failed", step=self._result.committed_step, why=why)
            log.warning("the last checkpoint is not copied: %s", why)
        self._manager.close(min(LAST_WORD_S, 2.0 + 3 * self._time_left.slow_s), over=completed)
        self._manager = None

    def _told_to_stop(self) -> bool:
        return self._context.rank_dir is not None and (self._context.rank_dir / "stop").exists()


def _fence(context: RankContext) -> Fence | None:
    if context.run is None or context.attempt is None:
        return None
    return Fence(run=str(context.run.path), attempt=context.attempt.n)


def about(context: RankContext) -> dict[str, Any]:
    """What made a checkpoint. Checkpoints are copied and handed on, so no secret of the recipe's is in it."""
    spec, run = context.spec, context.run
    record = (fsio.read_json(run.record) or {}) if run is not None else {}
    return {
        "clustertrain": clustertrain.__version__,
        "python": platform.python_version(),
        "recipe": msgspec.to_builtins(_public(spec.recipe)) if spec is not None and spec.script is None else None,
        "git": record.get("git"),
        # Read by one rank, and where it matters: it may be 100 MiB.
        "code": resume_check.files_of(run.code) if run is not None and context.rank == 0 and _exact(context) else None,
        "precision": context.precision,
    }


def _exact(context: RankContext) -> bool:
    return context.spec is not None and context.spec.recipe.contract.resume == "exact"


def _public(recipe: Recipe) -> Recipe:
    telemetry = msgspec.structs.replace(recipe.telemetry, alerts=recipe.telemetry.alerts.public())
    return msgspec.structs.replace(recipe, telemetry=telemetry)
