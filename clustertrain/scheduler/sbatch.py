"""The one place that uses submitit: it writes the submission file, runs sbatch and reads the job id.

submitit's own job format (a pickled callable) is not used; job.sh takes its place. Pinned to 1.5.x, since two of the
three overridden methods are not part of its documented interface.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from clustertrain.errors import CommandFailed, SchedulerError
from clustertrain.scheduler import slurm_parse
from clustertrain.scheduler.slurm_refusals import is_refusal

# submitit expands these in the path of its folder, and would then write somewhere else.
_SUBMITIT_TAGS = ("%j", "%t", "%A", "%a")


def sbatch(text: str, options: Sequence[str], folder: Path, environ: Mapping[str, str]) -> str:
    """Submit the script ``text`` and return the job id.

    Args:
        options: arguments of sbatch, each as ``--key=value``; they win over the script's directives.
        folder: the run directory; submitit's files live in a temporary folder below it and are gone afterwards.
        environ: the environment of sbatch, and so of the job.

    Raises:
        SchedulerError: with what sbatch printed.
        CommandFailed: sbatch is not installed, or gave no answer; Slurm may have the job all the same.
    """
    # Not at the top, and late: importing it takes 70 to 150 ms, which only a submission should pay.
    import submitit.core.utils
    import submitit.slurm.slurm

    class Executor(submitit.slurm.slurm.SlurmExecutor):
        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return text

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return ["sbatch", "--parsable", *options, str(submission_file_path)]

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            return _parse_job_id(string if isinstance(string, str) else string.decode(errors="replace"))

        @classmethod
        def affinity(cls) -> int:
            return 2  # its own test looks for srun on PATH; whether Slurm answers is for sbatch to say

    parent = None if any(tag in str(folder) for tag in _SUBMITIT_TAGS) else folder
    with (
        tempfile.TemporaryDirectory(prefix=".submit-", dir=parent) as scratch,
        _capture_stderr() as printed,
        _replace_environ(environ),
    ):
        try:
            # The public submit() takes a Python function to pickle; a command of one's own has only this entry.
            return Executor(folder=scratch)._submit_command("").job_id
        except submitit.core.utils.FailedJobError as e:
            message = slurm_parse.format_error(str(e) or printed.getvalue())
            if is_refusal(message):
                raise SchedulerError(f"Slurm refused the job: {message}") from e
            raise CommandFailed(f"sbatch failed: {message}", fix="see whether Slurm answers: `scontrol ping`") from e
        except FileNotFoundError as e:
            raise CommandFailed("sbatch: command not found", fix="submit on a login node") from e


def _parse_job_id(output: str) -> str:
    """``--parsable`` prints ``ID`` or ``ID;CLUSTER``; site plugins may print lines around it."""
    match = re.search(r"^(\d+)(?:;\S*)?$", output.strip(), flags=re.MULTILINE)
    if match is None:
        raise CommandFailed(f"sbatch printed no job id but {output.strip()!r}")
    return match[1]


@contextlib.contextmanager
def _replace_environ(environ: Mapping[str, str]) -> Iterator[None]:
    """submitit gives sbatch this process's environment and has no argument for another one."""
    saved = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environ)
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@contextlib.contextmanager
def _capture_stderr() -> Iterator[io.StringIO]:
    """submitit prints sbatch's complaint besides raising it."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield printed
