"""Hooks of Lightning's ``Trainer``: steps, the agreed stop with its own save, and the resume from its checkpoints."""

from __future__ import annotations

import functools
import glob
import importlib
import inspect
import os
import shutil
import signal
import time
from types import ModuleType
from typing import Any

from . import checkpoints, heartbeat
from .guard import guarded
from .progress import Progress, get_progress
from .stop_step import StopStep

FRAMEWORK = "lightning"
_TRAINING = "_clustertrain_training"  # attribute of a Trainer: its name from checkpoints.begin_training


def install(module: ModuleType) -> None:
    """Hook ``Trainer.fit`` and ``Trainer.save_checkpoint``. ``module``: ``lightning.pytorch.trainer.trainer``."""
    package = module.__name__.rpartition(".trainer.trainer")[0]  # lightning.pytorch or pytorch_lightning
    _hook_fit(module.Trainer, package)
    _hook_save(module.Trainer)


def _hook_fit(trainer_class: Any, package: str) -> None:
    original = trainer_class.fit
    prepare = guarded(_prepare)
    takes_weights_only = "weights_only" in inspect.signature(original).parameters

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = prepare(self, package)
        if path is not None:
            # ckpt_path is the fifth parameter, and its name is public.
            args, kwargs = args[:4] + args[5:], {**kwargs, "ckpt_path": path}
            if takes_weights_only and len(args) < 5:
                kwargs.setdefault("weights_only", False)  # the run's own file, with whatever the program put into it
        return original(self, *args, **kwargs)

    trainer_class.fit = fit


def _hook_save(trainer_class: Any) -> None:
    original = trainer_class.save_checkpoint
    report = guarded(_report_save)

    @functools.wraps(original)
    def save_checkpoint(self: Any, filepath: Any, weights_only: Any = None, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = original(self, filepath, weights_only, *args, **kwargs)
        if not weights_only:
            report(self, str(filepath), began)
        return result

    trainer_class.save_checkpoint = save_checkpoint


def _report_save(trainer: Any, path: str, began: float) -> None:
    progress = get_progress()
    training = getattr(trainer, _TRAINING, None)
    if progress is not None and training is not None and progress.framework == FRAMEWORK and trainer.state.fn == "fit":
        reason = "stop" if os.path.dirname(path) == _stop_folder(progress) else "interval"
        progress.record_checkpoint(os.path.abspath(path), time.monotonic() - began, reason, training)


def _stop_folder(progress: Progress) -> str:
    return os.path.join(progress.rank.run_dir, "program-checkpoints", FRAMEWORK)


def _prepare(trainer: Any, package: str) -> str | None:
    """Add the callback to ``trainer``; return the checkpoint to resume from, None to follow the program."""
    progress = get_progress()
    if progress is None:
        return None
    began, training = time.monotonic(), checkpoints.begin_training(FRAMEWORK)
    setattr(trainer, _TRAINING, training)
    path, rank = None, progress.rank
    if rank.attempt > 1:
        path = checkpoints.choose(rank, training, lambda: checkpoints.list_saved(rank, training))
    callback_class = importlib.import_module(package).Callback
    exception = importlib.import_module(f"{package}.utilities.exceptions").SIGTERMException
    trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ != "ClusterTrainCallback"]
    trainer.callbacks.append(build_callback(callback_class, exception, progress, path, began))
    return path


def _remove_older(folder: str, newest: str) -> None:
    """Remove the checkpoints of earlier stops."""
    for path in glob.glob(os.path.join(glob.escape(folder), "*.ckpt")):
        if path != newest:
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def build_callback(
    callback_class: type, exception: type[BaseException], progress: Progress, resumed_from: str | None, began: float
) -> Any:
    """Return a callback for one call of ``Trainer.fit``.

    Args:
        callback_class: ``lightning.pytorch.Callback``.
        exception: what Lightning itself raises to end a training at SIGTERM.
        resumed_from: the checkpoint that ``fit`` loads.
        began: when ``fit`` was called (monotonic, s).
    """
    stop = StopStep(progress.rank)
    handler = signal.getsignal(signal.SIGTERM)  # Lightning puts its own in its place

    class ClusterTrainCallback(callback_class):  # type: ignore[misc]
        """Reports steps to clustertrain, and saves and stops at the step that the ranks have agreed on."""

        def __init__(self) -> None:
            self._evaluation_began: float | None = None

        @guarded
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            progress.framework = FRAMEWORK
            if resumed_from:
                progress.record_restore(trainer.global_step, resumed_from, time.monotonic() - began)
            progress.step = trainer.global_step
            # Lightning's handler ends the training without a save, and broadcasts from within the handler.
            stop.offer(FRAMEWORK, handler=handler)
            progress.begin()

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            if self._end_step(trainer):
                folder = _stop_folder(progress)
                path = os.path.join(folder, f"step-{trainer.global_step}.ckpt")
                trainer.save_checkpoint(path)
                if progress.rank.rank == 0:
                    guarded(_remove_older)(folder, path)
                raise exception

        @guarded
        def _end_step(self, trainer: Any) -> bool:
            step = trainer.global_step
            if step == progress.step:  # gradients are accumulated
                return False
            progress.end_step(step)
            if step % max(1, trainer.log_every_n_steps) == 0:  # as for the loggers: reading a value waits for the GPU
                progress.log({name: float(value) for name, value in trainer.logged_metrics.items()})
            if not stop.is_reached(step):
                return False
            progress.record_stop(step)
            progress.enter(heartbeat.CHECKPOINT)
            return True

        @guarded
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self._evaluation_began = time.monotonic()
            if progress.framework == FRAMEWORK:
                progress.enter(heartbeat.EVALUATION)

        @guarded
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if self._evaluation_began is not None and progress.framework == FRAMEWORK:
                progress.record_evaluation(time.monotonic() - self._evaluation_began)
            self._evaluation_began = None

        @guarded
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            stop.withdraw()
            progress.finish()

    return ClusterTrainCallback()
