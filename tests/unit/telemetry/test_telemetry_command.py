from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustertrain import settings
from clustertrain.cli.telemetry import seconds, telemetry
from clustertrain.errors import UsageError
from tests.unit.telemetry.runs import busy, gpu, new_attempt, new_run, record


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.HOME, str(tmp_path))
    record(new_attempt(new_run(tmp_path)), [(gpu(i), busy()) for i in range(2)])


def test_json_is_one_document() -> None:
    done = CliRunner().invoke(telemetry, ["--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["run"], found["job_id"], len(found["gpus"])) == ("gpt-abc234", "4711", 2)


def test_the_report_and_its_choices() -> None:
    done = CliRunner().invoke(telemetry, ["gpt", "--gpu", "1", "--since", "30s", "--attempt", "1"])
    assert done.exit_code == 0
    assert "1 GPUs allocated" not in done.stdout
    assert "gpt-abc234" in done.stdout


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("90s", 90), ("10m", 600), ("1h", 3600), ("1h30m", 5400)])
def test_lengths_of_time(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "ten", "10 m", "-5m", "5x"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(UsageError, match="--since"):
        seconds(text)


def test_importing_the_command_costs_little() -> None:
    program = (
        "import sys, clustertrain.cli.telemetry as t\n"
        "heavy = {'rich', 'numpy', 'psutil', 'torch', 'pynvml', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from clustertrain.telemetry import query\n"
        "assert not {'torch', 'pynvml'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
