"""The parts of an open session: :func:`open_runtime` builds them, :func:`close_runtime` closes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from clustertrain import clock, fsio
from clustertrain.checkpoint.core.failures import DeadlineExceeded
from clustertrain.checkpoint.format.fence import AttemptSuperseded
from clustertrain.errors import EXIT_STOPPED
from clustertrain.run import heartbeat
from clustertrain.run.events import EventLog
from clustertrain.run.rank_python import describe_python
from clustertrain.train.core import result, seeds
from clustertrain.train.core.context import RankContext, context_from_environment
from clustertrain.train.core.result import RankResultWriter
from clustertrain.train.core.stop import StopAgreement, StopFlag
from clustertrain.train.data.loader import Loader
from clustertrain.train.distributed import attention_kernels, data_parallel, mesh
from clustertrain.train.distributed.mesh import ProcessGroups
from clustertrain.train.distributed.precision import LossScale, apply_matmul_precision
from clustertrain.train.profiling.profiler import Profiler
from clustertrain.train.session.budget import BudgetTracker
from clustertrain.train.session.checkpointing import SessionCheckpointer
from clustertrain.train.session.exit import ExitPolicy, add_memory_note
from clustertrain.train.session.heartbeat import ProgressReporter
from clustertrain.train.session.recorder import MetricsProcessor
from clustertrain.train.stability.warnings import WarningReporter
from clustertrain.train.step.sample_positions import SamplePositions
from clustertrain.train.step.train_step import TrainStep

DEFAULT_SEED = 1


@dataclass(frozen=True)
class SessionOptions:
    """Arguments of :func:`clustertrain.session`; None: the run or the plan decides."""

    checkpoint_dir: Path | None = None
    seed: int | None = None
    device: str | None = None
    timeout_s: float = 600.0


@dataclass
class SessionState:
    """The part of a session that changes from step to step."""

    step: int = 0
    """Optimizer steps done."""
    tokens_per_step: int = 0
    """Tokens per step over all ranks, set by the script; 0: unknown."""
    model: nn.Module | None = None
    """The model that ``session.parallelize`` returned last."""
    train_step: TrainStep | None = None
    eval_results: dict[str, float] = field(default_factory=dict)
    """Results of the evaluation in the current step; empty if there was none."""
    load_initial_weights: Callable[[], None] | None = None
    """Loads the pretrained weights, which the checkpoint to resume from replaces; called if there is none after
    all."""
    prepare_start: Callable[[], None] | None = None
    """Called before the first step of a run that starts from its initial weights."""
    is_finished: bool = False
    """A loop has done all its steps."""

    def forward_s(self) -> float:
        """Return the seconds spent in forward passes so far, NaN without an optimizer."""
        return self.train_step.forward_timer.sum_s() if self.train_step is not None else math.nan


class SessionEvents:
    """The events of this rank, which are dropped on ranks other than 0 and outside a run."""

    def __init__(self, context: RankContext) -> None:
        attempt = context.attempt if context.rank == 0 and context.run is not None else None
        self._log = EventLog(attempt.events_path("rank-0")) if attempt is not None else None

    def emit(self, name: str, **fields: Any) -> None:
        """Append the event ``name``, durably."""
        if self._log is not None:
            self._log.write(name, **fields)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


@dataclass(frozen=True, eq=False)
class SessionRuntime:
    """Everything that a session holds while it is open. What changes from step to step is in ``state``."""

    context: RankContext
    groups: ProcessGroups
    seed: int
    state: SessionState
    flag: StopFlag
    agreement: StopAgreement
    exit_policy: ExitPolicy
    budget: BudgetTracker
    result: RankResultWriter
    events: SessionEvents
    progress: ProgressReporter
    warning_reporter: WarningReporter
    metrics_processor: MetricsProcessor
    profiler: Profiler
    checkpointer: SessionCheckpointer
    loss_scale: LossScale | None
    """Present for fp16 only."""
    loaders: list[Loader]
    """The session's loaders; ``session.loader`` appends to it."""
    sample_positions: SamplePositions
    forced_attention: AbstractContextManager[Any]
    """Entered while the session is open: ``train.attention_backend``."""

    @property
    def is_main(self) -> bool:
        return self.context.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks on the CPU."""
        if self.groups.stop is not None:
            self.groups.stop.barrier()


def open_runtime(options: SessionOptions, state: SessionState) -> SessionRuntime:
    """Join the other ranks and build everything that the session needs. Collective.

    Raises:
        ConfigError: the plan, the ranks and the device do not match.
        UnsuitableEnvironment: cuda was requested but cannot be used.
        UsageError: torch.distributed is already initialized.
    """
    t_begin = clock.now()
    context = context_from_environment(device=options.device)
    progress = ProgressReporter(context.rank_dir, context.rank, context.world_size, state.forward_s)
    rank_result = result.current()
    flag = StopFlag(context.rank_dir)
    flag.install()
    threads = mesh.choose_threads(context)
    torch.set_num_threads(threads)
    groups = mesh.open_groups(context, options.timeout_s)
    rank_result.device = context.device
    seed = _set_seed_and_precision(context, options.seed)
    forced_attention = attention_kernels.force_backend(context)
    forced_attention.__enter__()
    events = SessionEvents(context)
    budget = BudgetTracker(context, events.emit)
    checkpointer = SessionCheckpointer(
        context, groups, options.checkpoint_dir, threads, rank_result, events.emit, flag.deadline
    )
    agreement = StopAgreement(
        flag.__bool__,
        groups.stop,
        {"failed_save": checkpointer.has_failed_save, "save": checkpointer.is_overdue, "budget": budget.should_stop},
    )
    loaders: list[Loader] = []
    warning_reporter = WarningReporter(context.stability, events.emit)
    runtime = SessionRuntime(
        context=context,
        groups=groups,
        seed=seed,
        state=state,
        flag=flag,
        agreement=agreement,
        exit_policy=ExitPolicy(context, flag, agreement),
        budget=budget,
        result=rank_result,
        events=events,
        progress=progress,
        warning_reporter=warning_reporter,
        metrics_processor=MetricsProcessor(context, progress, loaders, warning_reporter),
        profiler=_build_profiler(context, events),
        checkpointer=checkpointer,
        loss_scale=_build_loss_scale(context),
        loaders=loaders,
        sample_positions=SamplePositions(loaders),
        forced_attention=forced_attention,
    )
    _record_python(context)
    events.emit(
        "session_started",
        t_begin=t_begin,
        world_size=context.world_size,
        device=context.device.type,
        strategy=context.layout.strategy,
        layout=context.layout.describe(),
        threads=threads,
    )
    return runtime


def _record_python(context: RankContext) -> None:
    if context.rank or context.attempt is None or context.run is None:
        return
    container = context.spec.job.container if context.spec is not None else ""
    with suppress(OSError):  # a record for readers, without which the run continues
        fsio.write_json(context.attempt.rank_python, describe_python(container))


def _set_seed_and_precision(context: RankContext, requested_seed: int | None) -> int:
    """Seed all random generators, set the matmul precision and return the seed."""
    recipe = context.spec.recipe if context.spec is not None else None
    recipe_seed = recipe.train.seed if recipe is not None else DEFAULT_SEED
    seed = recipe_seed if requested_seed is None else requested_seed
    apply_matmul_precision(context)
    if recipe is not None and recipe.train.deterministic:
        seeds.enable_determinism()
    seeds.seed_everything(seed)  # the same on all ranks, so that a model built now is too
    return seed


def _build_loss_scale(context: RankContext) -> LossScale | None:
    if context.precision != "fp16":
        return None
    batch = context.batch
    return LossScale(
        batch.tokens_per_step * batch.micro_batch // batch.global_batch if batch and batch.global_batch else 1
    )


def _build_profiler(context: RankContext, events: SessionEvents) -> Profiler:
    steps = context.spec.recipe.profiled_steps if context.spec else range(0)
    folder = context.run.profiles if context.run is not None and context.rank == 0 else None
    return Profiler(steps, folder, context.attempt.n if context.attempt else 0, context.device, events.emit)


def close_runtime(runtime: SessionRuntime, error: BaseException | None) -> None:
    """Record how this rank ended and close everything. Collective unless ``error`` is a failure.

    Raises:
        SystemExit: the end of the job caused ``error``; the rank exits like a stopped one.
    """
    t_begin = clock.now()
    runtime.progress.enter_phase(heartbeat.SHUTDOWN)
    for loader in runtime.loaders:
        loader.close()
    try:
        requests_requeue = isinstance(error, SystemExit) and error.code == EXIT_STOPPED
        if error is None or requests_requeue or (isinstance(error, SystemExit) and not error.code):
            _exit_cleanly(runtime, requests_requeue)
        elif runtime.exit_policy.is_shutdown_error(error):
            _exit_on_shutdown_error(runtime, error)
        else:
            _record_failure(runtime, error)
    finally:
        _release(runtime, t_begin)


def _exit_cleanly(runtime: SessionRuntime, requests_requeue: bool) -> None:
    runtime.metrics_processor.writer.close()
    if runtime.result.ending != "stopped":
        runtime.agreement.wait_for_pending()
        is_late = False
        try:
            runtime.checkpointer.wait_for_saves()  # pending if the script left its loop before the last step
        except DeadlineExceeded as e:
            runtime.checkpointer.report_abandoned_save(runtime.state.step, e)
            is_late = True
        except AttemptSuperseded as e:
            _exit_on_shutdown_error(runtime, e)
        runtime.barrier()
        # A script's loop that ended because of poll() has not done all its steps.
        is_stopped = requests_requeue or is_late or (runtime.agreement.agreed and not runtime.state.is_finished)
        runtime.result.record_stopped() if is_stopped else runtime.result.record_session_closed()
    mesh.close_groups(runtime.groups)


def _exit_on_shutdown_error(runtime: SessionRuntime, error: BaseException) -> NoReturn:
    if isinstance(error, AttemptSuperseded):
        runtime.result.reason = error.message
    runtime.checkpointer.close()
    runtime.result.record_stopped()
    raise SystemExit(runtime.exit_policy.exit_code(resumable=runtime.result.committed_step is not None)) from error


def _record_failure(runtime: SessionRuntime, error: BaseException) -> None:
    add_memory_note(error, runtime.context)
    data_parallel.explain_unused(error, runtime.state.model)
    attention_kernels.explain_missing_kernel(error, runtime.context)
    mesh.explain_second_init(error)
    # Close before writing the record, which names the committed step: the agent kills processes that outlive theirs.
    runtime.checkpointer.close()
    runtime.result.record_failure(error)


def _release(runtime: SessionRuntime, t_begin: float) -> None:
    """Close everything but the process groups: after a failure, closing those might wait for peers that are gone."""
    with suppress(RuntimeError):  # a failed device would raise again and hide the first exception
        runtime.metrics_processor.writer.close(wait=False)
    with suppress(Exception):  # an error of the profiler must not hide how the run ended
        runtime.profiler.close()
    runtime.checkpointer.close()
    runtime.events.emit(
        "session_ended",
        step=runtime.state.step,
        ending=runtime.result.ending,
        t_begin=t_begin,
        skipped_steps=runtime.metrics_processor.skipped_steps,
    )
    runtime.events.close()
    runtime.progress.close()
    runtime.forced_attention.__exit__(None, None, None)
    runtime.flag.uninstall()
