"""The loop of steps. Between two of them all ranks stop, save, go back or evaluate, at the same step alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from clustertrain import clock
from clustertrain.checkpoint.core.failures import TooLate
from clustertrain.checkpoint.format.manifest import Reason
from clustertrain.checkpoint.load.rollback import Wanted
from clustertrain.config.evaluation import PREFIX
from clustertrain.run import heartbeat, metrics
from clustertrain.train.evaluation import logging
from clustertrain.train.evaluation.schedule import Evaluations
from clustertrain.train.session.runtime import Opened
from clustertrain.train.stability.divergence import Back
from clustertrain.train.stability.monitor import STATE


@dataclass(frozen=True)
class Boundary:
    """What all ranks have to do between two steps.

    ``last``: no step follows. ``stop``: the ranks leave here, and the run goes on later; ``late``: without time for a
    save. ``due``: a checkpoint is. ``settle``: a save has failed on some rank.
    """

    last: bool
    stop: bool
    late: bool
    due: bool
    settle: bool


class Steps:
    """One loop of a session. :meth:`run` is the whole of it: what the ranks agree on between two steps, and what they
    do then."""

    def __init__(self, session: Opened, total: int, state: dict[str, Any], evaluations: Evaluations | None) -> None:
        self._session = session
        self._total = total
        self._state = state
        self._evaluations = evaluations
        self._context, self._result, self._event = session._context, session._result, session._event
        self._agreement, self._keeping, self._marks = session._agreement, session._keeping, session._marks
        self._recorder, self._metrics, self._profiler = session._recorder, session._metrics, session._profiler
        self._watch = session._recorder.watch
        self._first = 0  # the step that it began with, or has gone back to
        self._again = False  # an evaluation of that step was made up for, which its checkpoint does not know

    def run(self, every: int | str | None, keep: int | None) -> Iterator[int]:
        """As :meth:`Session.steps`; checkpoints ``every`` so often, of which the ``keep`` newest stay."""
        self._open(every, keep)
        self._restore()
        while True:
            here = self._boundary()
            back = self._way_back(here)
            if here.stop:
                self._stop(here, back)
            if back is not None:
                self._go_back(*back)
                continue
            self._checkpoint(here)
            if here.last:
                self._finish()
                return
            yield from self._one_step()

    @property
    def _step(self) -> int:
        return self._session.step

    # -- where it begins

    def _open(self, every: int | str | None, keep: int | None) -> None:
        if self._session._loss_scale is not None:
            self._state["loss_scale"] = self._session._loss_scale
        if self._watch is not None:
            self._state[STATE] = self._watch
            self._watch.begin(self._state)
        if self._evaluations is not None:
            self._state["evaluations"] = self._evaluations
        judge = self._evaluations.judge if self._evaluations is not None else None
        self._keeping.open(self._total, every, keep, judge)

    def _restore(self) -> None:
        with self._marks.during(heartbeat.RESTORE):
            self._first = self._session.step = self._keeping.restore(self._state, self._session.seed)
        self._again = self._make_up()

    def _go_back(self, back: Back, wanted: Wanted) -> None:
        """To the newest checkpoint before what went wrong. Collective."""
        with self._marks.during(heartbeat.RESTORE):
            self._metrics.drain(wait=True)
            self._first = self._keeping.go_back(self._state, self._session.seed, back, wanted)
        self._result.step = self._session.step = self._first
        self._recorder.went_back()
        self._profiler.close()
        self._session._evaluated = {}
        self._again = self._make_up()

    # -- between two steps

    def _boundary(self) -> Boundary:
        """Collective: what the ranks agree on."""
        last = self._step >= self._end()
        stop = self._is_told_to_stop(last)
        asked = self._step > self._first and self._agreement.taken("save")
        best = self._evaluations is not None and self._keeping.keeps_best and self._evaluations.is_best(self._step)
        return Boundary(
            last=last,
            stop=stop,
            late=(stop or last) and self._keeping.is_late(self._agreement) and stop,
            due=asked or best or self._keeping.due(self._step),
            settle=not stop and self._agreement.taken("settle"),
        )

    def _end(self) -> int:
        """``total``, or the step that is reached where the evaluations say that it is enough."""
        enough = self._evaluations is not None and self._evaluations.over
        return min(self._step, self._total) if enough else self._total

    def _is_told_to_stop(self, last: bool) -> bool:
        """Whether the ranks have agreed to, and there is something left to do: a step, or an evaluation that the word
        of the stop has cut short."""
        unfinished = self._evaluations is not None and self._evaluations.is_due(self._step, self._total)
        return ((not last or unfinished) and self._agreement.poll()) or (not last and self._is_spent())

    def _is_spent(self) -> bool:
        """Whether all ranks have heard that the run's budget is spent. They then stop as on a warning."""
        if not self._agreement.taken("budget"):
            return False
        self._agreement.drain()
        self._result.why = self._session._spending.why() or None
        self._result.spent = True
        return True

    def _way_back(self, here: Boundary) -> tuple[Back, Wanted] | None:
        """Whether steps were so bad that the run must go back. Before a checkpoint all steps are looked at: it may hold
        none of which nothing is known."""
        if self._watch is None:
            return None
        return self._watch.look(self._step, everything=here.stop or here.due or here.last)

    def _stop(self, here: Boundary, back: tuple[Back, Wanted] | None) -> NoReturn:
        """Save and leave. After bad steps nothing is saved; what the run goes back to the next attempt restores, since
        the time until the kill is short. Where it is too short for a save, the newest committed checkpoint stands."""
        save = not here.late and back is None
        self._event("stop_agreed", step=self._step, save=save)
        with self._until_too_late():
            if save and self._is_new():
                self._save("stop")
            self._keeping.settle()  # where it is too late for another save, for the one that is under way
            if back is not None and not here.late:
                self._keeping.go_back_later(*back)
        self._leave()

    def _checkpoint(self, here: Boundary) -> None:
        """Save where that is due, and hear of a save that has failed."""
        if self._step == self._first + 1 and not here.last:
            self._keeping.reserve(self._state)
        save = (here.due or here.last) and self._is_new()
        if not save and not here.settle:
            return
        with self._until_too_late():
            if here.settle:
                self._keeping.settle()  # raises, on all ranks at this step
            if save:
                self._save("end" if here.last else "interval")

    def _is_new(self) -> bool:
        """Whether a checkpoint made now would say more than the one that is there."""
        return self._keeping.kept and (self._step > self._first or self._again)

    @contextmanager
    def _until_too_late(self) -> Iterator[None]:
        """Around saves. A deadline that comes first meets all ranks, and they leave with what is committed."""
        try:
            with self._marks.during(heartbeat.CHECKPOINT):
                yield
        except TooLate as e:
            self._keeping.given_up(self._step, e)
            self._leave()

    def _save(self, reason: Reason) -> None:
        self._metrics.drain(wait=True)
        self._keeping.save(self._step, self._state, reason, self._newest())

    def _newest(self) -> dict[str, Any]:
        """The scalars that a checkpoint made now is judged by: what was validated before is of another model."""
        newest = self._metrics.newest.items()
        told = {k: v for k, v in newest if not k.startswith(PREFIX) or self._recorder.has_logged(k)}
        return {**told, **self._session._evaluated}

    def _finish(self) -> None:
        if self._evaluations is not None and self._evaluations.over and self._step < self._total:
            self._result.why = self._evaluations.over
            self._event("early_stop", step=self._step, why=self._evaluations.over)
        self._session._finished = self._result.finished = True
        self._marks.enter(heartbeat.SHUTDOWN)

    def _leave(self) -> NoReturn:
        """The run goes on later, from its newest checkpoint."""
        self._metrics.close()
        self._result.stopped()
        self._session._barrier()
        raise SystemExit(self._session._leaving.code(resumable=self._keeping.kept))

    # -- a step and its evaluation

    def _one_step(self) -> Iterator[int]:
        session = self._session
        session._evaluated = {}
        t_begin = clock.now()
        self._recorder.begin(self._step)
        self._profiler.begin(self._step)
        yield self._step
        self._profiler.end(self._step)
        session.step += 1
        self._result.step = self._step
        if self._evaluations is not None and self._evaluations.is_due(self._step, self._total):
            self._recorder.log(self._evaluate(self._evaluations) or metrics.CUT_SHORT)
        self._recorder.end(self._step, session.tokens_per_step)
        if self._step == self._first + 1:
            self._event("first_step", step=self._step, total=self._total, t_begin=t_begin)

    def _evaluate(self, evaluations: Evaluations) -> dict[str, float]:
        found = evaluations.make(self._step)
        if found:
            logging.of(evaluations, self._step, self._event, aloud=self._session.is_main)
        return found

    def _make_up(self) -> bool:
        """Whether there was an evaluation that a stop has cut short. It is made, and the row of its step told once more
        with it."""
        if self._evaluations is None or not self._evaluations.is_due(self._step, self._total):
            return False
        found = self._evaluate(self._evaluations)
        if found:
            self._metrics.put(logging.row_before(self._context, self._step), dict(found), again=True)
        return bool(found)
