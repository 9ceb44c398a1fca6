"""What a launcher would start, read from its command line."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

# What clustertrain does in place of a launcher's options. Names are those of torchrun, deepspeed and accelerate.
_ADDRESSES = "clustertrain sets addresses and ports"
_RESTARTS = "clustertrain's requeues replace it, up to --max-requeues"
_LOGS = "each rank has a log (clustertrain logs)"
_WITHOUT_EFFECT = {
    **dict.fromkeys(
        ("standalone", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "node-rank", "master-addr",
         "master-port", "local-addr", "main-process-ip", "main-process-port", "machine-rank", "same-network"),
        _ADDRESSES,
    ),
    **dict.fromkeys(("max-restarts", "monitor-interval"), _RESTARTS),
    **dict.fromkeys(
        ("log-dir", "redirects", "tee", "local-ranks-filter", "logs-specs", "duplicate-stdout-filters",
         "duplicate-stderr-filters", "log-level", "enable-each-rank-log", "quiet"),
        _LOGS,
    ),
    **dict.fromkeys(
        ("launcher", "ssh-port", "no-ssh", "no-ssh-check", "force-multi", "start-method"),
        "clustertrain starts the processes",
    ),
    "signals-to-handle": "--stop-signal chooses the signal",
    "gpu-ids": "Slurm chooses the GPUs",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What a launcher would start."""

    command: list[str]
    """Of a rank."""
    sizes: dict[str, str]
    """By torchrun's options."""
    env: dict[str, str] = field(default_factory=dict)
    local_rank_index: int | None = None
    """Which word of the command is an option that gets the local rank."""
    source: str = ""
    """Where the sizes come from, for an error about them."""
    fix: str = "remove one of them"
    notes: tuple[str, ...] = ()


def note_unused(launcher: str, given: Collection[str]) -> Iterator[str]:
    """Iterate over notes that name the options ``given``, which have no effect, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for option in dict.fromkeys(given):
        by_reason.setdefault(_WITHOUT_EFFECT.get(option, ""), []).append(f"--{option}")
    for reason, options in by_reason.items():
        yield f"{launcher} {', '.join(options)}: no effect" + (f"; {reason}" if reason else "")
