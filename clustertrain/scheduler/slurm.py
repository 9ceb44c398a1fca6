"""The Slurm backend: submission through submitit, everything else through Slurm's own commands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from clustertrain import proc, reading, settings
from clustertrain.errors import CommandFailed, SchedulerRefused
from clustertrain.run.run_dir import RunDir
from clustertrain.scheduler import slurm_parse
from clustertrain.scheduler.backend import ArraySubmission, Backend, JobStart, JobView, Submission
from clustertrain.scheduler.slurm_refusals import is_refusal

_JOB_ID = re.compile(r"\d+(_\d+)?")
# Variables that change what the commands print or do.
_CLIENT_PREFIXES = ("SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_", "SCANCEL_")
_UNKNOWN_JOB = "Invalid job id"


def client_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for squeue, sacct, scontrol and scancel: no formats of the user's, times as epoch seconds."""
    clean = settings.without_allocation(environ)
    clean = {name: value for name, value in clean.items() if not name.startswith(_CLIENT_PREFIXES)}
    return {**clean, "SLURM_TIME_FORMAT": "%s"}


# Somebody waits for the command. With slurmctld away squeue tries for a minute.
ANSWER_S = 8.0
# The batch process asks while it watches over the step; Slurm's own message timeout is 10 s.
BATCH_ANSWER_S = 20.0
_ENDED = ("already completing or completed", "invalid job id")


