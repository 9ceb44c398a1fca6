"""``plan --find-micro-batch``: short trials of the trainer's step with growing micro-batches, on this machine.

Each trial is a new torchrun in a temporary run folder: it runs the code of a real run, and its errors do not affect the
next trial. :mod:`clustertrain.plan.search.micro_batch` chooses the trials and evaluates them.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clustertrain import clock, proc, schema, settings
from clustertrain.agent import scratch_run
from clustertrain.agent.node_result import RankObservations, build_node_result, read_rank_records
from clustertrain.errors import EXIT_CONFIG, ClusterTrainError, ConfigError, UnsuitableEnvironment, UsageError
from clustertrain.plan.cost.memory import GIB
from clustertrain.plan.layout import Batch
from clustertrain.plan.request import DEFAULT_CPU_GIB
from clustertrain.plan.search.micro_batch import (
    Trial,
    TrialMeasurement,
    TrialSearch,
    best_trial,
    build_trial_search,
    evaluate_trial,
)
from clustertrain.run.results import NodeResult
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import rendezvous, torchrun
from clustertrain.submit import checks
from clustertrain.submit.preflight import data
from clustertrain.submit.prepared_run import PreparedRun

POLL_S = 0.1
TRIAL_TIMEOUT_S = 900.0
# NCCL and cuBLAS report it with other errors than OutOfMemoryError.
_OOM_MESSAGES = ("out of memory", "cublas_status_alloc_failed")
_ROOT_CAUSE_SIGKILL = re.compile(r"Root Cause.*?exitcode\s*: -9\b", re.DOTALL)


@dataclass
class MicroBatchSearchResult:
    """The trials of a search."""

    description: str
    """How the trials relate to the plan."""
    trials: list[Trial] = field(default_factory=list)
    error: ClusterTrainError | None = None
    """The error, other than out of memory, that ended the search early."""

    @property
    def recommended(self) -> Trial | None:
        return best_trial(self.trials)


def find_micro_batch(
    prepared: PreparedRun, on_progress: Callable[[str], None], environ: Mapping[str, str] = os.environ
) -> MicroBatchSearchResult:
    """Try growing micro-batches on the ranks of this machine.

    It ends all processes that it started, also on Ctrl-C, SIGTERM and SIGHUP, which raise KeyboardInterrupt.

    Args:
        on_progress: called with lines about the progress; each trial takes seconds to minutes.

    Raises:
        UsageError: the run has a script or a container.
        UnsuitableEnvironment: this process is not on a node of an allocation, or the job's Python lacks torch.
        ConfigError: the data cannot be used, or this machine's ranks cannot represent the layout.
    """
    checks.check_job_python(prepared)
    spec, plan = prepared.spec, prepared.plan
    ranks = _local_world_size(prepared, environ)
    search, description = build_trial_search(plan, spec.recipe, ranks)
    note = data.check_data(prepared)
    if note:
        on_progress(f"note: {note}")
    result = MicroBatchSearchResult(description)
    on_progress(f"on {description}")
    with scratch_run.interruptible() as raise_if_interrupted:
        while (micro_batch := search.next_micro_batch(result.trials)) is not None:
            on_progress(f"micro_batch {micro_batch} ...")
            split = search.build_batch(micro_batch, spec.recipe.tokens_per_sample)
            try:
                result.trials.append(_run_trial(prepared, search, split, environ, raise_if_interrupted))
                on_progress(f"  {result.trials[-1].outcome.replace('_', ' ')}")
            except ClusterTrainError as e:
                result.error = e
                break
    return result


def _local_world_size(prepared: PreparedRun, environ: Mapping[str, str]) -> int:
    """Return how many ranks of the plan this machine has.

    Raises:
        UsageError: the run has a script or a container.
        UnsuitableEnvironment: this process is not on a node of an allocation.
    """
    job = prepared.spec.job
    if prepared.spec.script is not None:
        raise UsageError(
            "--find-micro-batch tries the step of the built-in trainer; a script has its own",
            fix="use a recipe; model.entry names your own module",
        )
    if job.container:
        raise UsageError(
            "--find-micro-batch runs on the node itself, without the container of the job",
            fix='run it inside the image, or add --container ""',
        )
    if job.backend == "local":
        return prepared.plan.world_size  # one machine stands for all nodes
    if settings.SLURM_JOB_ID not in environ:
        raise UnsuitableEnvironment(
            "--find-micro-batch trains a few steps, which needs an allocation",
            fix="run it in one (salloc, then srun --ntasks=1 clustertrain plan ...), or use --backend local here",
        )
    if settings.SLURMD_NODENAME not in environ:
        raise UnsuitableEnvironment(
            "--find-micro-batch: this shell holds an allocation but is not on one of its nodes",
            fix="put `srun --nodes=1 --ntasks=1` before the command, with the GPUs and cores of a node",
        )
    return job.gpus


def _run_trial(
    prepared: PreparedRun,
    search: TrialSearch,
    split: Batch,
    environ: Mapping[str, str],
    raise_if_interrupted: Callable[[], None],
) -> Trial:
    """Run one trial; raise ClusterTrainError for a failure other than out of memory."""
    with tempfile.TemporaryDirectory(prefix="clustertrain-probe-", ignore_cleanup_errors=True) as folder:
        run = scratch_run.write_run_dir(prepared, search.layout, split, Path(folder))
        result, output = _run_ranks(prepared, search, run, environ, raise_if_interrupted)
        if result.ending == "completed":
            files = (run.path / f"probe-{r}.json" for r in range(search.layout.world_size))
            measured = [schema.decode(f.read_bytes(), TrialMeasurement) for f in files]
            return evaluate_trial(measured, search, split, DEFAULT_CPU_GIB)
    if _is_out_of_memory(result, output):
        divides_batch = search.is_usable(split.micro_batch)
        return Trial(micro_batch=split.micro_batch, outcome="out_of_memory", divides_batch=divides_batch)
    error = ConfigError if result.exit_code == EXIT_CONFIG else ClusterTrainError
    raise error(f"the trial of micro_batch {split.micro_batch} failed: {result.message}")


def _run_ranks(
    prepared: PreparedRun,
    search: TrialSearch,
    run: RunDir,
    environ: Mapping[str, str],
    raise_if_interrupted: Callable[[], None],
) -> tuple[NodeResult, str]:
    """Run the ranks of one trial; return their result and the output of torchrun.

    Raises:
        ClusterTrainError: the ranks did not end in time.
    """
    attempt, ranks = run.attempt(1), list(range(search.layout.world_size))
    rdzv = rendezvous.publish(attempt.rendezvous, scratch_run.LOOPBACK)
    program = ("clustertrain.train.tools.micro_batch_probe", "--limit-bytes", str(int(DEFAULT_CPU_GIB * GIB)))
    argv = torchrun.build_command(rdzv, program, len(ranks), python=prepared.python.ranks.path, log_dir=attempt.logs)
    env, log = scratch_run.build_environment(prepared, run, environ), attempt.logs / "torchrun.log"
    has_timed_out = _FailureTimeout(run.path, ranks)

    def is_over() -> bool:
        raise_if_interrupted()
        return child.poll() is not None or has_timed_out()

    try:
        child = proc.start(argv, env=env, log=log, new_session=True)
        in_time = clock.wait_until(is_over, TRIAL_TIMEOUT_S, POLL_S)
    finally:
        exit_code = child.poll()
        proc.kill_descendants()
    child.wait()
    if not in_time:
        raise ClusterTrainError(f"the ranks took longer than {TRIAL_TIMEOUT_S:g} s")
    output = log.read_text(errors="replace")
    observations = RankObservations(launcher_exit_code=exit_code, log_tail=output if exit_code != 0 else None)
    return build_node_result("this machine", 0, ranks, read_rank_records(run.path, ranks), observations), output


class _FailureTimeout:
    """Timeout for the peers of a failed rank, which wait in a collective; a call returns whether it has expired."""

    def __init__(self, rank_dir: Path, ranks: list[int]) -> None:
        self._rank_dir, self._ranks = rank_dir, ranks
        self._failed_at: float | None = None

    def __call__(self) -> bool:
        if self._failed_at is None:
            if any(r.ending == "failed" for r in read_rank_records(self._rank_dir, self._ranks).values()):
                self._failed_at = clock.monotonic()
            return False
        return clock.monotonic() - self._failed_at > torchrun.FAILURE_GRACE_S


def _is_out_of_memory(result: NodeResult, output: str) -> bool:
    """Return whether a trial ran out of memory; ``output`` is that of torchrun."""
    messages = [r.error.message.lower() for r in result.ranks if r.error is not None]
    if result.kind == "out_of_memory" or any(phrase in message for phrase in _OOM_MESSAGES for message in messages):
        return True
    # Host memory: the kernel killed a rank, which only torchrun reports. Its peers see a closed connection.
    return result.kind in ("killed", "communication") and _ROOT_CAUSE_SIGKILL.search(output) is not None
