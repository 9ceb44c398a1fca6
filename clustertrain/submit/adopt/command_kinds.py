"""What a command of a batch script is for, judged by its name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

from clustertrain import proc
from clustertrain.submit.adopt.program import Program
from clustertrain.submit.launchers.launcher_names import name_launcher
from clustertrain.submit.program.python_words import find_python_program, is_python
from clustertrain.submit.program.wrappers import CONTAINER_RUNTIMES, WRAPPERS
from clustertrain.submit.shell.expansion import MARK

CommandKind = Literal[
    "training", "assign", "export", "cd", "set", "print", "monitor", "neutral", "exit", "trap", "requeue", "address",
    "chain", "setup",
]  # fmt: skip

_BY_NAME: dict[str, CommandKind] = {
    **dict.fromkeys(("export", "declare", "typeset", "readonly", "local", "read", "mapfile", "readarray"), "export"),
    **dict.fromkeys(("cd", "pushd"), "cd"),
    "set": "set",
    **dict.fromkeys(
        ("echo", "printf", "date", "hostname", "whoami", "pwd", "printenv", "free", "lscpu", "which", "type", "squeue",
         "sinfo", "sacct", "sstat", "uname", "id", "ls", "df", "tput", "nvcc", "gcc", "env"), "print"),
    **dict.fromkeys(("nvidia-smi", "rocm-smi", "dcgmi", "nvtop"), "monitor"),
    **dict.fromkeys(("[", "[[", "test", "true", "false", ":", "sleep", "wait", "kill", "return", "break", "continue"),
                    "neutral"),
    "exit": "exit", "trap": "trap", "sbatch": "chain",
}  # fmt: skip
_FILE_TOOLS = frozenset({"cp", "mkdir", "rm", "mv", "ln", "tar", "rsync", "unzip", "pigz", "touch", "chmod", "sbcast"})
_TOOL_MODULES = frozenset({"pip", "venv", "virtualenv", "ensurepip", "ipykernel", "compileall", "build", "site"})
_OUTPUTS = frozenset({">", ">>", ">|", "&>", "&>>"})


def find_kind(program: Program, redirections: Sequence[tuple[str, str]]) -> tuple[CommandKind, int]:
    """Return what a command is for, and for ``training`` how certain that is, from 1 to 3."""
    words, name = program.words, program.name
    if not words:
        return "setup", 0
    is_started = program.launcher in ("srun", "mpirun")
    writes = any(operator in _OUTPUTS and not re.match(r"/dev/|[&\d]", target) for operator, target in redirections)
    if name == "exec":
        return "print", 0  # without a program it only redirects the script's output
    if name == "scontrol":
        return ("requeue" if "requeue" in words else "address" if "hostnames" in words else "print"), 0
    kind = _BY_NAME.get(name) if name != "env" or len(words) == 1 else None
    if kind is not None:
        return ("setup" if kind == "print" and writes else kind), 0
    if is_python(name):
        return _judge_python(words, is_started)
    if name_launcher(words):
        return "training", 3
    if name in WRAPPERS or name in CONTAINER_RUNTIMES:
        starts = [at for at in range(1, len(words)) if name_launcher(words[at:])]
        if starts or any(is_python(w) or w.endswith(".py") for w in words[1:]):
            return "training", 3 if is_started or starts else 2
        return "setup", 0
    if name in _FILE_TOOLS:
        return "setup", 0
    if is_started:
        return "training", 3
    if MARK.fullmatch(words[0]):
        return "setup", 0
    if (name in proc.SHELLS and len(words) > 1) or words[0].startswith(("./", "../")):
        return "training", 1
    return "setup", 0


def _judge_python(words: Sequence[str], is_started: bool) -> tuple[CommandKind, int]:
    if name_launcher(words):
        return "training", 3
    program = find_python_program(words)
    if program.kind == "code":
        return ("print" if "print" in " ".join(words) else "setup"), 0
    if program.kind == "none":
        return "print", 0  # python --version
    if program.kind == "module":
        if program.module.split(".")[0] in _TOOL_MODULES:
            return "setup", 0
        return "training", 3 if is_started else 2
    if PurePath(words[program.index]).name == "setup.py":
        return "setup", 0
    return "training", 3 if is_started else 2
