"""What a command of a batch script is for, judged by its name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

from clustertrain.submit.adopt.program import SHELLS, Program
from clustertrain.submit.command import is_python
from clustertrain.submit.shell.expansion import MARK
from clustertrain.submit.wrappers import CONTAINER_RUNTIMES, WRAPPERS

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
_TRAINING_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})
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
    if name in _TRAINING_LAUNCHERS:
        is_launch = name != "accelerate" or words[1:2] == ["launch"]
        return ("training", 3) if is_launch else ("setup", 0)
    if name in WRAPPERS or name in CONTAINER_RUNTIMES:
        inner = [w for w in words[1:] if PurePath(w).name in _TRAINING_LAUNCHERS or is_python(w) or w.endswith(".py")]
        return ("training", 3 if is_started or PurePath(inner[0]).name == "torchrun" else 2) if inner else ("setup", 0)
    if name in _FILE_TOOLS:
        return "setup", 0
    if is_started:
        return "training", 3
    if MARK.fullmatch(words[0]):
        return "setup", 0
    if (name in SHELLS and len(words) > 1) or words[0].startswith(("./", "../")):
        return "training", 1
    return "setup", 0


def _judge_python(words: Sequence[str], is_started: bool) -> tuple[CommandKind, int]:
    arguments = [word for word in words[1:] if word not in ("-u", "-B", "-O", "-s", "-E", "-I")]
    first = arguments[0] if arguments else "-V"
    if first in ("-V", "--version", "-VV"):
        return "print", 0
    if first == "-c":
        return ("print" if "print" in " ".join(arguments) else "setup"), 0
    if first == "-m":
        module = arguments[1] if len(arguments) > 1 else ""
        if module.split(".")[0] in _TOOL_MODULES:
            return "setup", 0
        return "training", 3 if is_started or module.startswith("torch.distributed.") else 2
    if PurePath(first).name == "setup.py":
        return "setup", 0
    return "training", 3 if is_started else 2
