"""Launchers before a program: ``torchrun`` and its like are replaced by clustertrain's own launch."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from clustertrain import proc
from clustertrain.config import cluster
from clustertrain.config.parsing.documents import parse_assignment
from clustertrain.errors import UsageError
from clustertrain.submit import container
from clustertrain.submit.accelerate_launch import read_accelerate
from clustertrain.submit.command import is_python
from clustertrain.submit.deepspeed_launch import read_deepspeed
from clustertrain.submit.mpi_launch import MPI, MpiLaunch, parse_mpi
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.wrappers import (
    CONTAINER_RUNTIMES,
    MODULE_OPTIONS,
    WRAPPERS,
    find_hidden_commands,
    find_program,
)

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
_OWN_PROCESSES = "name the program itself: clustertrain starts a process for each GPU"
_OTHER_LAUNCHERS = {
    **dict.fromkeys(MPI, _OWN_PROCESSES),
    "horovodrun": "let the program use torch.distributed, and name it without horovodrun",
    "srun": "name the program itself; clustertrain runs srun",
    "sbatch": "name the program itself; clustertrain runs sbatch",
}
ACCELERATE_SETTINGS = (
    "name the script itself after --, and give the settings of its configuration with --env: "
    "ACCELERATE_MIXED_PRECISION=bf16, ACCELERATE_USE_FSDP=true and FSDP_…, ACCELERATE_USE_DEEPSPEED=true and "
    "ACCELERATE_DEEPSPEED_…"
)


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
    command = request.command
    index = find_program(command, starts_with_launcher).index
    head, inner = command[:index], command[index:]
    if inner[0] in MODULE_OPTIONS:  # uv run -m MODULE
        inner = ("python", "-m", *inner[1:])
    _check_hidden_launcher(request, inner)
    name, arguments = split_launcher(inner)
    if name in _OTHER_LAUNCHERS:
        raise _refuse_other(request, name, arguments)
    if name not in _LAUNCHER_MODULES.values():
        return Translation(request)
    program_path = PurePath(inner[0])
    # The launcher's own environment: /env/bin/torchrun stands beside /env/bin/python.
    python = inner[0] if is_python(program_path.name) else str(program_path.with_name("python"))
    launch = _read_launch(request, head, name, inner, python, arguments)
    job, notes = _merge_sizes(name, request, launch.sizes)
    translated = dataclasses.replace(
        request,
        command=(*head, *launch.command),
        job=job,
        env={**launch.env, **request.env},
        local_rank_index=None if launch.local_rank_index is None else index + launch.local_rank_index,
    )
    note = f"{name} is replaced by clustertrain's own launch, with the same environment for each rank"
    return Translation(translated, (note, *notes))


@dataclass(frozen=True)
class _Launch:
    """What a launcher would start."""

    command: list[str]
    sizes: dict[str, str]
    """By torchrun's options."""
    env: dict[str, str] = field(default_factory=dict)
    local_rank_index: int | None = None


def _read_launch(
    request: SubmitRequest, head: Sequence[str], name: str, inner: Sequence[str], python: str, arguments: list[str]
) -> _Launch:
    if name == "accelerate launch":
        if head:
            raise refuse_wrapped_accelerate(PurePath(head[0]).name)
        if container.find_image(request):
            raise UsageError(
                "accelerate launch: its options are read with accelerate, which is in the image",
                fix=ACCELERATE_SETTINGS,
            )
        env, sizes, program = read_accelerate(request, _find_python(request, python), arguments)
        return _Launch(program, sizes, env)
    if name == "deepspeed":
        env, sizes, program, index = read_deepspeed(request, python, arguments)
        return _Launch(program, sizes, env, index)
    return _read_torchrun(inner, python, arguments)


def _read_torchrun(inner: Sequence[str], python: str, arguments: Sequence[str]) -> _Launch:
    sizes, kinds, program = parse_torchrun(arguments)
    if not program:
        raise UsageError("torchrun: no program after its options", fix="name the script: -- torchrun SCRIPT ARGS")
    start, index = [python, *(["-m"] if "module" in kinds else [])] if "no-python" not in kinds else [], None
    if _OLD_LAUNCH in inner[: -len(arguments)] and "use-env" not in kinds:
        index = len(start) + 1
        program.insert(1, "--local-rank")
    return _Launch([*start, *program], sizes, local_rank_index=index)


def refuse_wrapped_accelerate(wrapper: str) -> UsageError:
    """Return the refusal of ``accelerate launch`` behind ``wrapper``."""
    return UsageError(
        f"accelerate launch behind {wrapper}: its configuration cannot be read from here",
        fix="export the variables in your shell, and start accelerate launch without env"
        if wrapper == "env"
        else f"activate the environment of accelerate, and start accelerate launch without {wrapper}",
    )


def _refuse_other(request: SubmitRequest, name: str, arguments: Sequence[str]) -> UsageError:
    fix = _OTHER_LAUNCHERS[name]
    if name in MPI:
        try:
            launch = parse_mpi(name, arguments)
        except UsageError:
            launch = MpiLaunch()
        ranks = launch.ranks_per_node or launch.total or "N"
        nodes = (launch.total or 0) // (launch.ranks_per_node or 1) if launch.ranks_per_node else 0
        size = f"--nodes {nodes} --gpus {ranks}" if nodes > 1 else f"--gpus {ranks}"
        start = f"clustertrain submit {size}" if not request.wrapped else "srun --ntasks-per-node=1 clustertrain wrap"
        per_node = "" if request.wrapped else "--gpus is per node; "
        program = shlex.join(launch.program) or "PROGRAM"
        fix = f"{start} -- {program} ({per_node}ranks get RANK, LOCAL_RANK and WORLD_SIZE, not OMPI_*)"
    return UsageError(f"{name}: not translated; clustertrain starts the processes itself", fix=fix)


