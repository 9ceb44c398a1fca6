"""The sandbox in which one process plays its inputs: folders, fake Slurm commands and traps."""

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

# Placeholder for the path of the canary, a file that only executed input creates.
CANARY = "@CANARY@"
# Content that must never be copied to another file.
SECRET = "s3cr3t-b9c41f"
EXIT_CODES = frozenset({0, 1, 2, 75, 78, 93})
# Characters that a terminal acts on: C0 and C1 controls, DEL, and those that change the direction of text.
RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Prints the answer that :meth:`Sandbox.answer` has set for the command, or for the command with one of its arguments.
SLURM = """#!/bin/sh
[ "$1" = --version ] && echo slurm-wlm 22.05.8 && exit 0
cd {answers} || {{ {default}; }}
for word in "$@" ''; do
    answer={name}.$word
    [ -f "${{answer%.}}" ] || continue
    cat "${{answer%.}}"
    cat errors >&2
    exit "$(cat status)"
done
{default}
"""
DEFAULT_ACTIONS = {
    "sbatch": "echo 4711; exit 0",
    "squeue": "exit 0",
    "scontrol": "exit 1",
    "sacct": "exit 0",
    "scancel": "exit 0",
}


@dataclass(frozen=True)
class CallResult:
    """Exit status and output of a call."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Sandbox:
    """Folders of a sandbox: ``site`` is the current folder of the calls, and they must not change ``outside``."""

    root: Path
    exits: Counter[int] = field(default_factory=Counter)  # number of calls by exit status

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
        return self.root / "canary"

    def arm(self, text: str) -> str:
        """Return ``text`` with the path of the canary filled in."""
        return text.replace(CANARY, str(self.canary))

    def arm_bytes(self, data: bytes) -> bytes:
        return data.replace(CANARY.encode(), str(self.canary).encode())

    def fresh(self, name: str) -> Path:
        """Return the empty folder ``name`` of the site, without links that an earlier input has left."""
        folder = self.site / name
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def answer(self, outputs: Mapping[str, bytes], errors: bytes, status: int) -> None:
        """Set the output of Slurm's commands, by name.

        Args:
            outputs: output by command; the key `scontrol.node` is for calls with the argument `node`.
            errors: what all of them print to stderr.
            status: the exit status of all of them.
        """
        folder = self.root / "answers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, text in outputs.items():
            (folder / name).write_bytes(text)
        (folder / "errors").write_bytes(errors)
        (folder / "status").write_text(str(status))

    def check(self) -> None:
        """Raise FaultFound if input was executed or the outside folder was changed."""
        if self.canary.exists():
            self.canary.unlink()
            raise FaultFound(Fault("canary", "a canary", "input was executed"))
        if sorted(p.name for p in self.outside.iterdir()) != ["secret"]:
            raise FaultFound(Fault("outside", "the outside folder", str(sorted(self.outside.iterdir()))))

    def call(self, argv: Sequence[str], *, terminal_safe: bool = False) -> CallResult:
        """Run ``clustertrain ARGV`` in this process and judge it.

        Args:
            terminal_safe: whether control characters in its output count as a fault.

        Raises:
            FaultFound: the call committed a fault.
        """
        out, err = io.BytesIO(), io.BytesIO()
        # As in a real process, output that cannot be encoded ends with a traceback.
        stdout = io.TextIOWrapper(out, "utf-8", errors="strict", write_through=True)
        stderr = io.TextIOWrapper(err, "utf-8", errors="backslashreplace", write_through=True)
        code = self.run(argv, stdout, stderr)
        result = CallResult(code, out.getvalue().decode(), err.getvalue().decode())
        self.judge(argv, result, terminal_safe=terminal_safe)
        return result

    def run(self, argv: Sequence[str], stdout: TextIO | None, stderr: TextIO | None) -> int:
        """Run a call with the given streams, without judging its output, and return the exit status."""
        code = 0
        with (
            mock.patch.object(sys, "argv", ["clustertrain", *(self.arm(word) for word in argv)]),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
            mock.patch.object(sys, "stdin", io.StringIO()),
            # Commands freeze all objects, because their process ends soon; here the garbage would accumulate.
            mock.patch("gc.freeze"),
            watching([self.site, self.home]),
        ):
            code = main()
        self.exits[code] += 1
        self.check()
        return code

    def judge(self, argv: Sequence[str], result: CallResult, *, terminal_safe: bool) -> None:
        """Raise FaultFound if the exit status or the output is a fault."""
        verb = next((word for word in argv if word.isalpha()), "")
        if result.code not in EXIT_CODES:
            raise FaultFound(Fault("exit", verb, f"exit status {result.code}"))
        if result.code == 2 and not result.err.strip():
            raise FaultFound(Fault("exit", verb, "exit status 2 without a message"))
        if "Traceback (most recent call last)" in result.err:
            raise FaultFound(Fault("traceback", f"printed by {verb}", result.err[-3000:]))
        raw = RAW.search(result.out + result.err) if terminal_safe else None
        if raw is not None:
            raise FaultFound(
                Fault("raw", f"{verb} {raw[0]!r}", (result.out + result.err)[max(0, raw.start() - 60) :][:200])
            )


@contextlib.contextmanager
def sandbox() -> Iterator[Sandbox]:
    """Enter a new sandbox, with a separate current folder, environment and temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as name:
        box = Sandbox(Path(name).resolve())
        for folder in (box.site, box.home / "runs", box.outside, box.site / "tmp", box.root / "bin"):
            folder.mkdir(parents=True)
        (box.outside / "secret").write_text(SECRET)
        (box.root / "answers").mkdir()
        for command, default in DEFAULT_ACTIONS.items():
            path = box.root / "bin" / command
            path.write_text(SLURM.format(name=command, answers=box.root / "answers", default=default))
            path.chmod(0o755)
        env = {
            "PATH": f"{box.root / 'bin'}:{os.environ['PATH']}",
            "HOME": str(box.site),
            "CLUSTERTRAIN_HOME": str(box.home),
            "CLUSTERTRAIN_CLUSTER_PATH": str(box.site / "profiles"),
            "XDG_CONFIG_HOME": str(box.site / "config"),
            "XDG_CACHE_HOME": str(box.site / "cache"),
            "COLUMNS": "100",
            "LANG": "C.UTF-8",
        }
        with (
            mock.patch.dict(os.environ, env, clear=True),
            mock.patch.object(tempfile, "tempdir", str(box.site / "tmp")),
            contextlib.chdir(box.site),
        ):
            yield box
