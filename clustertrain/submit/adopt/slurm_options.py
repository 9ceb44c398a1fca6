"""The options of sbatch and srun (Slurm 25.05): their names, and which take a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clustertrain.errors import UsageError

_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "h": "help",
    "I": "immediate", "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters",
    "m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "P": "dependency",
    "p": "partition", "Q": "quiet", "q": "qos", "S": "core-spec", "s": "oversubscribe", "t": "time", "V": "version",
    "v": "verbose", "W": "wait", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_SRUN_SHORT = {
    "E": "preserve-env", "K": "kill-on-bad-exit", "l": "label", "r": "relative", "T": "threads", "u": "unbuffered",
    "X": "disable-status", "Z": "no-allocate",
}  # fmt: skip
_FLAGS = frozenset({
    "contiguous", "help", "hold", "no-requeue", "overcommit", "oversubscribe", "quiet", "reboot", "requeue",
    "spread-job", "stepmgr", "test-only", "usage", "use-min-nodes", "verbose", "version",
})  # fmt: skip
_SBATCH_FLAGS = frozenset({"ignore-pbs", "parsable", "wait"})
_SRUN_FLAGS = frozenset({
    "disable-status", "exact", "external-launcher", "interactive", "label", "multi-prog", "no-allocate", "overlap",
    "preserve-env", "pty", "quit-on-interrupt", "unbuffered",
})  # fmt: skip
_OPTIONAL = frozenset({"exclusive", "get-user-env", "immediate", "nice", "no-kill", "propagate"})
_SRUN_OPTIONAL = frozenset({"bcast", "compress", "kill-on-bad-exit", "resv-ports", "send-libs", "x11"})
_VALUED = frozenset({
    "account", "acctg-freq", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters", "comment",
    "constraint", "container", "container-id", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu",
    "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "error", "exclude", "export",
    "export-file", "extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node",
    "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint", "input", "job-name", "kill-on-invalid-dep",
    "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus",
    "network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node",
    "ntasks-per-socket", "oom-kill-step", "open-mode", "output", "partition", "power", "prefer", "priority", "profile",
    "qos", "reservation", "segment", "signal", "sockets-per-node", "switches", "thread-spec", "threads-per-core",
    "time", "time-min", "tmp", "tres-bind", "tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap",
})  # fmt: skip
_SRUN_VALUED = frozenset({
    "accel-bind", "bcast-exclude", "cpu-bind", "epilog", "het-group", "jobid", "mpi", "msg-timeout", "prolog",
    "relative", "slurmd-debug", "task-epilog", "task-prolog", "threads", "wait",
    # Pyxis
    "container-image", "container-mounts", "container-workdir", "container-name", "container-save", "container-env",
})  # fmt: skip
_SRUN_MORE_FLAGS = frozenset({
    "container-mount-home", "no-container-mount-home", "container-remap-root", "no-container-remap-root",
    "container-writable", "container-readonly", "container-entrypoint", "no-container-entrypoint",
})  # fmt: skip


@dataclass(frozen=True)
class Syntax:
    """The options of a program."""

    program: str
    short: Mapping[str, str]
    flags: frozenset[str]
    optional: frozenset[str]
    """Options whose value, if any, is attached."""
    valued: frozenset[str]

    def find(self, name: str) -> str | None:
        """Return the full name of the option ``name``, which getopt lets be abbreviated; None: it is unknown."""
        names = self.flags | self.optional | self.valued
        matches = [name] if name in names else [full for full in names if full.startswith(name)]
        return matches[0] if len(matches) == 1 else None


SBATCH = Syntax("sbatch", _SHORT, _FLAGS | _SBATCH_FLAGS, _OPTIONAL, _VALUED)
SRUN = Syntax(
    "srun", {**_SHORT, **_SRUN_SHORT}, _FLAGS | _SRUN_FLAGS | _SRUN_MORE_FLAGS, _OPTIONAL | _SRUN_OPTIONAL,
    _VALUED | _SRUN_VALUED,
)  # fmt: skip


@dataclass(frozen=True)
class GivenOption:
    """An option as it was given."""

    name: str
    """Its long name."""
    value: str
    """Empty for a flag."""
    text: str
    is_known: bool = True


def parse_options(words: Sequence[str], syntax: Syntax) -> tuple[list[GivenOption], list[str]]:
    """Return the options at the start of ``words``, and the words after them.

    An option that ``syntax`` does not know has the value after ``=``, or for sbatch the next word.

    Raises:
        UsageError: a value is missing, or an unknown option of srun may or may not have one.
    """
    rest, given = list(words), list[GivenOption]()
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        given += _parse_long(word, rest, syntax) if word.startswith("--") else _parse_short(word, rest, syntax)
    return given, rest


def _parse_long(word: str, rest: list[str], syntax: Syntax) -> Iterator[GivenOption]:
    text, has_value, value = word[2:].partition("=")
    name = syntax.find(text)
    if name is None:
        if not has_value:
            if syntax is SRUN:
                raise UsageError(
                    f"srun {word}: an option that clustertrain does not know",
                    fix=f"write {word}=VALUE if it takes a value, or remove it",
                )
            value = rest.pop(0) if rest and not rest[0].startswith("-") else ""
        yield GivenOption(text, value, word if has_value else f"{word} {value}".strip(), is_known=False)
    elif name in syntax.valued and not has_value:
        yield GivenOption(name, value := _take_value(word, rest, syntax), f"{word} {value}")
    else:
        yield GivenOption(name, value, word)


def _parse_short(word: str, rest: list[str], syntax: Syntax) -> Iterator[GivenOption]:
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = syntax.short.get(letter)
        if name is None:
            raise UsageError(f"{syntax.program} -{letter}: not an option of {syntax.program}", fix="remove it")
        if name in syntax.valued:
            value = letters or _take_value(f"-{letter}", rest, syntax)
            yield GivenOption(name, value, f"-{letter} {value}")
            return
        if name in syntax.optional:
            yield GivenOption(name, letters, f"-{letter}{letters}")
            return
        yield GivenOption(name, "", f"-{letter}")


def _take_value(word: str, rest: list[str], syntax: Syntax) -> str:
    if not rest:
        raise UsageError(f"{syntax.program} {word}: the value is missing", fix="write the value after it")
    return rest.pop(0)
