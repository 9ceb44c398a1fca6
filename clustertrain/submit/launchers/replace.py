"""Launchers before a program: ``torchrun`` and its like are replaced by clustertrain's own launch."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from clustertrain.config import cluster
from clustertrain.config.parsing.documents import parse_assignment
from clustertrain.errors import UsageError
from clustertrain.submit import container
from clustertrain.submit.launchers.accelerate_launch import read_accelerate
from clustertrain.submit.launchers.deepspeed_launch import read_deepspeed
from clustertrain.submit.launchers.hidden_launchers import HiddenLauncher, find_hidden_launcher
from clustertrain.submit.launchers.launch import Launch
from clustertrain.submit.launchers.launcher_names import (
    OLD_LAUNCH,
    OTHERS,
    name_launcher,
    split_launcher,
    starts_with_launcher,
)
from clustertrain.submit.launchers.launcher_python import find_python, name_python
from clustertrain.submit.launchers.mpi_launch import MPI, MpiLaunch, parse_mpi
from clustertrain.submit.launchers.torchrun_launch import SIZES, read_torchrun
from clustertrain.submit.program.python_words import find_python_program, is_python
from clustertrain.submit.program.wrappers import CONTAINER_RUNTIMES, MODULE_OPTIONS, InnerProgram, find_program
from clustertrain.submit.request import SubmitRequest
from clustertrain.submit.resolve import count_gpus

ACCELERATE_SETTINGS = (
    "name the script itself after --, and give the settings of its configuration with --env: "
    "ACCELERATE_MIXED_PRECISION=bf16, ACCELERATE_USE_FSDP=true and FSDP_…, ACCELERATE_USE_DEEPSPEED=true and "
    "ACCELERATE_DEEPSPEED_…"
)
_READ_HERE = frozenset({"accelerate launch", "trl"})  # with the packages of their own environment


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
    place = find_program(command, starts_with_launcher)
    head, inner = command[: place.index], command[place.index :]
    if inner[0] in MODULE_OPTIONS:  # uv run -m MODULE
        inner = ("python", "-m", *inner[1:])
    check_wrappers(place, inner)
    notes = _check_hidden_launcher(request)
    name, arguments = split_launcher(inner)
    if name in OTHERS:
        raise _refuse_other(request, name, arguments)
    if not name:
        return Translation(request, notes)
    launch = _read_launch(request, head, name, inner, arguments)
    job, size_notes = _merge_sizes(name, request, launch)
    index = launch.local_rank_index
    translated = dataclasses.replace(
        request,
        command=(*head, *launch.command),
        job=job,
        env={**launch.env, **request.env},
        local_rank_index=None if index is None else place.index + index,
    )
    note = f"{name} is replaced by clustertrain's own launch"
    return Translation(translated, (note, *_note_python_options(name, inner), *launch.notes, *size_notes))


def check_wrappers(place: InnerProgram, inner: Sequence[str]) -> None:
    """Refuse a launcher behind a program that cannot start it once for each rank.

    Raises:
        UsageError: there is one.
    """
    last = place.steps[-1] if place.steps else None
    if last is not None and last.name == "hatch" and ":" in inner[0]:
        environment, _, program = inner[0].rpartition(":")
        if starts_with_launcher([program, *inner[1:]]):
            raise UsageError(
                f"hatch run {inner[0]}: a launcher with an environment in its name",
                fix=f"write hatch -e {environment} run {program} …",
            )
    if not starts_with_launcher(inner):
        return
    name = name_launcher(inner)
    for step in place.steps:
        if step.wrapper.is_tool_runner:
            raise UsageError(
                f"{name} behind {step.name}: the ranks cannot use the environment that it makes for {name}",
                fix=f"write uv run --no-project --with PACKAGE {name} …, or activate an environment that has {name}",
            )
        if step.wrapper.is_lock:
            raise UsageError(
                f"{name} behind {step.name}: each rank would wait for the lock of the first", fix=f"remove {step.name}"
            )


def _read_launch(
    request: SubmitRequest, head: Sequence[str], name: str, inner: Sequence[str], arguments: list[str]
) -> Launch:
    if name in _READ_HERE:
        if head:
            raise refuse_wrapped_accelerate(name, PurePath(head[0]).name)
        if container.find_image(request):
            raise UsageError(
                f"{name}: its options are read with {name.split(maxsplit=1)[0]}, which is in the image",
                fix=ACCELERATE_SETTINGS if name != "trl" else _name_trl_script(arguments),
            )
        python = _find_in_path(request, find_python(request, inner[0]))
        return read_accelerate(request, name, python, arguments)
    # Behind a wrapper or in an image, the launcher and its Python are those of another environment.
    is_here = not head and not container.find_image(request)
    python = find_python(request, inner[0]) if is_here else name_python(inner[0])
    if name == "deepspeed":
        return read_deepspeed(request, python, arguments)
    is_old = any(word.endswith(OLD_LAUNCH) for word in inner[: len(inner) - len(arguments)])
    return read_torchrun(python, arguments, passes_local_rank=is_old)


def _find_in_path(request: SubmitRequest, python: str) -> str:
    """Return the path of ``python``, which may be a bare name."""
    found = shutil.which(python, path=request.environ.get("PATH")) if "/" not in python else str(request.cwd / python)
    if found is None:
        raise UsageError(f"{python}: not in PATH", fix="activate the environment of the program")
    return found


def _note_python_options(name: str, inner: Sequence[str]) -> list[str]:
    """Note the options of the Python that runs a launcher, which that does not pass on either."""
    if not is_python(inner[0]):
        return []
    options = [option for option in find_python_program(inner).options if option != "-u"]
    return [f"python {' '.join(options)}: for {name} alone; the ranks do not get it"] if options else []


def _name_trl_script(arguments: Sequence[str]) -> str:
    return f"name the script that each rank runs: -- python -m trl.scripts.{arguments[0]} ARGS"


def refuse_wrapped_accelerate(name: str, wrapper: str) -> UsageError:
    """Return the refusal of ``accelerate launch`` or ``trl`` behind ``wrapper``."""
    return UsageError(
        f"{name} behind {wrapper}: its configuration cannot be read from here",
        fix=f"export the variables in your shell, and start {name} without env"
        if wrapper == "env"
        else f"activate the environment of {name.split(maxsplit=1)[0]}, and start {name} without {wrapper}",
    )


def _refuse_other(request: SubmitRequest, name: str, arguments: Sequence[str]) -> UsageError:
    fix = OTHERS[name]
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
    elif name == "srun":
        fix = "name the program itself; --nodes, --gpus and --sbatch NAME=VALUE say what srun was given"
    return UsageError(f"{name} in front of the program is not supported: clustertrain starts the processes", fix=fix)


def _check_hidden_launcher(request: SubmitRequest) -> tuple[str, ...]:
    """Refuse a launcher that a shell, a script or a container would start for each rank; note one under a condition.

    Raises:
        UsageError: there is one.
    """
    found = find_hidden_launcher(request.command, None if container.find_image(request) else request.cwd)
    if found is None:
        return ()
    if found.script and found.is_conditional:
        return (f"{found.place}: if a rank gets here, it starts {found.name} again, beside the other ranks",)
    if found.script:
        raise UsageError(f"{found.place}: each rank would start {found.name} again", fix=_fix_script(request, found))
    raise UsageError(
        f"{found.name} inside {found.holder}: each rank would start {found.name} again",
        fix=_fix_hidden(request, found.name, found.holder),
    )


def _fix_script(request: SubmitRequest, found: HiddenLauncher) -> str:
    if request.wrapped:
        return f"start {found.script} without wrap, and put `clustertrain wrap --` before {found.name} in it"
    what = "the program of this line" if found.name in OTHERS else "the command of this line"
    return (
        f"submit {what} itself after --, with what stands before it in `setup` of the cluster profile; or start "
        f"{found.script} in a batch script, with `clustertrain wrap --` before {found.name}"
    )


def _fix_hidden(request: SubmitRequest, found: str, name: str) -> str:
    if name in CONTAINER_RUNTIMES and request.wrapped:  # the batch script starts the containers
        return (
            f"leave {found} out: name the program after {name} and its image; it has to get the variables of the ranks"
        )
    if name in CONTAINER_RUNTIMES:
        how = f"and {found} without {name} after --"
        if found in _READ_HERE:
            how = ACCELERATE_SETTINGS
        elif found in OTHERS:
            how = f"and the program without {name} and {found} after --"
        return f"name the image with --container IMAGE, {how}"
    if request.wrapped:
        return f"name {found} itself after --, and put the other commands into the batch script, before srun"
    return (
        f"name {found} itself after --; give variables with --env NAME=VALUE, and set-up in `setup` of the cluster "
        "profile"
    )


def _merge_sizes(launcher: str, request: SubmitRequest, launch: Launch) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the job's options with the number of nodes and ranks that the launcher was given, and notes.

    Raises:
        UsageError: the options contradict the launcher's, or the number is not known.
    """
    merged, notes = dict(request.job), tuple[str, ...]()
    for option, text in launch.sizes.items():
        key = SIZES[option]
        if ":" in text:
            raise UsageError(
                f"torchrun --{option} {text}: a range of sizes cannot be honored", fix=f"use --{key} with one number"
            )
        if text.isdecimal():
            number = int(text)
        elif key == "gpus" and "gpus" not in merged and not request.wrapped and not _is_assigned(request, "job.gpus"):
            number, source = _find_default_ranks(request, launcher, text)
            notes = (source,)
        else:
            continue  # gpu, auto, or a variable of a batch script: the job's size counts
        if merged.setdefault(key, number) != number:
            source = launch.source or f"{launcher}, which was given {number}"
            raise UsageError(f"--{key} {merged[key]} contradicts {source}", fix=launch.fix)
    return merged, notes


