"""Files of a run that are well formed and say what cannot be: the commands that read them leave that out and say so."""

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

Said = Callable[..., tuple[int, str, str]]
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
    made = new_run(tmp_path, now)
    begin(made, now - 60, ["a"], steps=20)
    record(made, "a", now - 60, gpus=1, seconds=20, end=True)
    return made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """``clustertrain WORDS``: its exit status and what it printed."""

    def said(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clustertrain", *words])
        code = main()
        return code, *capsys.readouterr()

    return said


def all_read(said: Said, run: RunDir) -> str:
    """What `telemetry` prints; the other readers go on as well."""
    for words in TELEMETRY:
        code, out, err = said(*(word.format(run.id) for word in words))
        assert code == 0 and "Traceback" not in err, (words, err)
        assert "nan" not in out.split() and "inf" not in out.split(), words
    return said("telemetry", run.id)[1]


def header_of(run: RunDir) -> Path:
    return run.attempt(1).telemetry / "a" / "0" / "header.json"


@pytest.mark.parametrize(
    ("name", "value"),
    [("interval_s", 0), ("interval_s", -1), ("slow_s", 0), ("t", 4e18), ("t", -1), ("mono", 1e300), ("ranks", [-1])],
)
def test_a_header_that_cannot_be(name: str, value: Any, run: RunDir, said: Said) -> None:
    header = json.loads(header_of(run).read_text())
    header_of(run).write_text(json.dumps({**header, name: value}))
    shown = all_read(said, run)
    assert "header.json is damaged" in " ".join(shown.split())


@pytest.mark.parametrize("flipped", ["gpu0.utilizatioo", "gpu7.utilization", "hpu0.utilization", "host5.utilization"])
def test_a_column_that_is_not_known_is_left_out(flipped: str, run: RunDir, said: Said) -> None:
    header_of(run).write_text(header_of(run).read_text().replace("gpu0.utilization", flipped))
    shown = " ".join(all_read(said, run).split())
    assert "unknown columns left out" in shown and flipped in shown
    assert "61" in shown  # the temperature is there


@pytest.mark.parametrize("d", [[4e18], [-5.0], [3.0, 1.0], []])
def test_samples_at_times_that_cannot_be(d: list[float], run: RunDir, said: Said) -> None:
    path = header_of(run).with_name(jsonl_blocks.NAME)
    lines = gzip.decompress(path.read_bytes()).splitlines()
    at = next(i for i, line in enumerate(lines) if b'"fast"' in line)
    lines[at] = json.dumps({**json.loads(lines[at]), "d": d}).encode()
    path.write_bytes(jsonl_blocks.compress_member(b"\n".join(lines)))
    path.with_name(totals.NAME).unlink()
    all_read(said, run)


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
def test_totals_that_cannot_be_are_not_taken(name: str, value: Any, run: RunDir, said: Said) -> None:
    path = header_of(run).with_name(totals.NAME)
    found = json.loads(gzip.decompress(path.read_bytes()))
    right = json.loads(said("telemetry", run.id, "--json")[1])["gpus"]
    path.write_bytes(gzip.compress(json.dumps({**found, name: value}).encode()))
    all_read(said, run)
    assert json.loads(said("telemetry", run.id, "--json")[1])["gpus"] == right  # from the samples


@pytest.mark.parametrize("steps", [None, [], [1], 7, "x", {"0": 1}])
def test_a_profile_of_no_steps(steps: Any, run: RunDir, said: Said) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("rank-0"))
    log.append({"t": time.time(), "event": "profiled", "path": "x", **({} if steps is None else {"steps": steps})})
    log.close()
    all_read(said, run)


@pytest.mark.parametrize("text", ['{"world_size": 4, "lay', "[]", '{"world_size": "x"}', "\0"])
def test_a_cut_plan_in_a_comparison(text: str, run: RunDir, tmp_path: Path, said: Said) -> None:
    other = new_run(tmp_path, time.time(), name="other-zzz222")
    begin(other, time.time() - 60, ["a"], steps=20)
    run.plan.write_text(text)
    code, out, err = said("compare", run.id, other.id)
    assert (code, "Traceback" in err) == (0, False) and run.id in out


JOB_IDS = ("../../x", "--wrap=id", "local-1\nlocal-2", "local-../x", "1;id", "١٢", "local-" + "9" * 40)


@pytest.mark.parametrize("job_id", JOB_IDS)
def test_a_job_id_that_is_none_is_used_nowhere(job_id: str, run: RunDir, said: Said) -> None:
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
    code, out, _ = said("status", run.id)
    assert code == 0 and "invalid fields: job_id" in " ".join(out.split())


@pytest.mark.parametrize("node", ["../../..", "a/b", "--x", "a\nb"])
def test_a_node_that_is_none_names_no_folder(node: str, run: RunDir, said: Said) -> None:
    log = fsio.JsonlAppender(run.attempt(1).events_path("odd"))
    log.append({"t": time.time(), "event": "agent_started", "node": node, "gpus": []})
    log.append({"t": time.time(), "event": "requeued", "method": "resubmit", "exclude": [node, "n1"]})
    log.close()
    found = json.loads(said("telemetry", run.id, "--json")[1])
    assert node not in json.dumps(found, ensure_ascii=False)
    assert attempts.load_submit_options(run) == {"exclude": "n1"}