class SlurmBackend(Backend):
    """Job ids are Slurm's; an array task is ``ARRAY_TASK``."""

    name = "slurm"

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self.answer_s = answer_s

    def available(self) -> str | None:
        """The version of sbatch, or None where it is not installed.

        Raises:
            CommandFailed: it is installed and does not answer, or knows no cluster; with its own words.
        """
        if shutil.which("sbatch") is None:
            return None
        done = proc.run(["sbatch", "--version"], timeout_s=10.0, env=client_environ(os.environ))
        if not done.stdout.strip():
            raise CommandFailed("`sbatch --version` printed nothing")
        return done.stdout.strip()

    def submit(self, submission: Submission) -> str:
        options = [f"--{key}={value}" if value else f"--{key}" for key, value in submission.options.items()]
        return _sbatch(submission.run.path, options, submission.environ)

    def submit_array(self, array: ArraySubmission) -> list[str]:
        job_id = _sbatch(array.folder, [], array.environ)
        return [f"{job_id}_{task}" for task in range(len(array.runs))]

    def advice(self, partition: str) -> list[str]:
        # An answer that does not come or does not read is no reason against a submission.
        done = _ask(
            "scontrol", "--oneliner", "show", "partition", *([partition] if partition else []), answer_s=self.answer_s
        )
        return slurm_parse.preemption_advice(done.stdout, partition) if done.returncode == 0 else []

    def cancel(self, *job_ids: str) -> None:
        # Not submitit's Job.cancel: docs/decisions/0008.
        done = _ask("scancel", *map(_checked, job_ids), answer_s=self.answer_s)
        said = done.stderr.splitlines()
        failures = [line for line in said if _UNKNOWN_JOB not in line]
        if done.returncode and (failures or not said):
            raise CommandFailed(f"scancel {' '.join(job_ids)} failed: {slurm_parse.plain(chr(10).join(failures))}")

    def requeue(self, job_id: str) -> None:
        done = _ask("scontrol", "requeue", _checked(job_id), answer_s=self.answer_s)
        if done.returncode:
            said = slurm_parse.plain(done.stderr or done.stdout)
            if is_refusal(said):
                raise SchedulerRefused(f"Slurm did not requeue job {job_id}: {said}")
            raise CommandFailed(f"Slurm gave no answer to the requeue of job {job_id}: {said}")

    def restart(self, job_id: str, submission: Submission) -> str:
        # sbatch may have been heard although its answer never came, and would make a second job.
        fresh = self._newer_job(submission.run, job_id) or self.submit(submission)
        # Slurm requeues a job whose node it finds down later; two jobs would then want the run.
        with contextlib.suppress(CommandFailed):
            _ask("scontrol", "update", f"JobId={_checked(job_id)}", "Requeue=0", answer_s=self.answer_s)
        return fresh

    def _newer_job(self, run: RunDir, job_id: str) -> str | None:
        """The newest waiting or running job of the run that was submitted after ``job_id``, known by its working
        directory."""
        done = _ask(
            "squeue", "--noheader", f"--user={os.getuid()}", "--Format=JobID:|,WorkDir:|", answer_s=self.answer_s
        )
        if done.returncode:
            raise CommandFailed(f"squeue failed: {slurm_parse.plain(done.stderr)}")
        lines = (line.rstrip("|").split("|", 1) for line in done.stdout.splitlines())
        ids = [int(words[0]) for words in lines if reading.is_count(words[0]) and words[1:] == [str(run.path)]]
        newest = max(ids, default=0)
        return str(newest) if newest > int(_checked(job_id).partition("_")[0]) else None

    def own_job_id(self, environ: Mapping[str, str]) -> str | None:
        array, task = environ.get(settings.SLURM_ARRAY_JOB_ID), environ.get(settings.SLURM_ARRAY_TASK_ID)
        # The tasks of an array have numbers of their own as well, but a requeue by that number hits the wrong ones.
        return f"{array}_{task}" if array and task else environ.get(settings.SLURM_JOB_ID)

    def own_nodes(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        return slurm_parse.expand_nodes(environ.get("SLURM_JOB_NODELIST", ""))

    def views(self, job_ids: Iterable[str]) -> dict[str, JobView]:
        # Ids come from the files of many runs: a bad one must not keep the others from an answer.
        wanted = sorted({job_id for job_id in job_ids if _JOB_ID.fullmatch(job_id)})
        if not wanted:
            return {}
        done = _ask(
            # --array: a line for each task; those that wait would else share the line 123_[2-5%1].
            "squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(wanted)}",
            f"--Format={slurm_parse.SQUEUE_FORMAT}", answer_s=self.answer_s,
        )  # fmt: skip
        if done.returncode:
            # Said only when a single id was asked for; of several, the unknown ones are left out in silence.
            if _UNKNOWN_JOB in done.stderr:
                return {} if len(wanted) == 1 else {k: v for one in wanted for k, v in self.views([one]).items()}
            raise CommandFailed(f"squeue failed: {slurm_parse.plain(done.stderr)}", fix="see whether `squeue` answers")
        views = slurm_parse.read_squeue(done.stdout)
        return {job_id: views[job_id] for job_id in wanted if job_id in views}

    def starts(self, job_id: str) -> list[JobStart]:
        fields = ",".join(slurm_parse.SACCT_FIELDS)
        # -D: every start, not the last one alone; -X: no steps.
        done = _ask("sacct", "-D", "-X", "-P", "-n", "-j", _checked(job_id), "-o", fields, answer_s=self.answer_s)
        if done.returncode:
            if "accounting storage is disabled" in done.stderr.lower():
                return []
            raise CommandFailed(f"sacct failed: {slurm_parse.plain(done.stderr)}")
        return slurm_parse.read_sacct(done.stdout, job_id)


def _sbatch(folder: Path, options: Sequence[str], environ: Mapping[str, str] | None) -> str:
    """``job.sh`` of that folder, which becomes the job's WorkDir."""
    # Not at the top: it imports submitit, which only a submission needs.
    from clustertrain.scheduler import sbatch

    text = reading.read_text(folder / "job.sh")
    clean = settings.without_allocation(os.environ if environ is None else environ)
    # sbatch believes its environment more than the script, but what the user typed stands in the script.
    clean = {k: v for k, v in clean.items() if f"#SBATCH --{k.removeprefix('SBATCH_').lower()}=" not in text}
    return sbatch.sbatch(text, [f"--chdir={folder}", *options], folder, clean)


def work_dir(job_id: str) -> Path | None:
    """The working directory of any user's job, which for a run of clustertrain is its run directory; None for a job
    that Slurm does not know, or without Slurm."""
    if shutil.which("squeue") is None:
        return None
    # The queue knows a job from its first second on, accounting for longer.
    for argv in (
        ("squeue", "--noheader", "--states=all", f"--jobs={_checked(job_id)}", "--Format=WorkDir:|"),
        ("sacct", "-X", "-P", "-n", "-j", _checked(job_id), "-o", "WorkDir"),
    ):
        lines = _ask(*argv).stdout.splitlines()
        if lines and lines[0].strip():
            return Path(lines[0].strip().removesuffix("|"))
    return None


def comment(job_id: str) -> str:
    """The comment of a job that has not ended, empty where it has none.

    Raises:
        CommandFailed: Slurm gave no answer, or knows no such job.
    """
    done = _ask("squeue", "--noheader", f"--jobs={_checked(job_id)}", "--format=%k")
    if done.returncode or not done.stdout.strip():
        raise CommandFailed(f"squeue says nothing of job {job_id}: {slurm_parse.plain(done.stderr)}")
    said = done.stdout.splitlines()[0].strip()
    return "" if said == "(null)" else said


def set_comment(job_id: str, text: str) -> None:
    """Replace the comment of a job that has not ended: one line, which may have blanks and signs of any kind.

    Raises:
        SchedulerRefused: it said no.
        CommandFailed: it gave no answer, or the job has ended.
    """
    done = _ask("scontrol", "update", f"JobId={_checked(job_id)}", f"Comment={text}")
    if done.returncode:
        said = slurm_parse.plain(done.stderr or done.stdout)
        if is_refusal(said) and not any(words in said.lower() for words in _ENDED):
            raise SchedulerRefused(f"Slurm did not change the comment of job {job_id}: {said}")
        raise CommandFailed(f"the comment of job {job_id} was not changed: {said}")


def _ask(*argv: str, answer_s: float = ANSWER_S) -> proc.Completed:
    try:
        return proc.run(argv, env=client_environ(os.environ), check=False, timeout_s=answer_s)
    except CommandFailed as e:
        # Users read it: the options say nothing to them.
        raise CommandFailed(e.message.replace(shlex.join(argv), argv[0]), fix=e.fix) from e


def _checked(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise SchedulerRefused(f"{job_id!r} is not a Slurm job id")
    return job_id
