"""``deepspeed SCRIPT``: its options as the sizes of the job and the environment of the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clustertrain import reading
from clustertrain.errors import UsageError
from clustertrain.submit.launchers.launch import Launch, note_unused
from clustertrain.submit.request import SubmitRequest

# Options of deepspeed 0.19 by what becomes of them.
_SIZES = {"num_nodes": "nnodes", "num_gpus": "nproc-per-node", "num_accelerators": "nproc-per-node"}
_OWN = frozenset({
    "master_port", "master_addr", "node_rank", "launcher", "ssh_port", "log_level", "enable_each_rank_log",
})  # fmt: skip
_OWN_FLAGS = frozenset({"no_ssh", "no_ssh_check", "force_multi", "save_pid", "quiet"})
_KIND_FLAGS = frozenset({"module", "no_python", "no_local_rank"})
_SHORT = {"H": "hostfile", "i": "include", "e": "exclude", "q": "quiet"}
_BIND_FIX = "remove it; clustertrain binds each rank to the cores near its GPU"
_ELASTIC_FIX = "remove it; a run has a fixed number of nodes, and a requeue replaces those that fail"
_UNSUPPORTED = {
    "include": "remove it; --nodes and --gpus say how many, and Slurm chooses which",
    "exclude": "remove it; name nodes to avoid with --exclude of clustertrain submit",
    "autotuning": "tune before you submit, and give the tuned configuration",
    "launcher_args": "give Slurm's options to clustertrain submit, or in the cluster profile",
    "venv_script": "activate the environment before you submit, or in `setup` of the cluster profile",
    "bind_cores_to_rank": _BIND_FIX,
    "bind_core_list": _BIND_FIX,
    "elastic_training": _ELASTIC_FIX,
    "min_elastic_nodes": _ELASTIC_FIX,
    "max_elastic_nodes": _ELASTIC_FIX,
}
_HOST = re.compile(r"(\S+)\s+slots=(\d+)")
_MAX_FILE_BYTES = 1 << 20


@dataclass
class DeepSpeedLaunch:
    """What the options of ``deepspeed`` ask for."""

    sizes: dict[str, str] = field(default_factory=dict)
    """As torchrun's options."""
    flags: set[str] = field(default_factory=set)
    hostfile: str = ""
    unused: list[str] = field(default_factory=list)
    """Options without effect here, with hyphens."""
    program: list[str] = field(default_factory=list)


def parse_deepspeed(arguments: Sequence[str]) -> DeepSpeedLaunch:
    """Return what the options before the script ask for.

    Raises:
        UsageError: an option is not known or cannot be honored, a value is missing, or there is no script.
    """
    launch, rest = DeepSpeedLaunch(), list(arguments)
    while rest and rest[0].startswith("-"):
        argument = rest.pop(0)
        text, has_value, value = argument.lstrip("-").partition("=")
        name = _SHORT.get(text, "") if not argument.startswith("--") else text.replace("-", "_")
        if name in _UNSUPPORTED:
            raise UsageError(f"deepspeed --{name}: cannot be honored", fix=_UNSUPPORTED[name])
        if name in _KIND_FLAGS:
            launch.flags.add(name)
            continue
        if name in _OWN_FLAGS:
            launch.unused.append(name.replace("_", "-"))
            continue
        if name not in _SIZES and name not in _OWN and name != "hostfile":
            raise UsageError(
                f"deepspeed {argument}: not an option of deepspeed that clustertrain knows",
                fix="remove it, or name the script without deepspeed",
            )
        if not has_value:
            if not rest:
                raise UsageError(f"deepspeed --{name}: the value is missing")
            value = rest.pop(0)
        if name in _SIZES and value != "-1":  # its default: as many as there are
            launch.sizes[_SIZES[name]] = value
        elif name == "hostfile":
            launch.hostfile = value
        elif name in _OWN:
            launch.unused.append(name.replace("_", "-"))
    if not rest:
        raise UsageError("deepspeed: no script after its options", fix="name the script: -- deepspeed SCRIPT ARGS")
    launch.program = rest
    return launch


def read_deepspeed(request: SubmitRequest, python: str, arguments: Sequence[str]) -> Launch:
    """Return what ``deepspeed`` would start. Its script gets ``--local_rank``, unless ``--no_local_rank`` is given.

    Raises:
        UsageError: an option cannot be honored, or a file that deepspeed would read is missing or malformed.
    """
    launch = parse_deepspeed(arguments)
    if launch.hostfile:
        # As in deepspeed, --num_nodes and --num_gpus choose from the hosts and slots of the file.
        launch.sizes = {**_read_sizes(request.cwd / launch.hostfile), **launch.sizes}
    launch.sizes.setdefault("nproc-per-node", "gpu")  # deepspeed's default: all GPUs of the node
    start = [] if "no_python" in launch.flags else [python, "-u", *(["-m"] if "module" in launch.flags else [])]
    command, index = [*start, *launch.program], None
    if "no_local_rank" not in launch.flags:
        index = len(start) + 1
        command.insert(index, "--local_rank")
    env = _read_environment(request.cwd, request.environ)
    return Launch(command, launch.sizes, env, index, notes=tuple(note_unused("deepspeed", launch.unused)))


def _read_sizes(hostfile: Path) -> dict[str, str]:
    """Return the number of hosts in the file and of slots on each; Slurm chooses the hosts."""
    text = _read(hostfile)
    if text is None:
        raise UsageError(
            f"deepspeed --hostfile {hostfile}: no such file", fix="remove --hostfile, and give --nodes and --gpus"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    slots = {}
    for line in lines:
        match = _HOST.match(line)
        if match is None:
            raise UsageError(f"{hostfile}: not a line of a hostfile: {line}", fix="write HOST slots=GPUS")
        slots[match.group(1)] = match.group(2)
    if len(set(slots.values())) != 1:
        found = f"its hosts have different numbers of slots ({', '.join(slots.values())})" if slots else "it is empty"
        raise UsageError(f"{hostfile}: {found}", fix="give --nodes and --gpus instead: each node gets as many ranks")
    return {"nnodes": str(len(slots)), "nproc-per-node": next(iter(slots.values()))}


def _read_environment(cwd: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``.deepspeed_env``, at home and in ``cwd``, which deepspeed gives to the ranks."""
    env = {}
    for folder in (Path(environ.get("HOME", "/")), cwd):
        path = folder / environ.get("DS_ENV_FILE", ".deepspeed_env")
        for line in (_read(path) or "").splitlines():
            name, has_value, value = line.partition("=")
            if line.strip() and not (has_value and name.isidentifier()):
                raise UsageError(f"{path}: not a variable: {line}", fix="write NAME=VALUE, one a line")
            if line.strip():
                env[name] = value
    return env


def _read(path: Path) -> str | None:
    """Return the text of a file; None if there is none."""
    try:
        return reading.read_text(path, _MAX_FILE_BYTES) if path.is_file() else None
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror or e}", fix="make it readable") from e
