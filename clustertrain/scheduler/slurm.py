"""The Slurm backend: submission through submitit, everything else through Slurm's commands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from clustertrain import proc, reading, settings
from clustertrain.errors import CommandFailed, SchedulerError
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import slurm_parse
from clustertrain.scheduler.backend import ArraySubmission, Backend, JobStart, JobView, Submission
from clustertrain.scheduler.slurm_refusals import is_refusal

_JOB_ID = re.compile(r"\d+(_\d+)?")
# Variables that change the output or effect of the commands.
_CLIENT_PREFIXES = ("SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_", "SCANCEL_")
_INVALID_JOB_ID = "Invalid job id"


def client_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's commands: without the user's formats, times as epoch seconds."""
    env = settings.strip_allocation_env(environ)
    env = {name: value for name, value in env.items() if not name.startswith(_CLIENT_PREFIXES)}
    return {**env, "SLURM_TIME_FORMAT": "%s"}


# Short, since a user waits: without slurmctld, squeue retries for a minute.
COMMAND_TIMEOUT_S = 8.0
# Longer than Slurm's message timeout of 10 s. The batch process does not watch the step during a command.
BATCH_PROCESS_TIMEOUT_S = 20.0


class SlurmBackend(Backend):
    """Jobs in Slurm. Their ids are Slurm's; an array task is ``ARRAY_TASK``."""

    name = "slurm"

    def __init__(self, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s

    def sbatch_version(self) -> str | None:
        """Return the version of sbatch; None if it is not installed.

        Raises:
            CommandFailed: it does not answer or has no cluster; the message is its output.
        """
        if shutil.which("sbatch") is None:
            return None
        result = proc.run(["sbatch", "--version"], timeout_s=10.0, env=client_environ(os.environ))
        if not result.stdout.strip():
            raise CommandFailed("`sbatch --version` printed nothing")
        return result.stdout.strip()

    def submit(self, submission: Submission) -> str:
        options = [f"--{key}={value}" if value else f"--{key}" for key, value in submission.options.items()]
        return _sbatch(submission.run.path, options, submission.environ)

    def submit_array(self, array: ArraySubmission) -> list[str]:
        job_id = _sbatch(array.folder, [], array.environ)
        return [f"{job_id}_{task}" for task in range(len(array.runs))]

    def advice(self, partition: str) -> list[str]:
        # Without a readable answer there are no notes; the submission continues.
        result = _run_command(
            "scontrol", "--oneliner", "show", "partition", *([partition] if partition else []), timeout_s=self.timeout_s
        )
        return slurm_parse.preemption_advice(result.stdout, partition) if result.returncode == 0 else []

    def cancel(self, *job_ids: str) -> None:
        # Not submitit's Job.cancel: docs/decisions/0008.
        result = _run_command("scancel", *map(_check_job_id, job_ids), timeout_s=self.timeout_s)
        error_lines = result.stderr.splitlines()
        failures = [line for line in error_lines if _INVALID_JOB_ID not in line]
        if result.returncode and (failures or not error_lines):
            raise CommandFailed(
                f"scancel {' '.join(job_ids)} failed: {slurm_parse.format_error(chr(10).join(failures))}"
            )

    def requeue(self, job_id: str) -> None:
        result = _run_command("scontrol", "requeue", _check_job_id(job_id), timeout_s=self.timeout_s)
        if result.returncode:
            message = slurm_parse.format_error(result.stderr or result.stdout)
            if is_refusal(message):
                raise SchedulerError(f"Slurm did not requeue job {job_id}: {message}")
            raise CommandFailed(f"Slurm did not answer the requeue of job {job_id}: {message}")

    def read_job_facts(self, job_id: str) -> slurm_parse.JobFacts:
        """Return what Slurm knows of a job; the defaults without an answer."""
        argv = ("scontrol", "show", "job", _check_job_id(job_id))
        with contextlib.suppress(CommandFailed):
            return slurm_parse.parse_job_facts(_run_command(*argv, timeout_s=self.timeout_s).stdout)
        return slurm_parse.JobFacts()

    def find_requeue_problem(self, job_id: str) -> str:
        facts = self.read_job_facts(job_id)
        if not facts.has_script:
            return "the job has no batch script (salloc or srun)"
        reason = "the job was submitted with --no-requeue, or the cluster has JobRequeue=0: add #SBATCH --requeue"
        return "" if facts.may_requeue else reason

    def restart(self, job_id: str, submission: Submission) -> str:
        # Slurm may have accepted an earlier submission without an answer; another one would be a second job.
        new_job_id = self._find_newer_job(submission.run, job_id) or self.submit(submission)
        # Otherwise Slurm may requeue this job when it finds its node down, and two jobs would run it.
        with contextlib.suppress(CommandFailed):
            _run_command("scontrol", "update", f"JobId={_check_job_id(job_id)}", "Requeue=0", timeout_s=self.timeout_s)
        return new_job_id

    def _find_newer_job(self, run: RunDir, job_id: str) -> str | None:
        """Return the newest pending or running job of the run after ``job_id``, found by its working directory."""
        result = _run_command(
            "squeue", "--noheader", f"--user={os.getuid()}", "--Format=JobID:|,WorkDir:|", timeout_s=self.timeout_s
        )
        if result.returncode:
            raise CommandFailed(f"squeue failed: {slurm_parse.format_error(result.stderr)}")
        lines = (line.rstrip("|").split("|", 1) for line in result.stdout.splitlines())
        ids = [
            int(fields[0]) for fields in lines if reading.is_unsigned_int(fields[0]) and fields[1:] == [str(run.path)]
        ]
        newest = max(ids, default=0)
        return str(newest) if newest > int(_check_job_id(job_id).partition("_")[0]) else None

    def current_job_id(self, environ: Mapping[str, str]) -> str | None:
        array, task = environ.get(settings.SLURM_ARRAY_JOB_ID), environ.get(settings.SLURM_ARRAY_TASK_ID)
        # A task also has a plain job id, but a requeue by that id affects other tasks.
        return f"{array}_{task}" if array and task else environ.get(settings.SLURM_JOB_ID)

    def current_nodes(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        return slurm_parse.expand_nodes(environ.get("SLURM_JOB_NODELIST", ""))

    def query_jobs(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        # Ids come from the files of many runs: an invalid one must not fail the query for the others.
        requested_ids = sorted({job_id for job_id in job_ids if _JOB_ID.fullmatch(job_id)})
        if not requested_ids:
            return {}
        result = _run_command(
            # --array: one line per task; pending ones would otherwise share the line 123_[2-5%1].
            "squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(requested_ids)}",
            f"--Format={slurm_parse.SQUEUE_FORMAT}", timeout_s=self.timeout_s,
        )  # fmt: skip
        if result.returncode:
            # An error for a single id only; among several, squeue omits unknown ones.
            if _INVALID_JOB_ID in result.stderr:
                return (
                    {}
                    if len(requested_ids) == 1
                    else {k: v for requested_id in requested_ids for k, v in self.query_jobs([requested_id]).items()}
                )
            raise CommandFailed(
                f"squeue failed: {slurm_parse.format_error(result.stderr)}", fix="see whether `squeue` answers"
            )
        views = slurm_parse.parse_squeue(result.stdout)
        return {job_id: views[job_id] for job_id in requested_ids if job_id in views}

    def list_starts(self, job_id: str) -> list[JobStart]:
        fields = ",".join(slurm_parse.SACCT_FIELDS)
        # -D: every start, not only the last one; -X: no steps.
        result = _run_command(
            "sacct", "-D", "-X", "-P", "-n", "-j", _check_job_id(job_id), "-o", fields, timeout_s=self.timeout_s
        )
        if result.returncode:
            if "accounting storage is disabled" in result.stderr.lower():
                return []
            raise CommandFailed(f"sacct failed: {slurm_parse.format_error(result.stderr)}")
        return slurm_parse.parse_sacct(result.stdout, job_id)


def _sbatch(folder: Path, options: Sequence[str], environ: Mapping[str, str] | None) -> str:
    """Submit ``job.sh`` of a folder, which becomes the WorkDir of the job."""
    # Not at the top: it imports submitit, which only a submission needs.
    from clustertrain.scheduler import sbatch

    text = reading.read_text(folder / "job.sh")
    env = settings.strip_allocation_env(os.environ if environ is None else environ)
    # sbatch prefers the environment to the script, but the script contains the user's options.
    env = {k: v for k, v in env.items() if f"#SBATCH --{k.removeprefix('SBATCH_').lower()}=" not in text}
    return sbatch.sbatch(text, [f"--chdir={folder}", *options], folder, env)


def find_work_dir(job_id: str) -> Path | None:
    """Return the working directory of a job of any user, which is the run folder if the job runs clustertrain.

    None if Slurm is not installed or does not know the job.
    """
    if shutil.which("squeue") is None:
        return None
    # A job appears in the queue at once, and stays in the accounting longer.
    for argv in (
        ("squeue", "--noheader", "--states=all", f"--jobs={_check_job_id(job_id)}", "--Format=WorkDir:|"),
        ("sacct", "-X", "-P", "-n", "-j", _check_job_id(job_id), "-o", "WorkDir"),
    ):
        lines = _run_command(*argv).stdout.splitlines()
        if lines and lines[0].strip():
            return Path(lines[0].strip().removesuffix("|"))
    return None


def _run_command(*argv: str, timeout_s: float = COMMAND_TIMEOUT_S) -> proc.CommandResult:
    try:
        return proc.run(argv, env=client_environ(os.environ), check=False, timeout_s=timeout_s)
    except CommandFailed as e:
        # Users read the message and do not need the options.
        raise CommandFailed(e.message.replace(shlex.join(argv), argv[0]), fix=e.fix) from e


def _check_job_id(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise SchedulerError(f"{job_id!r} is not a Slurm job id")
    return job_id