def _check_hidden_launcher(request: SubmitRequest, command: Sequence[str]) -> None:
    """Refuse a launcher that a shell or a container would start for each rank.

    Raises:
        UsageError: there is one.
    """
    name = PurePath(command[0]).name
    found = find_hidden_launcher(command)
    if not found:
        return
    if name in CONTAINER_RUNTIMES and request.wrapped:  # the batch script starts the containers
        fix = (
            f"leave {found} out: name the program after {name} and its image; it has to get the variables of the ranks"
        )
    elif name in CONTAINER_RUNTIMES:
        how = f"and {found} without {name} after --"
        if found == "accelerate launch":
            how = ACCELERATE_SETTINGS
        elif found in _OTHER_LAUNCHERS:
            how = f"and the program without {name} and {found} after --"
        fix = f"name the image with --container IMAGE, {how}"
    elif request.wrapped:
        fix = f"name {found} itself after --, and put the other commands into the batch script, before srun"
    else:
        fix = (
            f"name {found} itself after --; give variables with --env NAME=VALUE, and set-up in `setup` of the cluster "
            "profile"
        )
    raise UsageError(f"{found} inside {name}: each rank would start {found} again", fix=fix)


def find_hidden_launcher(command: Sequence[str]) -> str:
    """Return the launcher that a shell or a container runtime at the start of ``command`` would execute."""
    for hidden in find_hidden_commands(command, is_program):
        inner = hidden[find_program(hidden, starts_with_launcher).index :]
        if found := (name_launcher(inner) or find_hidden_launcher(inner)):
            return found
    return ""


def name_launcher(words: Sequence[str]) -> str:
    """Return the launcher that ``words`` start with; empty: none that is known."""
    if words[0] in MODULE_OPTIONS:
        words = ["python", "-m", *words[1:]]
    name, _ = split_launcher(words)
    return name if name in _LAUNCHER_MODULES.values() or name in _OTHER_LAUNCHERS else ""


def starts_with_launcher(words: Sequence[str]) -> bool:
    """Return whether ``words`` start with a launcher that is known."""
    return bool(name_launcher(words))


def is_program(word: str) -> bool:
    """Return whether a word names Python, a shell, a wrapper or a launcher."""
    name = PurePath(word).name
    return (
        is_python(word)
        or name in proc.SHELLS
        or name in WRAPPERS
        or name == "accelerate"
        or bool(name_launcher([word]))
    )


def split_launcher(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the launcher that ``command`` starts with, if any, and the arguments after it."""
    name, *arguments = PurePath(command[0]).name, *command[1:]
    if name == "accelerate-launch":
        return "accelerate launch", arguments
    if name == "accelerate" and arguments[:1] == ["launch"]:
        return "accelerate launch", arguments[1:]
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


def _merge_sizes(
    launcher: str, request: SubmitRequest, sizes: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the job's options with the number of nodes and ranks that the launcher was given, and notes.

    Raises:
        UsageError: the options contradict the launcher's, or the number is not known.
    """
    merged, notes = dict(request.job), tuple[str, ...]()
    for option, text in sizes.items():
        key = _SIZES[option]
        if ":" in text:
            raise UsageError(
                f"torchrun --{option} {text}: a range of sizes cannot be honored", fix=f"use --{key} with one number"
            )
        if text.isdecimal():
            number = int(text)
        elif key == "gpus" and "gpus" not in merged and not request.wrapped and not _is_assigned(request, "job.gpus"):
            is_default = launcher == "deepspeed"  # without --num_gpus
            how = "deepspeed without --num_gpus" if is_default else f"{launcher} --{option} {text}"
            number = _find_gpus_per_node(request, how)
            notes = (f"{how}: {number}, the GPUs per node of the cluster profile",)
        else:
            continue  # gpu, auto, or a variable of a batch script: the job's size counts
        if merged.setdefault(key, number) != number:
            raise UsageError(
                f"--{key} {merged[key]} contradicts {launcher}, which was given {number}", fix="remove one of them"
            )
    return merged, notes


def _is_assigned(request: SubmitRequest, key: str) -> bool:
    """Return whether ``--set`` or ``--grid`` has a value for ``key``."""
    return key in request.sweep_values or any(parse_assignment(text)[0] == key for text in request.assignments)


def _find_gpus_per_node(request: SubmitRequest, option: str) -> int:
    profile = cluster.load_profile(request.job.get("cluster", ""), request.environ)
    if request.job.get("device", profile.device) == "cpu":
        raise UsageError(f"{option}: not a number of ranks on CPUs", fix="give --gpus N, the ranks per node")
    if not profile.gpus_per_node:
        raise UsageError(
            f"{option}: the number of GPUs per node is not known",
            fix="give --gpus N, or set gpus_per_node in the cluster profile",
        )
    return profile.gpus_per_node