def _is_assigned(request: SubmitRequest, key: str) -> bool:
    """Return whether ``--set`` or ``--grid`` has a value for ``key``."""
    return key in request.sweep_values or any(parse_assignment(text)[0] == key for text in request.assignments)


# By launcher: its option for the ranks, without which it starts one for each GPU of the node.
_DEFAULTS = {"deepspeed": "--num_gpus", "accelerate launch": "--num_processes", "trl": "--num_processes"}


def _find_default_ranks(request: SubmitRequest, launcher: str, text: str) -> tuple[int, str]:
    """Return the ranks per node of a launcher that starts one for each GPU, and a note.

    Raises:
        UsageError: the number is not known.
    """
    option = _DEFAULTS.get(launcher)
    how = f"{launcher} without {option}" if option else f"{launcher} --nproc-per-node {text}"
    profile = cluster.load_profile(request.job.get("cluster", ""), request.environ)
    device = request.job.get("device", "auto")
    device = profile.device if device == "auto" else device
    is_here = _runs_here(request)
    if device == "auto" and is_here and not count_gpus():
        device = "cpu"
    if device == "cpu" and launcher in _READ_HERE:
        return 1, f"{how}: 1 process on CPUs"
    if device == "cpu":
        raise UsageError(
            f"{how} means all GPUs of the node, but this run uses CPUs", fix="give --gpus N, the ranks per node"
        )
    if profile.gpus_per_node:
        return profile.gpus_per_node, f"{how}: {profile.gpus_per_node}, the GPUs per node of the cluster profile"
    if is_here:
        return count_gpus(), f"{how}: {count_gpus()}, the GPUs of this machine"
    raise UsageError(
        f"{how}: the number of GPUs per node is not known",
        fix="give --gpus N, or set gpus_per_node in the cluster profile",
    )


def _runs_here(request: SubmitRequest) -> bool:
    """Return whether the run will use this machine, which alone knows how many GPUs it has."""
    backend = request.job.get("backend", "auto")
    return backend == "local" or (backend == "auto" and shutil.which("sbatch") is None)
