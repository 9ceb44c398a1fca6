"""What a session holds while it is open: the groups of ranks, the word of a stop, the record, the checkpoints."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn

from clustertrain import clock
from clustertrain.checkpoint.core.failures import TooLate
from clustertrain.checkpoint.format.fence import TakenOver
from clustertrain.errors import EXIT_STOPPED
from clustertrain.run import heartbeat
from clustertrain.run.events import EventLog
from clustertrain.train.core import context as environment
from clustertrain.train.core import out_of_memory, result, seeds
from clustertrain.train.core.stop import StopAgreement, StopFlag
from clustertrain.train.data.loader import Loader
from clustertrain.train.distributed import data_parallel, mesh
from clustertrain.train.distributed.precision import LossScale, apply_matmul_precision
from clustertrain.train.optim import param_info
from clustertrain.train.profiling.profiler import Profiler
from clustertrain.train.session.budget import Spending
from clustertrain.train.session.checkpointing import Keeping
from clustertrain.train.session.exit import Leaving
from clustertrain.train.session.heartbeat import Marks
from clustertrain.train.session.recorder import Recorder
from clustertrain.train.stability.warnings import Warnings
from clustertrain.train.step.sample_positions import Places
from clustertrain.train.step.train_step import TrainStep

DEFAULT_SEED = 1


class Opened:
    """Entered it has joined the other ranks; left it has said how this one ended."""

    def __init__(self, checkpoint_dir: Path | None, seed: int | None, device: str | None, timeout_s: float) -> None:
        self._checkpoint_dir = checkpoint_dir
        self._asked_seed = seed
        self._asked_device = device
        self._timeout_s = timeout_s
        self.step = 0
        self.tokens_per_step = 0
        self._loaders: list[Loader] = []
        self._places = Places(self._loaders)
        self._finished = False
        self._model: nn.Module | None = None
        self._parameters: param_info.Parameters | None = None
        self._thaws: dict[str, int] = {}
        self._train_step: TrainStep | None = None
        self._evaluated: dict[str, float] = {}  # by the step under way

    def __enter__(self) -> Self:
        t_begin = clock.now()
        self._context = context = environment.of_environment(device=self._asked_device)
        self._marks = Marks(context.rank_dir, context.rank, context.world_size, self._forward_s)
        self._result = result.current()
        self._flag = StopFlag(context.rank_dir)
        self._flag.install()
        threads = mesh.choose_threads(context)
        torch.set_num_threads(threads)
        self._groups = mesh.open_groups(context, self._timeout_s)
        self._spending = Spending(context, self._event)
        also = {"settle": self._in_trouble, "save": self._overdue, "budget": self._spending.over}
        self._agreement = StopAgreement(self._flag.__bool__, self._groups.stop, also)
        self._leaving = Leaving(context, self._flag, self._agreement)
        self.rank, self.local_rank, self.world_size = context.rank, context.local_rank, context.world_size
        self.is_main = context.rank == 0
        self.device = self._result.device = context.device
        self.mesh = self._groups.mesh
        self._choose_numbers(context)
        self._open_record(context, t_begin, threads)
        self._keeping = Keeping(
            context, self._groups, self._checkpoint_dir, threads, self._result, self._event, self._flag.deadline
        )
        return self

    def _choose_numbers(self, context: environment.RankContext) -> None:
        """Random ones, and in which precision it is computed."""
        recipe = context.spec.recipe if context.spec is not None else None
        recipe_seed = recipe.train.seed if recipe is not None else DEFAULT_SEED
        self.seed = recipe_seed if self._asked_seed is None else self._asked_seed
        apply_matmul_precision(context)
        if recipe is not None and recipe.train.deterministic:
            seeds.be_deterministic()
        self._loss_scale: LossScale | None = None
        if context.precision == "fp16":
            batch = context.batch
            self._loss_scale = LossScale(
                batch.tokens_per_step * batch.micro_batch // batch.global_batch if batch and batch.global_batch else 1
            )
        seeds.seed_all(self.seed)  # the same on all ranks, so that a model built now is

    def _open_record(self, context: environment.RankContext, t_begin: float, threads: int) -> None:
        recording = self.is_main and context.run is not None and context.attempt is not None
        self._events = EventLog(context.attempt.events_of("rank-0")) if recording and context.attempt else None
        self._warnings = Warnings(context.stability, self._event)
        self._recorder = Recorder(context, self._marks, self._loaders, self._warnings)
        self._metrics = self._recorder.metrics
        self._event(
            "session_started",
            t_begin=t_begin,
            world_size=self.world_size,
            device=self.device.type,
            strategy=context.layout.strategy,
            layout=context.layout.words(),
            threads=threads,
        )
        self._profiler = self._chosen_profiler(context)

    def _chosen_profiler(self, context: environment.RankContext) -> Profiler:
        steps = context.spec.recipe.profiled_steps if context.spec else range(0)
        folder = context.run.profiles if context.run is not None and self.is_main else None
        return Profiler(steps, folder, context.attempt.n if context.attempt else 0, self.device, self._event)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        t_begin = clock.now()
        self._marks.enter(heartbeat.SHUTDOWN)
        for loader in self._loaders:
            loader.close()
        try:
            asks_again = isinstance(error, SystemExit) and error.code == EXIT_STOPPED
            if error is None or asks_again or (isinstance(error, SystemExit) and not error.code):
                self._leave_in_order(asks_again)
            elif self._leaving.explains(error):
                self._leave_because_of(error)
            else:
                out_of_memory.explain(error, self._context)
                data_parallel.explain_unused(error, self._model)
                self._keeping.close()  # before the record: it says what is committed, and the agent ends what runs on
                self._result.failed(error)
        finally:
            self._close(t_begin)

    def _leave_because_of(self, error: BaseException) -> NoReturn:
        if isinstance(error, TakenOver):
            self._result.why = error.message
        self._keeping.close()
        self._result.stopped()
        raise SystemExit(self._leaving.code(resumable=self._result.committed_step is not None)) from error

    def _leave_in_order(self, asks_again: bool) -> None:
        self._metrics.close()
        if self._result.ending != "stopped":
            self._agreement.drain()
            late = False
            try:
                self._keeping.settle()  # of a loop that was left before its last step
            except TooLate as e:
                self._keeping.given_up(self.step, e)
                late = True
            except TakenOver as e:
                self._leave_because_of(e)
            self._barrier()
            # A loop of the script's own that left because of poll() has not done all its steps.
            stopped = asks_again or late or (self._agreement.agreed and not self._finished)
            self._result.stopped() if stopped else self._result.left()
        mesh.close_groups()

    def _close(self, t_begin: float) -> None:
        """Without taking the groups down after a failure: that may wait for peers which are gone."""
        with suppress(RuntimeError):  # a device in error would hide the first exception behind a second
            self._metrics.close(wait=False)
        with suppress(Exception):  # whatever a profile fails of must not hide how the run ended
            self._profiler.close()
        self._keeping.close()
        ending, skipped = self._result.ending, self._recorder.skipped
        self._event("session_ended", step=self.step, ending=ending, t_begin=t_begin, skipped_steps=skipped)
        if self._events is not None:
            self._events.close()
        self._marks.close()
        self._flag.uninstall()

    def _in_trouble(self) -> bool:
        return self._keeping.in_trouble()

    def _overdue(self) -> bool:
        return self._keeping.overdue()

    def _barrier(self) -> None:
        if self._groups.stop is not None:
            dist.barrier(group=self._groups.stop)

    def _forward_s(self) -> float:
        return self._train_step.forward.sum_s() if self._train_step is not None else math.nan

    def _event(self, name: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.write(name, **fields)
