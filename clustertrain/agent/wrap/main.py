"""The parts of a step's tasks in ``clustertrain wrap``: its first task, those of the other nodes, and the rest."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace

from clustertrain import fsio
from clustertrain.agent.batch_process import BatchProcess, StepProcess
from clustertrain.agent.claim import Claim, claim_attempt, identify_job
from clustertrain.agent.signals import Signals
from clustertrain.agent.wrap import node
from clustertrain.agent.wrap.node_tasks import NodeTasks, wait_for_first_task
from clustertrain.agent.wrap.rank_output import RankOutput
from clustertrain.errors import EXIT_FAILED, EXIT_SUCCESS, ClusterTrainError, UnsuitableEnvironment
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.scheduler.slurm import BATCH_PROCESS_TIMEOUT_S, SlurmBackend
from clustertrain.scheduler.slurm_step import StepTask
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.wrapped_run import open_wrapped_run


class WrapProcess(BatchProcess):
    """The batch process of a run in the user's own batch script. The job step is the one that it runs in."""

    def __init__(self, task: StepTask, run: RunDir, backend: SlurmBackend, claim: Claim, signals: Signals) -> None:
        super().__init__(run, load_spec(run), backend, claim, signals)
        self._task = task

    def _start_step(self, step_argv: Sequence[str]) -> StepProcess:
        return node.StepAgents(self._task, self.run, self.attempt)


def run_task(request: SubmitRequest, task: StepTask) -> int:
    """Run the part of this task in the step to its end, and return its exit code.

    Raises:
        ClusterTrainError: the command is refused, or the run cannot start.
    """
    signals = Signals()
    if task.local_rank:
        return wait_for_first_task(task)
    tasks = NodeTasks(task)
    exit_code = EXIT_FAILED
    try:
        tasks.gather()
        exit_code = _run_first_task(request, task, signals) if task.is_first else node.run_node(task, signals)
        return exit_code
    except ClusterTrainError as e:
        exit_code = e.exit_code
        raise
    finally:
        tasks.release(exit_code)


def _run_first_task(request: SubmitRequest, task: StepTask, signals: Signals) -> int:
    start = node.StepStart()
    backend = SlurmBackend(BATCH_PROCESS_TIMEOUT_S)
    try:
        _check_slurm_commands()
        wrapped = open_wrapped_run(request, task, backend)
        run = wrapped.run
        for note in wrapped.notes:
            print(f"clustertrain: {note}", file=sys.stderr, flush=True)
        if wrapped.is_complete:
            print(f"clustertrain: run {run.id} of this command has completed before: nothing to do", flush=True)
            start = node.StepStart(exit_code=EXIT_SUCCESS)
            return EXIT_SUCCESS
        fsio.set_group_umask(run.path)
        identity = replace(identify_job(os.environ, backend), nodes=task.nodes, own_script=True)
        claim = claim_attempt(run, identity, backend)
        start = node.StepStart(run=run.id, attempt=claim.attempt.n)
    except ClusterTrainError as e:
        start = node.StepStart(exit_code=e.exit_code)
        raise
    finally:
        node.publish_start(task, start)
    return _run_attempt(WrapProcess(task, run, backend, claim, signals))


def _check_slurm_commands() -> None:
    missing = [name for name in ("scontrol", "squeue") if shutil.which(name) is None]
    if missing:
        raise UnsuitableEnvironment(
            f"{' and '.join(missing)}: not installed here (inside a container?), and the requeue needs them",
            fix="start the container in the command: srun clustertrain wrap -- apptainer exec IMAGE COMMAND",
        )


def _run_attempt(process: WrapProcess) -> int:
    run, attempt = process.run, process.attempt
    exit_code = EXIT_FAILED
    print(f"clustertrain: run {run.id}, attempt {attempt.n}: clustertrain status {run.id}", flush=True)
    if problem := process.backend.find_requeue_problem(process.job_id):
        print(f"clustertrain: note: the run will not be requeued: {problem}", file=sys.stderr, flush=True)
    output = RankOutput(attempt.rank_log(0))
    output.start()
    try:
        budget_code = process.stop_if_budget_spent()
        exit_code = process.main(()) if budget_code is None else budget_code
    finally:
        output.end()
        node.report_exit(attempt, exit_code)
    return exit_code
