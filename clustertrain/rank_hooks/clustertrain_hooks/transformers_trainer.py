"""Hooks of ``transformers.Trainer``: steps, the agreed stop with its own save, and the resume from its checkpoints."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from types import ModuleType
from typing import Any

from . import checkpoints, heartbeat
from .guard import guarded
from .progress import Progress, get_progress
from .stop_step import EXIT_STOPPED, StopStep

FRAMEWORK = "transformers"
_CHECKPOINT = r"checkpoint-(\d+)"
_CALLBACK = "ClusterTrainCallback"


def install(module: ModuleType) -> None:
    """Hook ``Trainer.train``. ``module``: ``transformers.trainer``."""
    trainer_class, callback_class = module.Trainer, module.TrainerCallback
    original = trainer_class.train
    prepare = guarded(_prepare)

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        choice = prepare(self, callback_class, resume_from_checkpoint)
        return original(self, resume_from_checkpoint if choice is None else choice[0], *args, **kwargs)

    trainer_class.train = train


def _prepare(trainer: Any, callback_class: type, requested: Any) -> tuple[Any] | None:
    """Add the callback to ``trainer``; return its ``resume_from_checkpoint``, None outside a run."""
    progress = get_progress()
    if progress is None:
        return None
    began, training = time.monotonic(), checkpoints.begin_training(FRAMEWORK)
    path = _choose_checkpoint(trainer, progress, training, requested)
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == _CALLBACK:  # of an earlier call
            trainer.remove_callback(callback)
    trainer.add_callback(build_callback(callback_class, progress, training, path, began))
    if path is None and requested is True:
        print("clustertrain: resume_from_checkpoint=True, and there is no checkpoint yet: from the start", flush=True)
        return (None,)
    return (path or requested,)


def _choose_checkpoint(trainer: Any, progress: Progress, training: str, requested: Any) -> str | None:
    rank = progress.rank
    if requested is True:  # the newest one, whoever wrote it
        numbered = checkpoints.list_numbered(trainer.args.output_dir, _CHECKPOINT)
        return checkpoints.choose(rank, training, lambda: numbered, _find_problem)
    if rank.attempt == 1:
        return None
    return checkpoints.choose(rank, training, lambda: checkpoints.list_saved(rank, training), _find_resume_problem)


def _find_problem(folder: str) -> str:
    """Return why the Trainer cannot load ``folder``; empty if it can."""
    if not os.path.exists(os.path.join(folder, "trainer_state.json")):
        return "it has no trainer_state.json, which the Trainer writes last"
    return checkpoints.find_problem(folder)


def _find_resume_problem(folder: str) -> str:
    """Return why training cannot continue from ``folder`` as if there had been no stop; empty if it can."""
    problem = _find_problem(folder)
    if not problem and not any(re.match(r"optimizer|global_step\d+", name) for name in os.listdir(folder)):
        return "it has no state of the optimizer (save_only_model)"
    return problem


def build_callback(
    callback_class: type, progress: Progress, training: str, resumed_from: str | None, began: float
) -> Any:
    """Return a callback for one call of ``Trainer.train``.

    Args:
        callback_class: ``transformers.TrainerCallback``.
        training: its name from ``checkpoints.begin_training``.
        resumed_from: the checkpoint that ``train`` loads.
        began: when ``train`` was called (monotonic, s).
    """
    stop = StopStep(progress.rank)

    class ClusterTrainCallback(callback_class):  # type: ignore[misc]
        """Reports steps and saves to clustertrain, and stops at the step that the ranks have agreed on."""

        def __init__(self) -> None:
            self._mark = began
            self._is_stopping = False

        @guarded
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress.framework = FRAMEWORK
            if resumed_from:
                progress.record_restore(state.global_step, resumed_from, time.monotonic() - began)
            progress.step = state.global_step
            stop.offer(FRAMEWORK)
            progress.begin()

        @guarded
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            progress.end_step(state.global_step)
            if stop.is_reached(state.global_step):
                self._is_stopping = True
                control.should_save, control.should_training_stop = True, True
                control.should_evaluate = False  # it comes before the save, and may outlast the grace time
                # A whole checkpoint, and the older ones are removed in the next attempt.
                args.save_only_model, args.save_total_limit = False, None
                progress.record_stop(state.global_step)
            self._enter_phase(control)
            return control

        @guarded
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._enter_phase(control)

        def _enter_phase(self, control: Any) -> None:
            self._mark = time.monotonic()
            progress.enter(
                heartbeat.EVALUATION if control.should_evaluate
                else heartbeat.CHECKPOINT if control.should_save
                else heartbeat.TRAIN
            )  # fmt: skip

        @guarded
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            progress.record_evaluation(time.monotonic() - self._mark)
            self._mark = time.monotonic()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._report_save(f"{args.output_dir}/checkpoint-{state.global_step}")
            if self._is_stopping:
                # Code after train() is for a training that is done.
                sys.exit(EXIT_STOPPED)

        @guarded
        def _report_save(self, path: str) -> None:
            reason = "stop" if self._is_stopping else "interval"
            progress.record_checkpoint(path, time.monotonic() - self._mark, reason, training)
            if self._is_stopping:
                progress.close()

        @guarded
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            progress.log(logs or {})

        @guarded
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stop.withdraw()
            progress.finish()

    return ClusterTrainCallback()
