"""Output that cannot be written: full disks, readers that exit, closed streams. In real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clustertrain.cli import output
from clustertrain.cli.common import print_json, print_json_line
from clustertrain.printable import sanitized_output
from clustertrain.report.documents.tools import CheckNames

pytestmark = pytest.mark.long

COMMANDS = [("list",), ("list", "--json"), ("cluster", "list"), ("--help",)]
CLUSTERTRAIN = f'"{sys.executable}" -m clustertrain'


def shell(line: str, home: Path, **env: str) -> tuple[int, str, str]:
    """Return the exit status of the first command in the pipe, stdout and stderr."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_", "PYTHONUNBUFFERED"))}
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"], env={**clean, "CLUSTERTRAIN_HOME": str(home), **env},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_output_to_a_full_disk_is_a_failure(args: tuple[str, ...], tmp_path: Path) -> None:
    code, _, stderr = shell(f"{CLUSTERTRAIN} {' '.join(args)} > /dev/full", tmp_path)
    assert code == 1
    assert (
        stderr.startswith("clustertrain: ")
        and stderr.endswith(": No space left on device\n")
        and stderr.count("\n") == 1
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_lost_output_of_a_failed_command_is_reported_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Example: `checkpoint diff` exits with 1 if it finds a difference, and its output would name it."""
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        full.write("they differ")
        assert output.flush_output(1) == 1
    assert capsys.readouterr().err == "clustertrain: standard output: No space left on device\n"


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_nothing_is_reported_to_a_reader_that_exited(args: tuple[str, ...], tmp_path: Path) -> None:
    """The reader has exited before the first byte is written."""
    code, _, stderr = shell(f"(sleep 0.1; exec {CLUSTERTRAIN} {' '.join(args)}) | true", tmp_path)
    assert (code, stderr) == (1, "")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"{CLUSTERTRAIN} list 1< /dev/null", "Bad file descriptor"),
        (f"head -c 1023 /dev/zero > big; ulimit -f 1; {CLUSTERTRAIN} list >> big", "File too large"),
    ],
    ids=["opened-for-reading", "full"],
)
def test_stdout_that_cannot_be_written_is_reported(
    line: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stdout is opened for reading, or is full because of `ulimit -f`."""
    monkeypatch.chdir(tmp_path)
    code, _, stderr = shell(line, tmp_path)
    assert (code, stderr) == (1, f"clustertrain: standard output: {reason}\n")


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_closed_stdout_is_ignored(args: tuple[str, ...], tmp_path: Path) -> None:
    assert shell(f"{CLUSTERTRAIN} {' '.join(args)} >&-", tmp_path)[::2] == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("to", ["2> /dev/full", "2>&-"])
def test_error_that_cannot_be_printed_keeps_its_exit_status(to: str, tmp_path: Path) -> None:
    assert shell(f"{CLUSTERTRAIN} status no-such-run {to}", tmp_path)[0] == 1
    assert shell(f"{CLUSTERTRAIN} no-such-verb {to}", tmp_path)[0] == 2


def test_help_is_printed_in_any_encoding(tmp_path: Path) -> None:
    code, stdout, stderr = shell(f"{CLUSTERTRAIN} plan --help", tmp_path, PYTHONIOENCODING="ascii")
    assert (code, stderr) == (0, "") and stdout.isascii() and "\\u2026" in stdout


def test_json_is_valid_in_any_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    value = {"müde": "漢 🙂"}
    for encoding in ("ascii", "latin-1", "utf-8"):
        path = tmp_path / encoding
        with path.open("w", encoding=encoding) as out:
            monkeypatch.setattr(sys, "stdout", out)
            with sanitized_output():
                print_json("diagnose-checks", CheckNames(checks=value))
                print_json_line("diagnose-checks", CheckNames(checks=value))
        stdout = path.read_text(encoding)
        line, whole = stdout.splitlines()[-1], "".join(stdout.splitlines()[:-1])
        assert json.loads(line)["checks"] == value == json.loads(whole)["checks"]
        assert stdout.isascii() == (encoding != "utf-8")
