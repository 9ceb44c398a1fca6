"""Where the output of a command cannot go: full disks, readers that leave, closed streams, in real processes."""

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

pytestmark = pytest.mark.long

COMMANDS = [("list",), ("list", "--json"), ("cluster", "list"), ("--help",)]
CLUSTERTRAIN = f'"{sys.executable}" -m clustertrain'


def shell(line: str, home: Path, **env: str) -> tuple[int, str, str]:
    """The exit status of what is before the first pipe, and what was printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "SLURM_", "PYTHONUNBUFFERED"))}
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"], env={**clean, "CLUSTERTRAIN_HOME": str(home), **env},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_output_lost_on_a_full_disk_is_a_failure(words: tuple[str, ...], tmp_path: Path) -> None:
    code, _, said = shell(f"{CLUSTERTRAIN} {' '.join(words)} > /dev/full", tmp_path)
    assert code == 1
    assert said.startswith("clustertrain: ") and said.endswith(": No space left on device\n") and said.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_lost_output_of_a_command_that_failed_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`checkpoint diff` exits with 1 where it finds a difference, and its output was to say which."""
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        full.write("they differ")
        assert output.flush_output(1) == 1
    assert capsys.readouterr().err == "clustertrain: standard output: No space left on device\n"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_reader_that_has_left_is_told_nothing(words: tuple[str, ...], tmp_path: Path) -> None:
    """The pipe has no reader any more when the first byte comes."""
    code, _, said = shell(f"(sleep 0.1; exec {CLUSTERTRAIN} {' '.join(words)}) | true", tmp_path)
    assert (code, said) == (1, "")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"{CLUSTERTRAIN} list 1< /dev/null", "Bad file descriptor"),
        (f"head -c 1023 /dev/zero > big; ulimit -f 1; {CLUSTERTRAIN} list >> big", "File too large"),
    ],
)
def test_a_stdout_that_takes_nothing_is_named(
    line: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened for reading, and full by `ulimit -f`."""
    monkeypatch.chdir(tmp_path)
    code, _, said = shell(line, tmp_path)
    assert (code, said) == (1, f"clustertrain: standard output: {why}\n")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_closed_stdout_leads_nowhere(words: tuple[str, ...], tmp_path: Path) -> None:
    assert shell(f"{CLUSTERTRAIN} {' '.join(words)} >&-", tmp_path)[::2] == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("to", ["2> /dev/full", "2>&-"])
def test_an_error_that_cannot_be_told_keeps_its_exit_status(to: str, tmp_path: Path) -> None:
    assert shell(f"{CLUSTERTRAIN} status no-such-run {to}", tmp_path)[0] == 1
    assert shell(f"{CLUSTERTRAIN} no-such-verb {to}", tmp_path)[0] == 2


def test_help_is_printed_in_any_encoding(tmp_path: Path) -> None:
    code, shown, said = shell(f"{CLUSTERTRAIN} plan --help", tmp_path, PYTHONIOENCODING="ascii")
    assert (code, said) == (0, "") and shown.isascii() and "\\u2026" in shown


def test_json_is_valid_in_any_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    value = {"müde": "漢 🙂"}
    for encoding in ("ascii", "latin-1", "utf-8"):
        path = tmp_path / encoding
        with path.open("w", encoding=encoding) as out:
            monkeypatch.setattr(sys, "stdout", out)
            with sanitized_output():
                print_json(value)
                print_json_line(value)
        shown = path.read_text(encoding)
        assert json.loads(shown.splitlines()[-1]) == value == json.loads("".join(shown.splitlines()[:-1]))
        assert shown.isascii() == (encoding != "utf-8")
