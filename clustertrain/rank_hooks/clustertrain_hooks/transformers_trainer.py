"""Hooks of ``transformers.Trainer``: steps, the agreed stop with its own save, and the resume from its checkpoints."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from types import ModuleType
from typing import Any, Callable

from . import checkpoints, heartbeat
from .checkpoint_checks import find_problem
from .guard import guarded
from .progress import Progress, get_progress
from .rank import Rank
from .stop_step import EXIT_STOPPED, StopStep
from .torch_data import guard_workers

FRAMEWORK = "transformers"
_CHECKPOINT = r"checkpoint-(\d+)"


def install(module: ModuleType) -> None:
    """Hook ``Trainer.train``. ``module``: ``transformers.trainer``."""
    trainer_class = module.Trainer
    callback_class = type("ClusterTrainCallback", (TrainReports, module.TrainerCallback), {})
    original = trainer_class.train
    prepare = guarded(_prepare)

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        choice = prepare(self, callback_class, resume_from_checkpoint)
        return original(self, resume_from_checkpoint if choice is None else choice[0], *args, **kwargs)

    trainer_class.train = train


def _prepare(trainer: Any, callback_class: type, requested: Any) -> tuple[Any] | None:
    """Give ``trainer`` a callback; return its ``resume_from_checkpoint``, None outside a run."""
    progress = get_progress()
    if progress is None:
        return None
    callback = next((c for c in trainer.callback_handler.callbacks if isinstance(c, TrainReports)), None)
    if callback is None:
        callback = callback_class()
        trainer.add_callback(callback)
    if callback.is_ready:  # the program has called find_checkpoint, and passes the checkpoint itself
        return (requested,)
    path = callback.get_ready(progress, lambda training: _choose_checkpoint(trainer, progress, training, requested))
    if path is None and requested is True:
        print("clustertrain: resume_from_checkpoint=True, and there is no checkpoint yet: from the start", flush=True)
        return (None,)
    return (path or requested,)


def _choose_checkpoint(trainer: Any, progress: Progress, training: str, requested: Any) -> str | None:
    rank = progress.rank
    if requested is True:  # the newest one, whoever wrote it
        numbered = checkpoints.list_numbered(trainer.args.output_dir, _CHECKPOINT)
        return checkpoints.choose(rank, training, lambda: numbered, lambda c: _find_problem(c, rank.world_size))
    return _choose_saved(rank, training)


def _choose_saved(rank: Rank, training: str) -> str | None:
    """Return the newest checkpoint of this training in the run from which it can continue; None without one."""
    if rank.attempt == 1:
        return None
    saved = functools.partial(checkpoints.list_saved, rank, training)
    return checkpoints.choose(rank, training, saved, lambda c: _find_resume_problem(c, rank.world_size))


def _find_problem(folder: str, ranks: int) -> str:
    """Return why the Trainer cannot load ``folder``; empty if it can."""
    if not os.path.exists(os.path.join(folder, "trainer_state.json")):
        return "it has no trainer_state.json, which the Trainer writes last"
    return find_problem(folder, ranks)


def _find_resume_problem(folder: str, ranks: int) -> str:
    """Return why training cannot continue from ``folder`` as if there had been no stop; empty if it can."""
    problem = _find_problem(folder, ranks)
    if not problem and not any(re.match(r"optimizer|global_step\d+", name) for name in os.listdir(folder)):
        return "it has no state of the optimizer (save_only_model)"
    return problem


def _in_run(method: Callable[..., Any], on_failure: Callable[..., object] | None = None) -> Callable[..., Any]:
    """Call ``method`` with the progress of this process during a training in a run, and do nothing otherwise."""
    guarded_method = guarded(method, on_failure=on_failure)

    @functools.wraps(method)
    def call(self: TrainReports, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return None if self._progress is None else guarded_method(self, self._progress, args, state, control, **kwargs)

    return call


def _in_run_to_stop(method: Callable[..., Any]) -> Callable[..., Any]:
    """Do so with a method without which the Trainer cannot stop at a step: the agent has to send its signal."""
    return _in_run(method, on_failure=lambda self, *args, **kwargs: self._stop.give_up())


class TrainReports:
    """What a ``transformers.TrainerCallback`` does in a run: it reports steps and saves, and stops at the agreed step.

    Outside a run it does nothing.

    Attributes:
        is_ready: whether the checkpoint of the next call of ``train`` has been chosen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = False
        self._progress: Progress | None = None  # during a call of train in a run
        self._stop: Any = None
        self._training = ""
        self._resumed_from: str | None = None
        self._began = self._mark = 0.0
        self._is_stopping = False
        if get_progress() is not None:
            guarded(guard_workers)()

    def find_checkpoint(self) -> str | None:
        """Return the latest complete checkpoint of the run from which the next ``train`` continues; None without one.

        All ranks get the same one. A program that calls ``train`` several times calls this before each.
        """
        progress = get_progress()
        if progress is None:
            return None
        return self.get_ready(progress, lambda training: _choose_saved(progress.rank, training))

    def get_ready(self, progress: Progress, choose: Callable[[str], str | None]) -> str | None:
        """Begin a training; return its checkpoint, which ``choose`` returns for its name."""
        self._training, self._began = checkpoints.begin_training(FRAMEWORK), time.monotonic()
        self._progress, self._stop = progress, StopStep(progress.rank)
        self._mark, self._is_stopping = self._began, False
        self._resumed_from = choose(self._training)
        self.is_ready = True
        return self._resumed_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        progress = get_progress()
        if progress is not None and not self.is_ready:
            self.get_ready(progress, lambda _: None)
        self.is_ready = False
        self._begin(args, state, control)

    @_in_run_to_stop
    def _begin(self, progress: Progress, args: Any, state: Any, control: Any) -> None:
        progress.framework = FRAMEWORK
        if self._resumed_from and state.global_step:
            progress.record_restore(state.global_step, self._resumed_from, time.monotonic() - self._began)
        progress.step = state.global_step
        self._stop.offer(FRAMEWORK)
        progress.begin()

    @_in_run_to_stop
    def on_step_end(self, progress: Progress, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        progress.end_step(state.global_step)
        if self._stop.is_reached(state.global_step):
            self._is_stopping = True
            control.should_save, control.should_training_stop = True, True
            control.should_evaluate = False  # it comes before the save, and may outlast the grace time
            # A whole checkpoint, and the older ones are removed in the next attempt.
            args.save_only_model, args.save_total_limit = False, None
            progress.record_stop(state.global_step)
        self._enter_phase(progress, control)
        return control

    @_in_run
    def on_epoch_end(self, progress: Progress, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter_phase(progress, control)

    def _enter_phase(self, progress: Progress, control: Any) -> None:
        self._mark = time.monotonic()
        progress.enter(
            heartbeat.EVALUATION if control.should_evaluate
            else heartbeat.CHECKPOINT if control.should_save
            else heartbeat.TRAIN
        )  # fmt: skip

    @_in_run
    def on_evaluate(self, progress: Progress, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        progress.record_evaluation(time.monotonic() - self._mark)
        self._mark = time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report_save(args, state, control)
        if self._is_stopping:
            # Code after train() is for a training that is done.
            sys.exit(EXIT_STOPPED)

    @_in_run
    def _report_save(self, progress: Progress, args: Any, state: Any, control: Any) -> None:
        path = f"{args.output_dir}/checkpoint-{state.global_step}"
        reason = "stop" if self._is_stopping else "interval"
        progress.record_checkpoint(path, time.monotonic() - self._mark, reason, self._training)
        if self._is_stopping:
            progress.close()

    @_in_run
    def on_log(self, progress: Progress, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        progress.log(logs or {})

    @_in_run
    def on_train_end(self, progress: Progress, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop.withdraw()
        progress.finish()
        self._progress = None
