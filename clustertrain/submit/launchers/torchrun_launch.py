"""The command line of ``torchrun``: its sizes, its program, and what cannot be honored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clustertrain.errors import UsageError
from clustertrain.submit.launchers.launch import Launch, note_unused

# Options of torchrun (torch 2.13) by what becomes of them.
SIZES = {"nnodes": "nodes", "nproc-per-node": "gpus"}
"""By option, the option of ``submit``."""
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


@dataclass
class TorchrunLaunch:
    """What the options of torchrun ask for."""

    sizes: dict[str, str] = field(default_factory=dict)
    """By option, as in :data:`SIZES`."""
    kinds: set[str] = field(default_factory=set)
    """Flags that say what the program is."""
    unused: list[str] = field(default_factory=list)
    """Options without effect here."""
    program: list[str] = field(default_factory=list)


def parse_torchrun(arguments: Sequence[str]) -> TorchrunLaunch:
    """Return what the options ask for, and the program with its arguments.

    Raises:
        UsageError: an option is not known or cannot be honored, or a value is missing.
    """
    launch, rest = TorchrunLaunch(), list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        argument = rest.pop(0)
        if argument == "--":
            break
        text, has_value, value = argument.lstrip("-").partition("=")
        name = _SHORT.get(text, text.replace("_", "-"))
        if name in _KIND_FLAGS:
            launch.kinds.add(name)
            continue
        if name in _UNSUPPORTED:
            raise UsageError(f"torchrun --{name}: cannot be honored", fix=_UNSUPPORTED[name])
        if name not in SIZES and name not in _OWN and name not in _OWN_FLAGS:
            raise UsageError(
                f"torchrun {argument}: not an option of torchrun that clustertrain knows",
                fix="remove it, or name the program without torchrun",
            )
        if not has_value and name not in _OWN_FLAGS:
            if not rest:
                raise UsageError(f"torchrun --{name}: the value is missing")
            value = rest.pop(0)
        if name in SIZES:
            launch.sizes[name] = value
        else:
            launch.unused.append(name)
    launch.program = rest
    return launch


def read_torchrun(python: str, arguments: Sequence[str], *, passes_local_rank: bool) -> Launch:
    """Return what torchrun would start.

    Args:
        passes_local_rank: it is ``torch.distributed.launch``, which gives the script an option with its local rank.

    Raises:
        UsageError: as :func:`parse_torchrun`, or there is no program.
    """
    launch = parse_torchrun(arguments)
    program = launch.program
    if not program:
        raise UsageError("torchrun: no program after its options", fix="name the script: -- torchrun SCRIPT ARGS")
    start = [] if "no-python" in launch.kinds else [python, *(["-m"] if "module" in launch.kinds else [])]
    index = None
    if passes_local_rank and "use-env" not in launch.kinds:
        index = len(start) + 1
        program.insert(1, "--local-rank")
    notes = tuple(note_unused("torchrun", launch.unused))
    return Launch([*start, *program], launch.sizes, local_rank_index=index, notes=notes)
