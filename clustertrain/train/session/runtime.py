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
from clustertrain.checkpoint.core.failures import DeadlineExceeded
from clustertrain.checkpoint.format.fence import AttemptSuperseded
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
from clustertrain.train.session.budget import BudgetTracker
from clustertrain.train.session.checkpointing import SessionCheckpointer
from clustertrain.train.session.exit import ExitPolicy
from clustertrain.train.session.heartbeat import ProgressReporter
from clustertrain.train.session.recorder import MetricsProcessor
from clustertrain.train.stability.warnings import WarningReporter
from clustertrain.train.step.sample_positions import SamplePositions
from clustertrain.train.step.train_step import TrainStep

DEFAULT_SEED = 1


class SessionRuntime:
    """Entered it has joined the other ranks; left it has said how this one ended."""

    def __init__(self, checkpoint_dir: Path | None, seed: int | None, device: str | None, timeout_s: float) -> None:
        self._checkpoint_dir = checkpoint_dir
        self._requested_seed = seed
        self._requested_device = device
        self._timeout_s = timeout_s
        self.step = 0
        self.tokens_per_step = 0
        self._loaders: list[Loader] = []
        self._sample_positions = SamplePositions(self._loaders)
        self._is_finished = False
        self._model: nn.Module | None = None
        self._param_table: param_info.ParamTable | None = None
        self._unfreeze_steps: dict[str, int] = {}
        self._train_step: TrainStep | None = None
        self._eval_results: dict[str, float] = {}  # by the step under way

    def __enter__(self) -> Self:
        t_begin = clock.now()
        self._context = context = environment.context_from_environment(device=self._requested_device)
        self._progress = ProgressReporter(context.rank_dir, context.rank, context.world_size, self._get_forward_s)
        self._result = result.current()
        self._flag = StopFlag(context.rank_dir)
        self._flag.install()
        threads = mesh.choose_threads(context)
        torch.set_num_threads(threads)
        self._groups = mesh.open_groups(context, self._timeout_s)
        self._budget = BudgetTracker(context, self._emit_event)
        extra_flags = {
            "settle": self._has_failed_save,
            "save": self._is_save_overdue,
            "budget": self._budget.should_stop,
        }
        self._agreement = StopAgreement(self._flag.__bool__, self._groups.stop, extra_flags)
        self._exit_policy = ExitPolicy(context, self._flag, self._agreement)
        self.rank, self.local_rank, self.world_size = context.rank, context.local_rank, context.world_size
        self.is_main = context.rank == 0
        self.device = self._result.device = context.device
        self.mesh = self._groups.mesh
        self._set_seed_and_precision(context)
        self._open_logs(context, t_begin, threads)
        self._checkpointer = SessionCheckpointer(
            context, self._groups, self._checkpoint_dir, threads, self._result, self._emit_event, self._flag.deadline
        )
        return self

    def _set_seed_and_precision(self, context: environment.RankContext) -> None:
        """Random ones, and in which precision it is computed."""
        recipe = context.spec.recipe if context.spec is not None else None
        recipe_seed = recipe.train.seed if recipe is not None else DEFAULT_SEED
        self.seed = recipe_seed if self._requested_seed is None else self._requested_seed
        apply_matmul_precision(context)
        if recipe is not None and recipe.train.deterministic:
            seeds.enable_determinism()
        self._loss_scale: LossScale | None = None
        if context.precision == "fp16":
            batch = context.batch
            self._loss_scale = LossScale(
                batch.tokens_per_step * batch.micro_batch // batch.global_batch if batch and batch.global_batch else 1
            )
        seeds.seed_everything(self.seed)  # the same on all ranks, so that a model built now is

    def _open_logs(self, context: environment.RankContext, t_begin: float, threads: int) -> None:
        is_recording = self.is_main and context.run is not None and context.attempt is not None
        self._events = EventLog(context.attempt.events_path("rank-0")) if is_recording and context.attempt else None
        self._warning_reporter = WarningReporter(context.stability, self._emit_event)
        self._metrics_processor = MetricsProcessor(context, self._progress, self._loaders, self._warning_reporter)
        self._metrics_writer = self._metrics_processor.writer
        self._emit_event(
            "session_started",
            t_begin=t_begin,
            world_size=self.world_size,
            device=self.device.type,
            strategy=context.layout.strategy,
            layout=context.layout.describe(),
            threads=threads,
        )
        self._profiler = self._build_profiler(context)

    def _build_profiler(self, context: environment.RankContext) -> Profiler:
        steps = context.spec.recipe.profiled_steps if context.spec else range(0)
        folder = context.run.profiles if context.run is not None and self.is_main else None
        return Profiler(steps, folder, context.attempt.n if context.attempt else 0, self.device, self._emit_event)

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        t_begin = clock.now()
        self._progress.enter_phase(heartbeat.SHUTDOWN)
        for loader in self._loaders:
            loader.close()
        try:
            requests_restart = isinstance(error, SystemExit) and error.code == EXIT_STOPPED
            if error is None or requests_restart or (isinstance(error, SystemExit) and not error.code):
                self._exit_cleanly(requests_restart)
            elif self._exit_policy.is_shutdown_error(error):
                self._exit_on_error(error)
            else:
                out_of_memory.add_memory_note(error, self._context)
                data_parallel.explain_unused(error, self._model)
                # before the record: it says what is committed, and the agent ends what runs on
                self._checkpointer.close()
                self._result.record_failure(error)
        finally:
            self._close(t_begin)

    def _exit_on_error(self, error: BaseException) -> NoReturn:
        if isinstance(error, AttemptSuperseded):
            self._result.reason = error.message
        self._checkpointer.close()
        self._result.record_stopped()
        raise SystemExit(self._exit_policy.exit_code(resumable=self._result.committed_step is not None)) from error

    def _exit_cleanly(self, requests_restart: bool) -> None:
        self._metrics_writer.close()
        if self._result.ending != "stopped":
            self._agreement.wait_for_pending()
            is_late = False
            try:
                self._checkpointer.wait_for_saves()  # of a loop that was left before its last step
            except DeadlineExceeded as e:
                self._checkpointer.report_abandoned_save(self.step, e)
                is_late = True
            except AttemptSuperseded as e:
                self._exit_on_error(e)
            self._barrier()
            # A loop of the script's own that left because of poll() has not done all its steps.
            is_stopped = requests_restart or is_late or (self._agreement.agreed and not self._is_finished)
            self._result.record_stopped() if is_stopped else self._result.record_session_closed()
        mesh.close_groups()

    def _close(self, t_begin: float) -> None:
        """Without taking the groups down after a failure: that may wait for peers which are gone."""
        with suppress(RuntimeError):  # a device in error would hide the first exception behind a second
            self._metrics_writer.close(wait=False)
        with suppress(Exception):  # whatever a profile fails of must not hide how the run ended
            self._profiler.close()
        self._checkpointer.close()
        ending, skipped = self._result.ending, self._metrics_processor.skipped_steps
        self._emit_event("session_ended", step=self.step, ending=ending, t_begin=t_begin, skipped_steps=skipped)
        if self._events is not None:
            self._events.close()
        self._progress.close()
        self._flag.uninstall()

    def _has_failed_save(self) -> bool:
        return self._checkpointer.has_failed_save()

    def _is_save_overdue(self) -> bool:
        return self._checkpointer.is_overdue()

    def _barrier(self) -> None:
        if self._groups.stop is not None:
            dist.barrier(group=self._groups.stop)

    def _get_forward_s(self) -> float:
        return self._train_step.forward_timer.sum_s() if self._train_step is not None else math.nan

    def _emit_event(self, name: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.write(name, **fields)
