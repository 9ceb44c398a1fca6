"""Which launcher a command starts with: ``torchrun`` and its like, under any of their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from clustertrain import proc
from clustertrain.submit.launchers.mpi_launch import MPI
from clustertrain.submit.program.python_words import find_python_program, is_python
from clustertrain.submit.program.wrappers import MODULE_OPTIONS, WRAPPERS

OLD_LAUNCH = "torch.distributed.launch"  # passes --local-rank to the script, unless it gets --use-env
REPLACED = frozenset({"torchrun", "accelerate launch", "deepspeed", "trl"})
"""Launchers whose meaning clustertrain knows."""
_LAUNCH_MODULES = {
    "torch.distributed.run": "torchrun",
    OLD_LAUNCH: "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
# Modules with the command line of a console script.
_SCRIPT_MODULES = {
    "accelerate.commands.accelerate_cli": "accelerate",
    "axolotl.cli.main": "axolotl",
    "composer.cli.launcher": "composer",
    "lightning.fabric.cli": "fabric",
    "lightning_fabric.cli": "fabric",
    "llamafactory.cli": "llamafactory-cli",
    "trl.cli": "trl",
    "trl.cli.main": "trl",
}
_TRL_WITHOUT_LAUNCH = frozenset({"chat", "env", "skills", "vllm-serve"})
_OWN_PROCESSES = "name the program itself: clustertrain starts a process for each GPU"
_SCRIPT_ITSELF = "name the script itself, which reads RANK, LOCAL_RANK and WORLD_SIZE: -- python SCRIPT"
_FABRIC = "name the script itself, and let it call fabric.launch(): -- python SCRIPT"
OTHERS = {
    **dict.fromkeys([*MPI, "aprun", "ibrun", "jsrun", "prun"], _OWN_PROCESSES),
    "axolotl train": "name the module that each rank runs: -- python -m axolotl.cli.train CONFIG",
    "colossalai run": _SCRIPT_ITSELF,
    "composer": _SCRIPT_ITSELF,
    "fabric run": _FABRIC,
    "horovodrun": "let the program use torch.distributed, and name it without horovodrun",
    "lightning run": _FABRIC,
    "llamafactory-cli train": "name the module that each rank runs: -- python -m llamafactory.launcher CONFIG",
    "sbatch": "name the program itself; clustertrain runs sbatch",
    "srun": "name the program itself",
    "torchx run": "name the script itself: -- python SCRIPT",
    "tune run": "leave its options for torchrun out, and give --gpus and --nodes: -- tune run RECIPE --config CONFIG",
}
"""Launchers that are refused, with what to do instead."""
_WITH_SUBCOMMAND = frozenset(name.partition(" ")[0] for name in [*REPLACED, *OTHERS] if " " in name) | {"trl"}
_QUESTIONS = frozenset({"-h", "--help", "--version"})


def split_launcher(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the launcher that ``command`` starts with, and the arguments after it; empty: none that is known."""
    name, arguments = PurePath(command[0]).name, list(command[1:])
    if not is_python(name):
        return _split_subcommand(name, arguments)
    program = find_python_program(command)
    arguments = list(command[program.index + 1 :])
    if program.kind == "module":
        if program.module in _LAUNCH_MODULES:
            return _LAUNCH_MODULES[program.module], arguments
        return _split_subcommand(_SCRIPT_MODULES.get(program.module, ""), arguments)
    # python /env/bin/torchrun SCRIPT
    return _split_subcommand(PurePath(command[program.index]).name if program.kind == "script" else "", arguments)


def _split_subcommand(name: str, arguments: list[str]) -> tuple[str, list[str]]:
    """Return the launcher that a console script is with these arguments, and its own; empty: none."""
    if arguments and _QUESTIONS.issuperset(arguments):
        return "", arguments
    if name == "accelerate-launch":
        return "accelerate launch", arguments
    subcommand = arguments[0] if arguments else ""
    if name == "trl":
        is_training = subcommand.isidentifier() and subcommand not in _TRL_WITHOUT_LAUNCH
        return "trl" if is_training else "", arguments
    if name in _WITH_SUBCOMMAND:
        found = f"{name} {subcommand}"
        is_launcher = found in REPLACED or found in OTHERS
        if found == "tune run":  # without torchrun's options it runs the recipe in its own process
            is_launcher = arguments[1:2] != [] and arguments[1].startswith("-")
        return found if is_launcher else "", arguments[1:] if is_launcher else arguments
    is_known = name in REPLACED or name in OTHERS
    if name == "composer":  # a package manager has the same name
        is_known = any(argument == "-m" or argument.endswith(".py") for argument in arguments)
    return name if is_known else "", arguments


def name_launcher(words: Sequence[str]) -> str:
    """Return the launcher that ``words`` start with; empty: none that is known."""
    return split_launcher(["python", "-m", *words[1:]] if words[0] in MODULE_OPTIONS else words)[0]


def starts_with_launcher(words: Sequence[str]) -> bool:
    """Return whether ``words`` start with a launcher that is known."""
    return bool(name_launcher(words))


def is_program(word: str) -> bool:
    """Return whether a word names Python, a shell, a wrapper or a launcher."""
    name = PurePath(word).name
    is_known = name in proc.SHELLS or name in WRAPPERS or name in _WITH_SUBCOMMAND
    return is_known or is_python(word) or bool(name_launcher([word]))
