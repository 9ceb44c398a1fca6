"""Submission with submitit, which writes the submission file, runs sbatch and reads the job id.

job.sh replaces submitit's job format, a pickled callable. submitit is pinned to 1.5.x, since some of the overridden
methods are not part of its documented interface.
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

# submitit would expand these in the path of its folder, and write to another one.
_SUBMITIT_TAGS = ("%j", "%t", "%A", "%a")


def sbatch(text: str, options: Sequence[str], folder: Path, environ: Mapping[str, str]) -> str:
    """Submit the script ``text`` and return the job id.

    Args:
        options: arguments of sbatch, each as ``--key=value``; they override directives in the script.
        folder: the run folder; submitit's files are in a temporary folder below it.
        environ: the environment of sbatch and of the job.

    Raises:
        SchedulerError: Slurm refused the job; the message is that of sbatch.
        CommandFailed: sbatch is not installed, or got no answer; Slurm may have accepted the job.
    """
    # Not at the top: the import takes 70 to 150 ms, and only a submission needs it.
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
            return 2  # the original looks for srun on PATH; here only sbatch must answer

    parent = None if any(tag in str(folder) for tag in _SUBMITIT_TAGS) else folder
    with (
        tempfile.TemporaryDirectory(prefix=".submit-", dir=parent) as scratch,
        _capture_stderr() as printed,
        _replace_environ(environ),
    ):
        try:
            # The public submit() pickles a Python function; only this method takes a command.
            return Executor(folder=scratch)._submit_command("").job_id
        except submitit.core.utils.FailedJobError as e:
            message = slurm_parse.format_error(str(e) or printed.getvalue())
            if is_refusal(message):
                raise SchedulerError(f"Slurm refused the job: {message}") from e
            raise CommandFailed(f"sbatch failed: {message}", fix="see whether Slurm answers: `scontrol ping`") from e
        except FileNotFoundError as e:
            raise CommandFailed("sbatch: command not found", fix="submit on a login node") from e


def _parse_job_id(output: str) -> str:
    """Return the id from ``ID`` or ``ID;CLUSTER``, which site plugins may surround with lines."""
    match = re.search(r"^(\d+)(?:;\S*)?$", output.strip(), flags=re.MULTILINE)
    if match is None:
        raise CommandFailed(f"sbatch printed no job id: {output.strip()!r}")
    return match[1]


@contextlib.contextmanager
def _replace_environ(environ: Mapping[str, str]) -> Iterator[None]:
    """Replace the environment of this process, which submitit passes to sbatch."""
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
    """Capture stderr and warnings: submitit both prints and raises errors of sbatch."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield printed
