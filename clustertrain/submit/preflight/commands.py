"""What a user who submits a command should know: how to write it, and what of its code is not copied."""

from __future__ import annotations

import shlex
import shutil
from pathlib import PurePath

from clustertrain.submit.launchers.launcher_names import name_launcher
from clustertrain.submit.prepared_run import ResolvedRun
from clustertrain.submit.program.command import is_file
from clustertrain.submit.program.python_words import is_python
from clustertrain.submit.request import SubmitRequest

_MAX_SHOWN = 60  # characters of a command


def find_command_fix(request: SubmitRequest) -> str:
    """Return how to submit the target if it is a command and not a file; empty if it is none."""
    words = [request.target, *request.args]
    is_command = is_python(request.target) or name_launcher(words) or _find(request)
    if PurePath(request.target).name != request.target or not is_command:
        return ""
    text = shlex.join(words)
    shown = text if len(text) <= _MAX_SHOWN else f"{request.target} …"
    return f"put -- before the command: clustertrain submit [OPTIONS] -- {shown}"


def _find(request: SubmitRequest) -> str | None:
    return shutil.which(request.target, path=request.environ.get("PATH", ""))


def note_missing_snapshot(run: ResolvedRun) -> list[str]:
    """Note a command whose scripts are not copied, because it starts them in a way of its own; refuse nothing."""
    script = run.spec.script
    if script is None or script.path or not script.command:
        return []
    cwd, words = run.parsed.request.cwd, run.parsed.request.command
    named = next((w for w in words[1:] if w.endswith((".py", ".sh")) and is_file(cwd / w)), None)
    if named is None:
        return []
    program = PurePath(words[0]).name
    return [
        f"The code is not copied, because clustertrain cannot see what {program} runs: if you edit {named}, the next "
        "attempt uses the edited file"
    ]
