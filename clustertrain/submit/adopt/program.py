"""The training command of a batch script without the launchers before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from clustertrain.errors import UsageError
from clustertrain.submit.adopt.containers import APPTAINER, Container, parse_apptainer, refuse_runtime, take_option
from clustertrain.submit.adopt.slurm_options import SRUN, GivenOption, parse_options
from clustertrain.submit.launchers.hidden_launchers import find_contained_command, find_hidden_launcher
from clustertrain.submit.launchers.launcher_names import (
    OLD_LAUNCH,
    OTHERS,
    name_launcher,
    split_launcher,
    starts_with_launcher,
)
from clustertrain.submit.launchers.launcher_python import name_python
from clustertrain.submit.launchers.mpi_launch import MPI, parse_mpi
from clustertrain.submit.launchers.replace import ACCELERATE_SETTINGS, check_wrappers, refuse_wrapped_accelerate
from clustertrain.submit.launchers.torchrun_launch import parse_torchrun
from clustertrain.submit.program.python_words import is_python
from clustertrain.submit.program.wrappers import (
    CONTAINER_RUNTIMES,
    MODULE_OPTIONS,
    WRAPPERS,
    find_program,
)
from clustertrain.submit.shell.expansion import MARK

_ISOLATED = frozenset({"docker", "nerdctl", "podman"})  # their containers have no variable that they are not given
_WITHOUT_EFFECT = frozenset({"command", "exec", "nohup", "time"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DEEPSPEED_VALUED = frozenset({
    "hostfile", "include", "exclude", "num-nodes", "min-elastic-nodes", "max-elastic-nodes", "num-gpus", "master-port",
    "master-addr", "node-rank", "launcher", "launcher-args", "autotuning", "ssh-port", "enable-each-rank-log",
    "bind-core-list", "venv-script",
})  # fmt: skip
_DEEPSPEED_FLAGS = frozenset({
    "module", "no-python", "no-local-rank", "no-ssh", "no-ssh-check", "force-multi", "save-pid", "elastic-training",
    "bind-cores-to-rank",
})  # fmt: skip
_ACCELERATE_OWN = frozenset({
    "main-process-ip", "main-process-port", "machine-rank", "rdzv-backend", "rdzv-conf", "max-restarts",
    "monitor-interval", "deepspeed-hostfile", "log-dir", "tee", "role",
})  # fmt: skip
_ACCELERATE_FLAGS = frozenset({"same-network"})


@dataclass
class Program:
    """A command, and what stood before it."""

    words: list[str]
    launcher: str = ""
    """The launcher nearest to the program: ``torchrun``, ``accelerate launch``, ``deepspeed``, ``trl``, ``srun``,
    ``mpirun``; empty: the shell starts it once."""
    ranks_per_node: int | None = None
    """What the launcher was given."""
    nodes: int | None = None
    total: int | None = None
    """Ranks on all nodes together."""
    srun: dict[str, GivenOption] = field(default_factory=dict)
    env: list[str] = field(default_factory=list)
    """Assignments ``NAME=VALUE`` before the program."""
    replaced: list[str] = field(default_factory=list)
    """What clustertrain does itself, in words."""
    warnings: list[str] = field(default_factory=list)
    """What may differ for the program."""
    container: Container | None = None
    """The container in which the program runs."""

    @property
    def name(self) -> str:
        return PurePath(self.words[0]).name if self.words else ""


def peel(words: Sequence[str]) -> Program:
    """Return the command without what starts it once per task: srun, mpirun, env, timeout and the like.

    Raises:
        UsageError: an option of srun or mpirun cannot be honored.
    """
    program = Program(list(words))
    while program.words:
        name, rest = program.name, program.words[1:]
        if name in _WITHOUT_EFFECT and rest and not rest[0].startswith("-"):
            program.words = rest
        elif name in ("env", "stdbuf", "nice") and rest:
            if not _peel_simple(program, rest):
                break
        elif name == "timeout" and rest:
            given = [index for index, word in enumerate(rest) if re.fullmatch(r"[\d.]+[smhd]?", word)]
            if not given:
                break
            program.words = rest[given[0] + 1 :]
            program.replaced.append("timeout: the run stops at its own time limit")
        elif name == "srun":
            _peel_srun(program, rest)
        elif name in MPI:
            _peel_mpi(program, rest)
        elif name in APPTAINER:
            if not _peel_apptainer(program):
                break
        else:
            break
    return program


def _peel_simple(program: Program, rest: list[str]) -> bool:
    """Remove ``env``, ``stdbuf`` or ``nice`` with its options; return False if it does more and has to stay."""
    if program.name == "env":
        count = next((i for i, word in enumerate(rest) if not _ASSIGNMENT.fullmatch(word)), len(rest))
        if count == len(rest) or rest[count].startswith("-"):
            return False
        program.env += rest[:count]
    else:
        count = next((i for i, word in enumerate(rest) if not word.startswith("-")), len(rest))
        if rest[:1] == ["-n"]:
            count = 2
    program.words = rest[count:]
    return True


def _peel_srun(program: Program, rest: list[str]) -> None:
    given, program.words = parse_options(rest, SRUN)
    container = Container()
    for option in given:
        if "container" in option.name:
            take_option(container, option.name, option.value, f"srun --{option.name}")
        if option.name in ("multi-prog", "het-group"):
            raise UsageError(f"srun --{option.name}: several programs in one job", fix="submit a run for each")
        if option.name == "export":
            program.env += [pair for pair in option.value.split(",") if _ASSIGNMENT.fullmatch(pair)]
    if container.list_options():
        program.container = container
    program.srun = {**program.srun, **{option.name: option for option in given}}
    program.launcher = "srun"
    dropped = " ".join(option.text for option in given)
    program.replaced.append("srun" + (f" with {dropped}" if dropped else ""))


def _peel_apptainer(program: Program) -> bool:
    """Remove ``apptainer exec``; return False if it has to stay."""
    try:
        parsed = parse_apptainer(program.words)
    except UsageError:
        return False  # refused if it turns out to be the training command
    if parsed is None:
        return False
    program.replaced.append(f"{program.name}: clustertrain starts the container")
    program.container, program.words = parsed
    program.env += program.container.env
    return True


def _peel_mpi(program: Program, rest: list[str]) -> None:
    name, launch = program.name, parse_mpi(program.name, rest)
    count = len(rest) - len(launch.program)
    program.ranks_per_node = launch.ranks_per_node or program.ranks_per_node
    program.total = launch.total or program.total
    program.env += launch.env
    program.replaced.append(f"{name} with {count} words of options" if count else name)
    program.launcher, program.words = "mpirun", launch.program
    program.warnings.append("ranks get RANK, LOCAL_RANK and WORLD_SIZE, and not the variables of MPI")


def read_launcher(program: Program, *, is_wrapped: bool = False) -> None:
    """Replace torchrun, deepspeed or accelerate launch in ``program`` by what submit takes.

    A launcher that passes the local rank to the script stays, without its sizes: ``submit`` does so in its place.

    Args:
        is_wrapped: another command stands before the launcher, so ``submit`` would not find it.

    Raises:
        UsageError: an option cannot be honored.
    """
    if not program.words:
        return
    name, arguments = split_launcher(program.words)
    if name == "accelerate launch":
        if program.container is not None:
            raise UsageError(
                "accelerate launch in a container: its options are read with accelerate, which is in the image",
                fix=ACCELERATE_SETTINGS,
            )
        head = program.words[: len(program.words) - len(arguments)]
        program.words = [*head, *_read_accelerate(program, arguments)]
    elif name == "torchrun":
        program.words = _read_torchrun(program, arguments, is_wrapped)
    elif name == "deepspeed":
        program.words = _read_deepspeed(program, arguments, is_wrapped)
    elif name == "trl":
        program.launcher = "trl"  # submit reads its options
    elif name in OTHERS:
        raise UsageError(f"{name}: clustertrain starts the processes itself", fix=OTHERS[name])
    elif program.name in WRAPPERS or program.name in CONTAINER_RUNTIMES:
        _read_wrapped(program)


def _read_torchrun(program: Program, arguments: list[str], is_wrapped: bool) -> list[str]:
    python, head = name_python(program.words[0]), program.words[: len(program.words) - len(arguments)]
    launch = parse_torchrun(arguments)
    sizes, kinds, rest = launch.sizes, launch.kinds, launch.program
    passes_local_rank = any(word.endswith(OLD_LAUNCH) for word in head) and "use-env" not in kinds
    _check_program("torchrun", rest)
    program.launcher = "torchrun"
    program.replaced.append("torchrun and its options")
    program.ranks_per_node = _number(sizes.get("nproc-per-node"))
    program.nodes = _number(sizes.get("nnodes"))
    if passes_local_rank and not is_wrapped:
        return [*head, *(f"--{kind}" for kind in sorted(kinds)), *rest]
    if passes_local_rank:
        program.warnings.append("torch.distributed.launch passes --local-rank; here LOCAL_RANK is in the environment")
    return rest if "no-python" in kinds else [python, *(["-m"] if "module" in kinds else []), *rest]


def _read_deepspeed(program: Program, arguments: list[str], is_wrapped: bool) -> list[str]:
    python, rest, flags = name_python(program.words[0]), list(arguments), set[str]()
    head = program.words[: len(program.words) - len(arguments)]
    short = {"H": "hostfile", "i": "include", "e": "exclude"}
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        text, has_value, value = word.lstrip("-").partition("=")
        name = short.get(text, text.replace("_", "-"))
        if name in _DEEPSPEED_FLAGS:
            flags.add(name)
            continue
        if name not in _DEEPSPEED_VALUED:
            raise UsageError(
                f"deepspeed {word}: an option that clustertrain does not know",
                fix="remove it, or name the program without deepspeed",
            )
        if not has_value:
            value = rest.pop(0) if rest else ""
        if name in ("include", "exclude"):
            program.warnings.append(f"deepspeed --{name} {value}: every GPU of the job gets a rank")
        elif name == "num-gpus":
            program.ranks_per_node = _number(value)
        elif name == "num-nodes":
            program.nodes = _number(value)
    _check_program("deepspeed", rest)
    program.launcher = "deepspeed"
    program.replaced.append("deepspeed and its options")
    if "no-local-rank" not in flags and not is_wrapped:
        return [*head, *(f"--{flag.replace('-', '_')}" for flag in ("module", "no-python") if flag in flags), *rest]
    if "no-local-rank" not in flags:
        program.warnings.append("deepspeed passes --local_rank to the script; here LOCAL_RANK is in the environment")
    return rest if "no-python" in flags else [python, *(["-m"] if "module" in flags else []), *rest]


def _read_accelerate(program: Program, arguments: list[str]) -> list[str]:
    """Return the arguments without addresses, which submit sets, and without sizes that only the job knows."""
    kept, rest, sizes = list[str](), list(arguments), dict[str, str]()
    while rest and not rest[0].endswith(".py") and rest[0] not in ("-m", "--module"):
        word = rest.pop(0)
        text, has_value, value = word.lstrip("-").partition("=")
        name = text.replace("_", "-") if word.startswith("--") else ""
        if name in _ACCELERATE_FLAGS:
            continue
        if name in _ACCELERATE_OWN or name in ("num-machines", "num-processes"):
            value = value if has_value else (rest.pop(0) if rest else "")
            if name in _ACCELERATE_OWN:
                continue
            sizes[name] = value
            if value.isdecimal():
                kept += [word] if has_value else [word, value]
            continue
        kept.append(word)
    program.launcher = "accelerate launch"
    program.replaced.append("addresses and ports of accelerate launch")
    program.nodes = _number(sizes.get("num-machines"))
    program.total = _number(sizes.get("num-processes"))
    return [*kept, *rest]


def _read_wrapped(program: Program) -> None:
    """Replace torchrun or deepspeed behind a wrapper such as ``uv run``.

    Raises:
        UsageError: accelerate, or a container that is not translated.
    """
    words = program.words
    if program.name in CONTAINER_RUNTIMES:
        _check_runtime(words)
        return
    place = find_program(words, starts_with_launcher)
    check_wrappers(place, words[place.index :])
    index = place.index
    if index == 0 or MARK.search(words[index]):  # variables stand before it: what they hold is not known
        names = [bool(name_launcher([word])) or word == "accelerate" or is_python(word) for word in words]
        index = names.index(True) if True in names else len(words)
    is_module = index < len(words) and words[index] in MODULE_OPTIONS
    inner = Program(["python", "-m", *words[index + 1 :]] if is_module else words[index:])
    read_launcher(inner, is_wrapped=True)
    if inner.launcher in ("accelerate launch", "trl"):
        raise refuse_wrapped_accelerate(inner.launcher, program.name)
    if not inner.launcher:
        return
    program.words = [*words[:index], *inner.words]
    program.launcher = inner.launcher
    program.nodes, program.ranks_per_node = inner.nodes, inner.ranks_per_node
    program.replaced += inner.replaced
    program.warnings += inner.warnings


def _check_runtime(words: list[str]) -> None:
    """Refuse a container runtime whose containers would not get the variables of the ranks, or start a launcher."""
    name = PurePath(words[0]).name
    if name in APPTAINER:
        parse_apptainer(words)  # says which option is in the way
    if name in _ISOLATED or find_hidden_launcher(words):
        raise refuse_runtime(name, find_contained_command(words))


def _check_program(launcher: str, rest: Sequence[str]) -> None:
    if not rest:
        raise UsageError(f"{launcher}: no program after its options", fix="name the script after the options")
    if MARK.fullmatch(rest[0]) and len(rest) > 1:
        raise UsageError(
            f"{launcher}: what stands before the program is known only when the script runs",
            fix="write the options of the launcher, and the program, without variables that the script computes",
        )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 7 else None
