"""A session's checkpoints: restored before the first step, saved on the way, given up where the kill comes first."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import platform
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

import clustertrain
from clustertrain import clock, fsio, settings
from clustertrain.checkpoint.agree import Ranks
from clustertrain.checkpoint.background import Outcome
from clustertrain.checkpoint.interval import Failures, Interval, failures_of
from clustertrain.checkpoint.manager import CheckpointManager, Local, Made, Remote, Restored, Saved
from clustertrain.checkpoint.manifest import Metric, Reason
from clustertrain.checkpoint.retention import Policy
from clustertrain.checkpoint.rollback import Wanted
from clustertrain.checkpoint.trouble import TooLate
from clustertrain.errors import ConfigError, Diverged, EnvironmentNotFit
from clustertrain.run import attempts
from clustertrain.spec.places import node_folder
from clustertrain.spec.recipe import AUTO, CHOSEN, CheckpointSpec, Recipe
from clustertrain.train import sameness, seeds
from clustertrain.train.context import RankContext
from clustertrain.train.data import Loader
from clustertrain.train.evaluation.judge import Judge
from clustertrain.train.mesh import Groups
from clustertrain.train.result import RankResult
from clustertrain.train.stability.supervisor import Back
from clustertrain.train.stop import StopAgreement

log = logging.getLogger(__name__)

TELLING = 0.1  # a change of the interval by less is not worth an event
REMEMBERED = 5  # saves: one that a busy hour made slow must not forbid all later ones
SAVE_MARGIN = 1.5  # a save beside dying neighbours takes longer than one in peace
ORDERLY_END_S = 2.0  # at the deadline, for what follows the last save
LEAST_S = 2.0  # that a save under way is waited for, whatever the deadline
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
        self._deadline = deadline
        self._ends: float | None = None  # by the monotonic clock
        self._saves_s: deque[float] = deque(maxlen=REMEMBERED)
        self._begun: dict[int, float] = {}  # by step when its save began, UTC epoch s
        self._interval: Interval | None = None
        self._asked = False
        self._best = ""
        self._mode: Literal["min", "max"] = "min"
        self._manager: CheckpointManager | None = None

    @property
    def kept(self) -> bool:
        return self._manager is not None

    def open(self, every: int | str | None, keep: int | None, judge: Judge | None = None) -> None:
        """From now on save ``every`` so often (None: only at the end) and keep the ``keep`` newest (None: as many as
        the recipe says). The recipe's table has the last word on everything else; where it is silent, the best one by
        ``judge`` is kept."""
        if self._folder is None:
            return
        if self._manager is not None:  # of an earlier loop of the same session
            self._manager.settle()
            self._manager.close()
        context = self._context
        asked = context.spec.recipe.checkpoint if context.spec else CheckpointSpec()
        self._interval = self._chosen_interval(every, asked.keep_every) if every is not None else None
        keep_best, self._best, self._mode = self._deciding(asked, judge)
        policy = Policy(
            keep=keep or asked.keep,
            keep_every=asked.keep_every,
            keep_best=keep_best,
            best=self._best,
            best_mode=self._mode,
        )
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
            about=about(self._context),
            local=self._local(asked),
            remote=self._remote(asked, policy),
            until=self._until,
            on_commit=self._committed,
            on_copy=self._copied,
        )
        self._manager.start()

    def _deciding(self, asked: CheckpointSpec, judge: Judge | None) -> tuple[int, str, Literal["min", "max"]]:
        """How many of the best ones stay, by which scalar, and whether the least is the best."""
        recipe = self._context.spec.recipe if self._context.spec else Recipe()
        keep_best = asked.keep_best if asked.keep_best != CHOSEN else int(judge is not None)
        if keep_best == 0:
            return 0, "", "min"
        named = asked.best or recipe.contract.metric
        if judge is not None and named in ("", judge.metric):
            return keep_best, judge.metric, "max" if judge.higher_is_better else "min"
        return keep_best, named or recipe.deciding_metric, recipe.best_mode

    def _chosen_interval(self, every: int | str, milestone: int) -> Interval:
        failures = Failures()
        run = self._context.run
        if every == AUTO and run is not None and self._context.rank == 0:
            nodes = self._context.world_size // self._context.local_world_size
            failures = failures_of(attempts.read_all(run)[:-1], max(1, nodes))  # the last one is this
        return Interval(every, milestone=milestone, failures=failures)

    def _local(self, asked: CheckpointSpec) -> Local | None:
        context = self._context
        if not asked.local or context.run is None:
            return None
        try:
            root = node_folder(asked.local, os.environ) / context.run.id
        except EnvironmentNotFit as e:
            root = None
            log.warning("checkpoint.local = %s; checkpoints of this node go straight to the shared folder", e.message)
        return Local(root, first=context.local_rank == 0)

    def _remote(self, asked: CheckpointSpec, policy: Policy) -> Remote | None:
        run = self._context.run
        if not asked.remote or run is None:
            return None
        needed = self._context.rank == 0 and any(a.committed_step is not None for a in attempts.read_all(run)[:-1])
        policy = dataclasses.replace(policy, keep=asked.remote_keep or policy.keep)
        return Remote(f"{asked.remote.rstrip('/')}/{run.id}", policy, needed)

    def _copied(self, copied: Outcome) -> None:
        if copied.trouble is None:
            self._event("copied", step=copied.step, copy_s=copied.seconds, bytes=copied.bytes)
            return
        self._event("copy_failed", step=copied.step, why=copied.trouble.why)
        log.warning("the checkpoint of step %d is not copied: %s", copied.step, copied.trouble.why)

    def restore(self, state: dict[str, Any], seed: int) -> int:
        """Fill ``state`` from the newest checkpoint that verifies; returns its step, 0 where there is none."""
        t_begin = clock.now()
        restored = self._manager.restore(state, self._agree) if self._manager is not None else None
        step = restored.step if restored else 0
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
        if self._manager is None:
            raise Diverged(f"{back.why}: there are no checkpoints to go back to", fix="give session() a checkpoint_dir")
        self._manager.settle()
        restored = self._manager.go_back(state, wanted)
        if restored is None:
            raise Diverged(f"{back.why}: no checkpoint of step {wanted.most} or before is left")
        step = self._result.committed_step = restored.step
        self._continue_random(restored, seed, step)
        self._leave_out(state)
        self._asked = False
        if self._interval is not None:
            self._interval.begun()
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
        return step

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
        """Whether to go on from a checkpoint that was made like that, as the contract says.

        Raises:
            ConfigError: only under the same circumstances, and they are others.
        """
        found = sameness.differences(made, self._context, about(self._context))
        if not found:
            return
        exact = self._context.spec is not None and self._context.spec.recipe.contract.resume == "exact"
        if exact:
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
        if self._best:
            value = newest.get(self._best)
            number = isinstance(value, (int, float)) and math.isfinite(value)
            metric = Metric(name=self._best, value=float(value) if number else None, mode=self._mode)  # type: ignore[arg-type]
        rank_state, wait = self._rank_state(), reason != "interval"
        self._begun[step] = clock.now()
        self._manager.save(step, state, rank_state, reason=reason, metric=metric, wait=wait)
        self._asked = False
        if self._interval is not None:
            self._interval.begun()

    def _rank_state(self) -> dict[str, Any]:
        return {"random": seeds.capture(self._context.device), "threads": self._threads}

    def _say_interval(self) -> None:
        if self._interval is not None and self._interval.timed:
            self._event("checkpoint_interval", seconds=self._interval.seconds, why=self._interval.explain())

    def _committed(self, saved: Saved) -> None:
        self._saves_s.append(saved.save_s)
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

    def left_s(self) -> float:
        """Until this process must have ended, as far as this rank was told; inf: nobody has said so."""
        deadline = self._deadline()
        return math.inf if deadline is None else deadline - clock.now()

    def must_end_in(self, left_s: float) -> None:
        """What all ranks go by from now on: they give up together, or one would wait for another one's word. It does
        not depend on the wall clock any more."""
        if math.isfinite(left_s):
            # A deadline that is past is a late word or a clock that jumped: the kill may still be some way off.
            until = clock.monotonic() + max(LEAST_S, left_s - ORDERLY_END_S)
            self._ends = until if self._ends is None else min(self._ends, until)

    def _until(self) -> float | None:
        """When waiting for a save must end, so that there is time for an orderly end."""
        if self._ends is None:
            self.must_end_in(self.left_s())
        return self._ends

    def given_up(self, step: int, e: TooLate) -> None:
        """Say that what should have been saved is not."""
        self._event("save_given_up", step=step, why=e.message)
        log.warning("%s; the run goes on from step %d", e.message, self._result.committed_step or 0)

    def is_late(self, agreement: StopAgreement) -> bool:
        """Whether it is too late for a save, on all ranks alike; they go by the earliest deadline from now on.
        Collective."""
        left_s = agreement.least(self.left_s())
        self.must_end_in(left_s)
        return agreement.any(self.too_late(left_s))

    def too_late(self, left_s: float) -> bool:
        """Whether a save would not end before the kill, by the slowest of the last ones, and after what is still under
        way. The newest committed checkpoint then stands; a save that is killed half way would not change that, only
        cost the orderly end."""
        saves = 1 + (self._manager.under_way if self._manager is not None else 0)
        return SAVE_MARGIN * saves * self._slow_s > left_s

    @property
    def _slow_s(self) -> float:
        return max(self._saves_s, default=0.0)

    def close(self) -> None:
        """Not collective: other ranks may be gone, so a save under way is waited for as long as one takes."""
        if self._manager is None:
            return
        completed = self._result.ending == "completed"
        if completed and not self._manager.await_copies(lambda: not self._told_to_stop()):
            why = f"the run's end was not put off any longer for it; it is in {self._folder}"
            self._event("copy_failed", step=self._result.committed_step, why=why)
            log.warning("the last checkpoint is not copied: %s", why)
        self._manager.close(min(LAST_WORD_S, 2.0 + 3 * self._slow_s), over=completed)
        self._manager = None

    def _told_to_stop(self) -> bool:
        return self._context.rank_dir is not None and (self._context.rank_dir / "stop").exists()


def about(context: RankContext) -> dict[str, Any]:
    """What made a checkpoint. Checkpoints are copied and handed on, so no secret of the recipe's is in it."""
    spec, run = context.spec, context.run
    record = (fsio.read_json(run.record) or {}) if run is not None else {}
    return {
        "clustertrain": clustertrain.__version__,
        "python": platform.python_version(),
        "recipe": msgspec.to_builtins(_public(spec.recipe)) if spec is not None and spec.script is None else None,
        "git": record.get("git"),
        "precision": context.precision,
    }


def _public(recipe: Recipe) -> Recipe:
    telemetry = msgspec.structs.replace(recipe.telemetry, alerts=recipe.telemetry.alerts.public())
    return msgspec.structs.replace(recipe, telemetry=telemetry)
