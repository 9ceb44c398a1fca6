"""Launchers before a program: ``torchrun`` and its like are replaced by clustertrain's own launch."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from clustertrain.errors import UsageError
from clustertrain.submit import container
from clustertrain.submit.accelerate_launch import read_accelerate
from clustertrain.submit.command import is_python
from clustertrain.submit.deepspeed_launch import read_deepspeed
from clustertrain.submit.request import SubmitRequest

_OLD_LAUNCH = "torch.distributed.launch"  # passes --local-rank to the script, unless it gets --use-env
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    _OLD_LAUNCH: "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}

# Options of torchrun (torch 2.13) by what becomes of them.
_SIZES = {"nnodes": "nodes", "nproc-per-node": "gpus"}
_OWN = frozenset({
    "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "node-rank", "master-addr", "master-port", "local-addr",
    "max-restarts", "monitor-interval", "start-method", "role", "log-dir", "redirects", "tee", "local-ranks-filter",
    "logs-specs", "event-log-handler", "signals-to-handle", "shutdown-timeout", "duplicate-stdout-filters",
    "duplicate-stderr-filters",
})  # fmt: skip
_OWN_FLAGS = frozenset({"standalone"})
_KIND_FLAGS = frozenset({"module", "no-python", "use-env"})
_SHORT = {"m": "module", "r": "redirects", "t": "tee"}
_UNSUPPORTED = {
    "run-path": "name the script without it",
    "numa-binding": "set cpus_per_gpu; clustertrain binds ranks to the cores near their GPUs",
    "virtual-local-rank": "let the program read LOCAL_RANK",
}
_OTHER_LAUNCHERS = {
    "mpirun": "name the program itself; clustertrain starts a process for each GPU",
    "mpiexec": "name the program itself; clustertrain starts a process for each GPU",
    "srun": "name the program itself; clustertrain runs srun",
    "sbatch": "name the program itself; clustertrain runs sbatch",
}


@dataclass(frozen=True)
class Translation:
    """A request without the launcher that its command started with."""

    request: SubmitRequest
    notes: tuple[str, ...] = ()


def replace_launcher(request: SubmitRequest) -> Translation:
    """Return ``request`` with a command that each rank can execute itself.

    Raises:
        UsageError: an option of the launcher cannot be honored, or the launcher is not known.
    """
    if not request.command:
        return Translation(request)
    name, arguments = split_launcher(request.command)
    if name == "accelerate" and arguments[:1] == ["launch"]:
        name, arguments = "accelerate launch", arguments[1:]
    if name in _OTHER_LAUNCHERS:
        raise UsageError(f"{name}: a launcher that clustertrain replaces", fix=_OTHER_LAUNCHERS[name])
    if name not in _LAUNCHER_MODULES.values():
        return Translation(request)
    program_path = PurePath(request.command[0])
    # The launcher's own environment: /env/bin/torchrun stands beside /env/bin/python.
    python = request.command[0] if is_python(program_path.name) else str(program_path.with_name("python"))
    note = f"{name} is replaced by clustertrain's own launch, with the same environment for each rank"
    if name == "accelerate launch":
        if container.find_image(request):
            raise UsageError(
                "accelerate launch: its options are read with accelerate, which is in the image",
                fix="name the script itself, and its settings with --env: -- python SCRIPT ARGS",
            )
        env, sizes, program = read_accelerate(request, _find_python(request, python), arguments)
        translated = dataclasses.replace(
            request, command=tuple(program), job=_merge_sizes(name, request.job, sizes), env={**env, **request.env}
        )
        return Translation(translated, (note,))
    if name == "deepspeed":
        env, sizes, program, index = read_deepspeed(request, python, arguments)
        translated = dataclasses.replace(
            request, command=tuple(program), job=_merge_sizes(name, request.job, sizes), env={**env, **request.env},
            local_rank_index=index,
        )  # fmt: skip
        return Translation(translated, (note,))
    return Translation(_replace_torchrun(request, python, arguments), (note,))


def _replace_torchrun(request: SubmitRequest, python: str, arguments: Sequence[str]) -> SubmitRequest:
    sizes, kinds, program = parse_torchrun(arguments)
    job = _merge_sizes("torchrun", request.job, sizes)
    if not program:
        raise UsageError("torchrun: no program after its options", fix="name the script: -- torchrun SCRIPT ARGS")
    start, index = [python, *(["-m"] if "module" in kinds else [])] if "no-python" not in kinds else [], None
    if _OLD_LAUNCH in request.command[: -len(arguments)] and "use-env" not in kinds:
        index = len(start) + 1
        program.insert(1, "--local-rank")
    return dataclasses.replace(request, command=(*start, *program), job=job, local_rank_index=index)


def split_launcher(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the launcher that ``command`` starts with, if any, and the arguments after it."""
    name, *arguments = PurePath(command[0]).name, *command[1:]
    if is_python(command[0]):
        options = [a for a in arguments[:2] if a != "-u"]
        if options[:1] == ["-m"] or arguments[:1] == ["-m"]:
            at = arguments.index("-m")
            if arguments[at + 1 : at + 2] and arguments[at + 1] in _LAUNCHER_MODULES:
                return _LAUNCHER_MODULES[arguments[at + 1]], arguments[at + 2 :]
        return "", arguments
    return name, arguments


def parse_torchrun(arguments: Sequence[str]) -> tuple[dict[str, str], set[str], list[str]]:
    """Return the sizes, the flags that say what the program is, and the program with its arguments."""
    sizes: dict[str, str] = {}
    kinds: set[str] = set()
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        argument = rest.pop(0)
        if argument == "--":
            break
        text, has_value, value = argument.lstrip("-").partition("=")
        name = _SHORT.get(text, text.replace("_", "-")) if argument.startswith("-") else text
        if name in _KIND_FLAGS:
            kinds.add(name)
        elif name in _UNSUPPORTED:
            raise UsageError(f"torchrun --{name}: cannot be honored", fix=_UNSUPPORTED[name])
        elif name in _SIZES or name in _OWN:
            if not has_value:
                if not rest:
                    raise UsageError(f"torchrun --{name}: the value is missing")
                value = rest.pop(0)
            if name in _SIZES:
                sizes[name] = value
        elif name not in _OWN_FLAGS:
            raise UsageError(
                f"torchrun {argument}: not an option of torchrun that clustertrain knows",
                fix="remove it, or name the program without torchrun",
            )
    return sizes, kinds, rest


def _find_python(request: SubmitRequest, python: str) -> str:
    """Return the path of ``python``, the interpreter beside a launcher that may be a bare name."""
    found = shutil.which(python, path=request.environ.get("PATH")) if "/" not in python else str(request.cwd / python)
    if found is None:
        raise UsageError(f"{python}: not in PATH", fix="activate the environment of the program")
    return found


def _merge_sizes(launcher: str, job: Mapping[str, Any], sizes: Mapping[str, str]) -> dict[str, Any]:
    """Return ``job`` with the number of nodes and ranks that the launcher was given, in torchrun's words.

    Raises:
        UsageError: the options contradict the launcher's.
    """
    merged = dict(job)
    for option, text in sizes.items():
        key = _SIZES[option]
        if ":" in text:
            raise UsageError(
                f"torchrun --{option} {text}: a range of sizes cannot be honored", fix=f"use --{key} with one number"
            )
        if not text.isdecimal():
            continue  # gpu, auto, or a variable of a batch script: the job's size counts
        number = int(text)
        if merged.setdefault(key, number) != number:
            raise UsageError(
                f"--{key} {merged[key]} contradicts {launcher}, which was given {number}", fix="remove one of them"
            )
    return merged
