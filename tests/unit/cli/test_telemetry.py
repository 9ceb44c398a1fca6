"""``clustertrain telemetry``: its options, its errors, and what it imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustertrain import settings
from clustertrain.cli.compare import compare
from clustertrain.cli.telemetry import parse_since, telemetry
from clustertrain.errors import ClusterTrainError, NotFound, UsageError
from clustertrain.run.run_dir import open_run
from tests.unit.telemetry.runs import busy, gpu, new_attempt, new_run, record


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.HOME, str(tmp_path))
    record(new_attempt(new_run(tmp_path)), [(gpu(i), busy()) for i in range(2)])


def test_json_is_one_document() -> None:
    done = CliRunner().invoke(telemetry, ["--json"])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert (report["run"], report["job_id"], len(report["gpus"])) == ("gpt-abc234", "4711", 2)


def test_report_can_be_limited_to_a_gpu_time_and_attempt() -> None:
    done = CliRunner().invoke(telemetry, ["gpt", "--gpu", "1", "--since", "30s", "--attempt", "1"])
    assert done.exit_code == 0
    assert "1 GPUs allocated" not in done.stdout
    assert "gpt-abc234" in done.stdout


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("90s", 90), ("10m", 600), ("1h", 3600), ("1h30m", 5400), ("10min", 600)]
)
def test_since_parses_durations(text: str, value: float) -> None:
    assert parse_since(text) == value


@pytest.mark.parametrize("text", ["", "ten", "10 minutes", "-5m", "5x", "0s", "0"])
def test_since_refuses_other_text(text: str) -> None:
    with pytest.raises(UsageError, match="--since"):
        parse_since(text)


@pytest.mark.long
def test_command_imports_no_heavy_packages() -> None:
    program = (
        "import sys, clustertrain.cli.telemetry as t\n"
        "heavy = {'rich', 'numpy', 'psutil', 'torch', 'pynvml', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from clustertrain.telemetry.analysis import summarize\n"
        "assert not {'torch', 'pynvml'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("gtp-abc234", "did you mean gpt-abc234"),
        ("gpd", "did you mean gpt-abc234"),
        ("4712", r"did you mean gpt-abc234 \(job 4711\)"),
        ("zzzzzz", "^`clustertrain list` shows the runs$"),
    ],
)
def test_unknown_run_suggests_close_matches(name: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustertrain.scheduler.slurm.find_work_dir", lambda _name: None)
    for command, args in ((telemetry, [name]), (compare, ["gpt-abc", name])):
        done = CliRunner().invoke(command, args)
        assert isinstance(done.exception, NotFound)
        assert re.search(fix, done.exception.fix or "")


def test_private_run_of_another_user_suggests_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "runs/gpt-abc234/attempts"))

    monkeypatch.setattr("clustertrain.telemetry.analysis.summarize.summarize", refuse)
    done = CliRunner().invoke(telemetry, ["gpt-abc"])
    assert isinstance(done.exception, ClusterTrainError)
    assert "attempts: you may not read it; it belongs to" in str(done.exception)
    assert "submit --share" in str(done.exception)


def test_run_folder_without_permission_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ClusterTrainError, match="you may not read it"):
        open_run(tmp_path / "runs" / "gpt-abc234")


@pytest.mark.parametrize("option", ["--html", "--parquet"])
def test_html_and_parquet_are_refused_on_standard_output(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(telemetry, [option, "-"])
    assert isinstance(done.exception, ClusterTrainError) and f"{option} -" in done.exception.message
    assert done.exception.fix and not (tmp_path / "-").exists()
