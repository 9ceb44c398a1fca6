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
from typing import Any, Callable

from . import checkpoints, heartbeat
from .guard import guarded
from .progress import Progress, get_progress
from .rank import Rank
from .stop_step import StopStep
from .torch_data import guard_workers

FRAMEWORK = "lightning"


def install(module: ModuleType) -> None:
    """Hook ``Trainer.fit``. ``module``: ``lightning.pytorch.trainer.trainer``, or that of ``pytorch_lightning``."""
    package = module.__name__.rpartition(".trainer.trainer")[0]
    original = module.Trainer.fit
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

    module.Trainer.fit = fit


def _prepare(trainer: Any, package: str) -> str | None:
    """Give ``trainer`` a callback; return the checkpoint to resume from, None to follow the program."""
    progress = get_progress()
    if progress is None:
        return None
    callback = next((c for c in trainer.callbacks if isinstance(c, FitReports)), None)
    if callback is None:
        base = importlib.import_module(package).Callback
        callback = type("ClusterTrainCallback", (FitReports, base), {"package": package})()
        trainer.callbacks.append(callback)
    if callback.is_ready:  # the program has called find_checkpoint, and passes the checkpoint itself
        return None
    return callback.get_ready(progress, lambda training: _choose_saved(progress.rank, training))


def _choose_saved(rank: Rank, training: str) -> str | None:
    """Return the newest checkpoint of this training in the run; None without one."""
    if rank.attempt == 1:
        return None
    return checkpoints.choose(rank, training, lambda: checkpoints.list_saved(rank, training))


def _stop_folder(progress: Progress) -> str:
    return os.path.join(progress.rank.run_dir, "program-checkpoints", FRAMEWORK)


def _remove_older(folder: str, newest: str) -> None:
    """Remove the checkpoints of earlier stops."""
    for path in glob.glob(os.path.join(glob.escape(folder), "*.ckpt")):
        if path != newest:
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def _in_run(method: Callable[..., Any], on_failure: Callable[..., object] | None = None) -> Callable[..., Any]:
    """Call ``method`` with the progress of this process during a training in a run, and do nothing otherwise."""
    guarded_method = guarded(method, on_failure=on_failure)

    @functools.wraps(method)
    def call(self: FitReports, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self._progress is None else guarded_method(self, self._progress, trainer)

    return call


def _in_run_to_stop(method: Callable[..., Any]) -> Callable[..., Any]:
    """Do so with a method without which the Trainer cannot stop at a step: the agent has to send its signal."""
    return _in_run(method, on_failure=lambda self, *args: self._stop.give_up())


class FitReports:
    """What a Lightning ``Callback`` does in a run: it reports steps and saves, and saves and stops at the agreed step.

    Outside a run it does nothing.

    Attributes:
        package: ``lightning.pytorch`` or ``pytorch_lightning``.
        is_ready: whether the checkpoint of the next call of ``fit`` has been chosen.
    """

    package = ""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = False
        self._progress: Progress | None = None  # during a call of fit in a run
        self._stop: Any = None
        self._handler: Any = None  # of the program; Lightning puts its own in its place
        self._training = ""
        self._resumed_from: str | None = None
        self._began = 0.0
        self._evaluation_began: float | None = None
        if get_progress() is not None:
            guarded(guard_workers)()

    def find_checkpoint(self) -> str | None:
        """Return the latest complete checkpoint of the run from which the next ``fit`` continues; None without one.

        All ranks get the same one. A program that calls ``fit`` several times calls this before each.
        """
        progress = get_progress()
        if progress is None:
            return None
        return self.get_ready(progress, lambda training: _choose_saved(progress.rank, training))

    def get_ready(self, progress: Progress, choose: Callable[[str], str | None]) -> str | None:
        """Begin a training; return its checkpoint, which ``choose`` returns for its name."""
        self._training, self._began = checkpoints.begin_training(FRAMEWORK), time.monotonic()
        self._progress, self._stop = progress, StopStep(progress.rank)
        self._handler, self._evaluation_began = signal.getsignal(signal.SIGTERM), None
        self._resumed_from = choose(self._training)
        self.is_ready = True
        return self._resumed_from

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        progress = get_progress()
        if progress is None or stage != "fit":
            return
        if not self.is_ready:
            self.get_ready(progress, lambda _: None)
        self.is_ready = False
        self._report_saves(trainer)

    @_in_run
    def _report_saves(self, progress: Progress, trainer: Any) -> None:
        """Report the saves of ``trainer``, whoever calls its ``save_checkpoint``: no hook of a callback comes after."""
        original = trainer.save_checkpoint
        if hasattr(original, "reports"):  # of an earlier call of fit
            return
        report = guarded(self._report_save)

        @functools.wraps(original)
        def save_checkpoint(filepath: Any, weights_only: Any = None, *args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = original(filepath, weights_only, *args, **kwargs)
            if not weights_only:
                report(trainer, str(filepath), began)
            return result

        save_checkpoint.reports = self  # type: ignore[attr-defined]
        trainer.save_checkpoint = save_checkpoint

    def _report_save(self, trainer: Any, path: str, began: float) -> None:
        progress = get_progress()  # ModelCheckpoint may save after on_train_end
        if progress is not None and progress.framework == FRAMEWORK and trainer.state.fn == "fit":
            reason = "stop" if os.path.dirname(path) == _stop_folder(progress) else "interval"
            progress.record_checkpoint(path, time.monotonic() - began, reason, self._training)

    @_in_run_to_stop
    def on_train_start(self, progress: Progress, trainer: Any) -> None:
        progress.framework = FRAMEWORK
        if self._resumed_from and trainer.global_step:
            progress.record_restore(trainer.global_step, self._resumed_from, time.monotonic() - self._began)
        progress.step = trainer.global_step
        # Lightning's handler ends the training without a save, and broadcasts from within the handler.
        self._stop.offer(FRAMEWORK, handler=self._handler)
        progress.begin()

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        progress = self._progress
        if progress is not None and self._end_step(trainer):
            folder = _stop_folder(progress)
            path = os.path.join(folder, f"step-{trainer.global_step}.ckpt")
            trainer.save_checkpoint(path)
            if progress.rank.rank == 0:
                guarded(_remove_older)(folder, path)
            # What Lightning itself raises to end a training at SIGTERM.
            raise importlib.import_module(f"{self.package}.utilities.exceptions").SIGTERMException

    @_in_run_to_stop
    def _end_step(self, progress: Progress, trainer: Any) -> bool:
        step = trainer.global_step
        if step == progress.step:  # gradients are accumulated
            return False
        progress.end_step(step)
        if step % max(1, trainer.log_every_n_steps) == 0:  # as for the loggers: reading a value waits for the GPU
            progress.log({name: float(value) for name, value in trainer.logged_metrics.items()})
        if not self._stop.is_reached(step):
            return False
        progress.record_stop(step)
        progress.enter(heartbeat.CHECKPOINT)
        return True

    @_in_run
    def on_validation_start(self, progress: Progress, trainer: Any) -> None:
        self._evaluation_began = time.monotonic()
        if progress.framework == FRAMEWORK:
            progress.enter(heartbeat.EVALUATION)

    @_in_run
    def on_validation_end(self, progress: Progress, trainer: Any) -> None:
        if self._evaluation_began is not None and progress.framework == FRAMEWORK:
            progress.record_evaluation(time.monotonic() - self._evaluation_began)
        self._evaluation_began = None

    @_in_run
    def on_train_end(self, progress: Progress, trainer: Any) -> None:
        self._stop.withdraw()
        progress.finish()
        self._progress = None
