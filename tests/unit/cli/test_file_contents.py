"""Well-formed files of a run with impossible content: the commands that read them omit it and report it."""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertrain import fsio
from clustertrain.cli.main import main
from clustertrain.run import attempts
from clustertrain.run.run_dir import RunDir
from clustertrain.telemetry.store import jsonl_blocks, totals
from tests.unit.report.live_runs import begin, new_run, record

pytestmark = pytest.mark.long

RunCli = Callable[..., tuple[int, str, str]]
TELEMETRY = (
    ("telemetry", "{}"),
    ("telemetry", "{}", "--json"),
    ("telemetry", "{}", "--html", "page.html"),
    ("telemetry", "{}", "--csv", "-"),
    ("top", "{}", "--once"),
    ("status", "{}"),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("CLUSTERTRAIN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    now = time.time()
    run = new_run(tmp_path, now)
    begin(run, now - 60, ["a"], steps=20)
    record(run, "a", now - 60, gpus=1, seconds=20, end=True)
    return run


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Run ``clustertrain`` with the given arguments. It returns the exit status, stdout and stderr."""

    def run_cli(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *args])
        code = main()
        return code, *capsys.readouterr()

    return run_cli


def check_commands(run_cli: RunCli, run: RunDir) -> str:
    """Check that all commands that read telemetry succeed, and return the output of `telemetry`."""
    for args in TELEMETRY:
        code, out, err = run_cli(*(arg.format(run.id) for arg in args))
        assert code == 0 and "Traceback" not in err, (args, err)
        assert "nan" not in out.split() and "inf" not in out.split(), args
    return run_cli("telemetry", run.id)[1]


def header_path(run: RunDir) -> Path:
    return run.attempt(1).telemetry / "a" / "0" / "header.json"


@pytest.mark.parametrize(
    ("name", "value"),
    [("interval_s", 0), ("interval_s", -1), ("slow_s", 0), ("t", 4e18), ("t", -1), ("mono", 1e300), ("ranks", [-1])],
)
def test_impossible_telemetry_header_is_reported(name: str, value: Any, run: RunDir, run_cli: RunCli) -> None:
    header = json.loads(header_path(run).read_text())
    header_path(run).write_text(json.dumps({**header, name: value}))
    output = check_commands(run_cli, run)
    assert "header.json is damaged" in " ".join(output.split())


@pytest.mark.parametrize(
    "misspelled", ["gpu0.utilizatioo", "gpu7.utilization", "hpu0.utilization", "host5.utilization"]
)
def test_unknown_telemetry_column_is_omitted(misspelled: str, run: RunDir, run_cli: RunCli) -> None:
    header_path(run).write_text(header_path(run).read_text().replace("gpu0.utilization", misspelled))
    output = " ".join(check_commands(run_cli, run).split())
    assert "unknown columns left out" in output and misspelled in output
    assert "61" in output  # the temperature is still shown


@pytest.mark.parametrize("d", [[4e18], [-5.0], [3.0, 1.0], []])
def test_samples_at_impossible_times_are_tolerated(d: list[float], run: RunDir, run_cli: RunCli) -> None:
    path = header_path(run).with_name(jsonl_blocks.NAME)
    lines = gzip.decompress(path.read_bytes()).splitlines()
    at = next(i for i, line in enumerate(lines) if b'"fast"' in line)
    lines[at] = json.dumps({**json.loads(lines[at]), "d": d}).encode()
    path.write_bytes(jsonl_blocks.compress_member(b"\n".join(lines)))
    path.with_name(totals.NAME).unlink()
    check_commands(run_cli, run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", []),
        ("last_sample_d", 4e18),
        ("bins", [10**30]),
        ("phases", [[10**9, 0, 1, 1.0]]),
        ("sizes", [-1]),
        ("samples", -5),
    ],
)
def test_impossible_totals_are_recomputed_from_the_samples(name: str, value: Any, run: RunDir, run_cli: RunCli) -> None:
    path = header_path(run).with_name(totals.NAME)
    document = json.loads(gzip.decompress(path.read_bytes()))
    expected = json.loads(run_cli("telemetry", run.id, "--json")[1])["gpus"]
    path.write_bytes(gzip.compress(json.dumps({**document, name: value}).encode()))
    check_commands(run_cli, run)
    assert json.loads(run_cli("telemetry", run.id, "--json")[1])["gpus"] == expected  # computed from the samples


@pytest.mark.parametrize("steps", [None, [], [1], 7, "x", {"0": 1}])
def test_profile_event_without_valid_steps_is_tolerated(steps: Any, run: RunDir, run_cli: RunCli) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("rank-0"))
    log.append({"t": time.time(), "event": "profiled", "path": "x", **({} if steps is None else {"steps": steps})})
    log.close()
    check_commands(run_cli, run)


@pytest.mark.parametrize("text", ['{"world_size": 4, "lay', "[]", '{"world_size": "x"}', "\0"])
def test_compare_tolerates_a_damaged_plan(text: str, run: RunDir, tmp_path: Path, run_cli: RunCli) -> None:
    other = new_run(tmp_path, time.time(), name="other-zzz222")
    begin(other, time.time() - 60, ["a"], steps=20)
    run.plan.write_text(text)
    code, out, err = run_cli("compare", run.id, other.id)
    assert (code, "Traceback" in err) == (0, False) and run.id in out


JOB_IDS = ("../../x", "--wrap=id", "local-1\nlocal-2", "local-../x", "1;id", "١٢", "local-" + "9" * 40)


@pytest.mark.parametrize("job_id", JOB_IDS)
def test_invalid_job_id_is_never_used(job_id: str, run: RunDir, run_cli: RunCli) -> None:
    for path in (run.events / "odd.jsonl", run.attempt(1).events_path("odd")):
        log = fsio.JsonlAppender(path)
        log.append(
            {"t": time.time(), "event": "continued", "job_id": job_id, "options": {"wrap": "id", "time": "1:00"}},
            {"t": time.time(), "event": "requeued", "method": "resubmit", "job_id": job_id, "options": {"wrap": "id"}},
        )
        log.close()
    fsio.write_json(run.attempt(1).record, {**json.loads(run.attempt(1).record.read_text()), "job_id": job_id})
    assert attempts.list_job_ids(run) == ["local-1"]
    assert attempts.load_submit_options(run) == {"time": "1:00"}
    code, out, _ = run_cli("status", run.id)
    assert code == 0 and "invalid fields: job_id" in " ".join(out.split())


@pytest.mark.parametrize("node", ["../../..", "a/b", "--x", "a\nb"])
def test_invalid_node_name_is_never_used_as_a_path(node: str, run: RunDir, run_cli: RunCli) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("odd"))
    log.append({"t": time.time(), "event": "agent_started", "node": node, "gpus": []})
    log.append({"t": time.time(), "event": "requeued", "method": "resubmit", "exclude": [node, "n1"]})
    log.close()
    document = json.loads(run_cli("telemetry", run.id, "--json")[1])
    assert node not in json.dumps(document, ensure_ascii=False)
    assert attempts.load_submit_options(run) == {"exclude": "n1"}
