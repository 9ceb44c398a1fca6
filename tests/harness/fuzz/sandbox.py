"""Where one process plays its inputs: a site with a home, a profile, fake Slurm commands, and traps."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO
from unittest import mock

from clustertrain.cli.main import main
from tests.harness.fuzz.judge import Fault, FaultFound, watching

# Stands for the file that only executed input creates.
CANARY = "@CANARY@"
# What must never leave the file that it is in.
SECRET = "s3cr3t-b9c41f"
EXIT_CODES = frozenset({0, 1, 2, 75, 78, 93})
# ESC and its relatives, DEL, C1, and what turns the direction of text: a terminal acts on them.
RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Prints what :meth:`Sandbox.answer` has set for the command, or for the command with one of its arguments.
SLURM = """#!/bin/sh
[ "$1" = --version ] && echo slurm-wlm 22.05.8 && exit 0
cd {answers} || {{ {otherwise}; }}
for word in "$@" ''; do
    said={name}.$word
    [ -f "${{said%.}}" ] || continue
    cat "${{said%.}}"
    cat errors >&2
    exit "$(cat status)"
done
{otherwise}
"""
OTHERWISE = {
    "sbatch": "echo 4711; exit 0",
    "squeue": "exit 0",
    "scontrol": "exit 1",
    "sacct": "exit 0",
    "scancel": "exit 0",
}


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Sandbox:
    """``site`` is the current folder of the calls, ``outside`` what they must leave as it is."""

    root: Path
    exits: Counter[int] = field(default_factory=Counter)  # how the calls ended

    @property
    def site(self) -> Path:
        return self.root / "site"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    @property
    def canary(self) -> Path:
        return self.root / "struck"

    def arm(self, text: str) -> str:
        """``text`` with the path of the canary filled in."""
        return text.replace(CANARY, str(self.canary))

    def arm_bytes(self, data: bytes) -> bytes:
        return data.replace(CANARY.encode(), str(self.canary).encode())

    def fresh(self, name: str) -> Path:
        """The folder ``name`` of the site, empty. The path has no link that an input could have left."""
        folder = self.site / name
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def answer(self, said: Mapping[str, bytes], errors: bytes, status: int) -> None:
        """What Slurm's commands print from now on, by their names; `scontrol.node` is for calls with that
        argument."""
        folder = self.root / "answers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, text in said.items():
            (folder / name).write_bytes(text)
        (folder / "errors").write_bytes(errors)
        (folder / "status").write_text(str(status))

    def check(self) -> None:
        """Raises FaultFound where a trap went off."""
        if self.canary.exists():
            self.canary.unlink()
            raise FaultFound(Fault("canary", "a canary", "input was executed"))
        if sorted(p.name for p in self.outside.iterdir()) != ["secret"]:
            raise FaultFound(Fault("outside", "the folder beside", str(sorted(self.outside.iterdir()))))

    def call(self, argv: Sequence[str], *, terminal_safe: bool = False) -> Said:
        """``clustertrain ARGV`` in this process, judged.

        Args:
            terminal_safe: what it prints must hold nothing that a terminal acts on.

        Raises:
            FaultFound: it misbehaved.
        """
        out, err = io.BytesIO(), io.BytesIO()
        # As Python's own: a command whose output cannot be encoded ends with a traceback.
        stdout = io.TextIOWrapper(out, "utf-8", errors="strict", write_through=True)
        stderr = io.TextIOWrapper(err, "utf-8", errors="backslashreplace", write_through=True)
        code = self.run(argv, stdout, stderr)
        said = Said(code, out.getvalue().decode(), err.getvalue().decode())
        self.judge(argv, said, terminal_safe=terminal_safe)
        return said

    def run(self, argv: Sequence[str], stdout: TextIO | None, stderr: TextIO | None) -> int:
        """As :meth:`call`, with these streams, and without a look at what was printed; returns the exit status."""
        code = 0
        with (
            mock.patch.object(sys, "argv", ["clustertrain", *(self.arm(word) for word in argv)]),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
            mock.patch.object(sys, "stdin", io.StringIO()),
            # A command freezes what it has imported, since its process ends: here the garbage would stay.
            mock.patch("gc.freeze"),
            watching([self.site, self.home]),
        ):
            code = main()
        self.exits[code] += 1
        self.check()
        return code

    def judge(self, argv: Sequence[str], said: Said, *, terminal_safe: bool) -> None:
        """Raises FaultFound where the exit status or what was printed is not as it must be."""
        verb = next((word for word in argv if word.isalpha()), "")
        if said.code not in EXIT_CODES:
            raise FaultFound(Fault("exit", verb, f"exit status {said.code}"))
        if said.code == 2 and not said.err.strip():
            raise FaultFound(Fault("exit", verb, "exit status 2 without a word"))
        if "Traceback (most recent call last)" in said.err:
            raise FaultFound(Fault("traceback", f"printed by {verb}", said.err[-3000:]))
        raw = RAW.search(said.out + said.err) if terminal_safe else None
        if raw is not None:
            raise FaultFound(
                Fault("raw", f"{verb} {raw[0]!r}", (said.out + said.err)[max(0, raw.start() - 60) :][:200])
            )


@contextlib.contextmanager
def sandbox() -> Iterator[Sandbox]:
    """A sandbox in a temporary folder, entered: the current folder, the environment and `tempfile` are its own."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as name:
        made = Sandbox(Path(name).resolve())
        for folder in (made.site, made.home / "runs", made.outside, made.site / "tmp", made.root / "bin"):
            folder.mkdir(parents=True)
        (made.outside / "secret").write_text(SECRET)
        (made.root / "answers").mkdir()
        for command, otherwise in OTHERWISE.items():
            path = made.root / "bin" / command
            path.write_text(SLURM.format(name=command, answers=made.root / "answers", otherwise=otherwise))
            path.chmod(0o755)
        env = {
            "PATH": f"{made.root / 'bin'}:{os.environ['PATH']}",
            "HOME": str(made.site),
            "CLUSTERTRAIN_HOME": str(made.home),
            "CLUSTERTRAIN_CLUSTER_PATH": str(made.site / "profiles"),
            "XDG_CONFIG_HOME": str(made.site / "config"),
            "XDG_CACHE_HOME": str(made.site / "cache"),
            "COLUMNS": "100",
            "LANG": "C.UTF-8",
        }
        with (
            mock.patch.dict(os.environ, env, clear=True),
            mock.patch.object(tempfile, "tempdir", str(made.site / "tmp")),
            contextlib.chdir(made.site),
        ):
            yield made
