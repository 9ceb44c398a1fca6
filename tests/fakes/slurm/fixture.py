"""The fixture ``fake_slurm``, for conftest files to import."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# Records its arguments, environment and script, then prints the answer that the test has set. Tests start it hundreds
# of times, so it imports little: pathlib alone would take a fourth of its time.
_COMMAND = """#!{python} -IS
import json, os, sys
folder = {folder!r}
name = os.path.basename(sys.argv[0])
asked_version = "--version" in sys.argv
script = open(sys.argv[-1]).read() if name == "sbatch" and not asked_version else ""
with open(folder + "/" + name + ".calls", "a") as f:
    f.write(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ), "script": script}}) + "\\n")
answer = folder + "/" + name + ".answer"
reply = json.load(open(answer)) if os.path.exists(answer) and not asked_version else {{}}
for other, text in reply.get("then", {{}}).items():
    with open(folder + "/" + other + ".answer", "w") as f:
        json.dump({{"stdout": text}}, f)
sys.stderr.write(reply.get("stderr", ""))
sys.stdout.write(reply.get("stdout", "4711\\n" if name == "sbatch" else ""))
sys.exit(reply.get("rc", 0))
"""


@dataclass(frozen=True)
class Call:
    argv: list[str]
    env: dict[str, str]
    script: str


@dataclass(frozen=True)
class FakeSlurm:
    folder: Path

    def answers(
        self, command: str, *, stdout: str = "", stderr: str = "", rc: int = 0, then: dict[str, str] | None = None
    ) -> None:
        """Set the answer of ``command``; ``then`` sets the output of other commands after its next call."""
        answer = {"stdout": stdout, "stderr": stderr, "rc": rc, "then": then or {}}
        (self.folder / f"{command}.answer").write_text(json.dumps(answer))

    def calls(self, command: str) -> list[Call]:
        """Return the calls of ``command``, without those that ask for its version."""
        path = self.folder / f"{command}.calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [c for c in (Call(**json.loads(line)) for line in lines) if "--version" not in c.argv]


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Fakes of sbatch, squeue, scontrol, scancel and sacct, first on PATH, and a CLUSTERTRAIN_HOME for the test."""
    folder = tmp_path / "fake-slurm"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sacct"):
        command = folder / name
        command.write_text(_COMMAND.format(python=sys.executable, folder=str(folder)))
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path / "home"))
    for name in ("CLUSTERTRAIN_CLUSTER", "CLUSTERTRAIN_CLUSTER_PATH", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return FakeSlurm(folder)
