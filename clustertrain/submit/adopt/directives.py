"""The ``#SBATCH`` lines of a batch script, read as sbatch reads them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from clustertrain.errors import UsageError
from clustertrain.submit.adopt.outcomes import Outcome
from clustertrain.submit.adopt.script_file import DIRECTIVE
from clustertrain.submit.adopt.slurm_options import SBATCH, GivenOption, parse_options

_NEARLY = re.compile(r"^(\s+#\s*|#\s+)SBATCH\b")
_COMMENTED = re.compile(r"^##+\s*SBATCH\b")
_PBS = re.compile(r"^#PBS\s")


@dataclass(frozen=True)
class Directive:
    """One option of a ``#SBATCH`` line."""

    line: int
    option: GivenOption


def parse_directives(text: str, name: str) -> tuple[list[Directive], list[Outcome]]:
    """Return the options of the ``#SBATCH`` lines, and what becomes of lines that sbatch does not read.

    sbatch reads them up to the first line that is neither empty nor a comment.

    Raises:
        UsageError: a line cannot be parsed, or describes a heterogeneous job.
    """
    directives: list[Directive] = []
    ignored: list[Outcome] = []
    first_command = 0
    for number, line in enumerate(text.split("\n"), start=1):
        match = DIRECTIVE.match(line)
        if match is None:
            if _NEARLY.match(line) or _COMMENTED.match(line) or _PBS.match(line):
                ignored.append(Outcome(number, line.strip(), "dropped", _explain_comment(line)))
            elif line.strip() and not line.lstrip().startswith("#"):
                first_command = first_command or number
        elif first_command:
            reason = f"sbatch reads no directives after the first command, on line {first_command}"
            ignored.append(Outcome(number, line, "dropped", reason))
        else:
            directives += [Directive(number, option) for option in _parse_line(match["options"], number, name)]
    return directives, ignored


def _explain_comment(line: str) -> str:
    if _PBS.match(line):
        return "an option for PBS; clustertrain reads those for Slurm"
    return "a comment for sbatch" if _COMMENTED.match(line) else "a comment for sbatch: only #SBATCH starts a directive"


def _parse_line(options: str, number: int, name: str) -> list[GivenOption]:
    try:
        words = shlex.split(options, comments=True)
    except ValueError as e:
        raise UsageError(f"{name}, line {number}: a quote is not closed", fix="close it") from e
    if words[:1] in (["hetjob"], ["packjob"]):
        raise UsageError(
            f"{name}, line {number}: a heterogeneous job, which clustertrain does not support",
            fix="submit a run for each part",
        )
    try:
        given, rest = parse_options(words, SBATCH)
    except UsageError as e:
        raise UsageError(f"{name}, line {number}: {e.message}", fix=e.fix) from e
    if rest:
        raise UsageError(f"{name}, line {number}: {rest[0]!r} is not an option", fix="quote values that have blanks")
    return given
