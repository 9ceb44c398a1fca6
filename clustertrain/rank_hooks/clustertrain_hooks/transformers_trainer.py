"""Hooks of ``transformers.Trainer``: steps, the agreed stop with its own save, and the resume from its checkpoints."""

from __future__ import annotations

import functools
import time
from types import ModuleType
from typing import Any

from . import checkpoints, heartbeat
from .guard import guarded
from .progress import Progress, get_progress
from .stop_step import StopStep

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
    began = time.monotonic()
    path = _choose_checkpoint(trainer, progress, requested)
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == _CALLBACK:  # of an earlier call
            trainer.remove_callback(callback)
    trainer.add_callback(build_callback(callback_class, progress, path, began))
    if path is None and requested is True:
        print("clustertrain: resume_from_checkpoint=True, and there is no checkpoint yet: from the start", flush=True)
        return (None,)
    return (path or requested,)


def _choose_checkpoint(trainer: Any, progress: Progress, requested: Any) -> str | None:
    rank, folder = progress.rank, trainer.args.output_dir
    if rank.attempt == 1 and requested is not True:
        return None
    numbered = checkpoints.list_numbered(folder, _CHECKPOINT)

    def list_candidates() -> list[str]:
        # With True the program asks for the newest one, whoever wrote it.
        return numbered if requested is True else checkpoints.list_since(rank, numbered)

    return checkpoints.choose(rank, FRAMEWORK, list_candidates)


def build_callback(callback_class: type, progress: Progress, resumed_from: str | None, began: float) -> Any:
    """Return a callback for one call of ``Trainer.train``.

    Args:
        callback_class: ``transformers.TrainerCallback``.
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
                progress.record_stop(state.global_step)
                self._is_stopping = True
                control.should_save, control.should_training_stop = True, True
                control.should_evaluate = False  # it comes before the save, and may outlast the grace time
            self._mark = time.monotonic()
            progress.enter(heartbeat.CHECKPOINT if control.should_save else heartbeat.TRAIN)
            return control

        @guarded
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            progress.record_evaluation(time.monotonic() - self._mark)
            self._mark = time.monotonic()

        @guarded
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            path = f"{args.output_dir}/checkpoint-{state.global_step}"
            progress.record_checkpoint(path, time.monotonic() - self._mark, "stop" if self._is_stopping else "interval")

        @guarded
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            progress.log(logs or {})

        @guarded
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress.close()

    return ClusterTrainCallback()
