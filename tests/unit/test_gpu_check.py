"""``benchmarks.gpu_check``: its orchestration with small programs as parts, its evidence, and the use of results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu_check import evidence, machine, part_nccl, part_tests, results
from benchmarks.gpu_check.parts import RESERVE_S, TOTAL_S, list_parts, run_main
from clustertrain import clock
from clustertrain.cluster.profile_file import parse_profile
from clustertrain.errors import UsageError
from tests.fakes.nvml import recording
from tests.fakes.nvml.build import Stub
from tests.paths import ROOT

RESULT = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "result.json").write_text(json.dumps({"figures": {"seen": os.environ["CUDA_VISIBLE_DEVICES"]}}))
"""
# Ignores the interrupt, and leaves a process in a session of its own, as a local run's supervisor is.
HANGING = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1], "left").write_text(str(left.pid))
time.sleep(600)
"""
# Reports what it has when it is interrupted, as pytest does.
INTERRUPTED = f"""
import time
try:
    time.sleep(600)
except KeyboardInterrupt:
    {RESULT.strip().replace(chr(10), chr(10) + "    ")}
    print("1 passed, interrupted")
    sys.exit(2)
"""
PROGRAMS = {
    "good": (RESULT, 30.0),
    "broken": ("raise ValueError('the planted fault')", 30.0),
    "killed": ("import os; os.kill(os.getpid(), 9)", 30.0),
    "silent": ("print('no result is written')", 30.0),
    "unfit": ("print('cannot run: needs two GPUs'); raise SystemExit(3)", 30.0),
    "hanging": (HANGING, 1.5),
    "waiting": (HANGING, 60.0),
    "interrupted": (INTERRUPTED, 1.5),
    "last": (RESULT, 30.0),
}


def start_child(folder: Path, env: dict[str, str], names: list[str], total_s: float = 60.0) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    parts = [(name, [sys.executable, "-c", PROGRAMS[name][0], "{out}"], PROGRAMS[name][1]) for name in names]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # As a shell starts what runs in the background.
    argv = ["env", "--ignore-signal=INT", sys.executable, "-m", "tests.unit.gpu_check_child"]
    child = subprocess.Popen(argv, env=env, cwd=ROOT, text=True, **pipes)
    assert child.stdin is not None
    child.stdin.write(json.dumps({"folder": str(folder), "parts": parts, "total_s": total_s}))
    child.stdin.close()
    child.stdin = None
    return child


def wait_for(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the results by part."""
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    return {part["name"]: part for part in json.loads(output)}


def run_child(folder: Path, env: dict[str, str], names: list[str], total_s: float = 60.0) -> dict[str, Any]:
    return wait_for(start_child(folder, env, names, total_s))


def assert_ended(pid: int) -> None:
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_failing_and_hanging_parts_do_not_stop_the_others(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive("device 0 uuid GPU-a\ndevice 0 power 400000\n")
    parts = run_child(tmp_path / "evidence", nvml_stub.environ(), [name for name in PROGRAMS if name != "waiting"])
    assert {name: part["status"] for name, part in parts.items()} == {
        "good": "ok",
        "broken": "failed",
        "killed": "failed",
        "silent": "failed",
        "unfit": "cannot run",
        "hanging": "over time",
        "interrupted": "over time",
        "last": "ok",
    }
    reasons = {name: part["reason"] for name, part in parts.items()}
    assert reasons["broken"].endswith("ValueError: the planted fault")
    assert reasons["killed"].startswith("signal SIGKILL")
    assert reasons["silent"] == "it left no readable result.json"
    assert reasons["unfit"] == "needs two GPUs"
    assert reasons["hanging"].startswith("ended after its limit of 2 s")
    assert "1 passed, interrupted" in reasons["interrupted"]
    assert parts["last"]["figures"] == parts["interrupted"]["figures"] == {"seen": "GPU-first"}
    assert_ended(int((tmp_path / "evidence/hanging/left").read_text()))
    rows = [json.loads(line) for line in (tmp_path / "evidence/clocks.jsonl").read_text().splitlines()]
    assert {(row["uuid"], row["power_w"]) for row in rows} == {("GPU-a", 400)}
    assert {"good", "hanging", "interrupted"} <= {row["part"] for row in rows}


@pytest.mark.long
def test_time_of_the_whole_check_is_bounded(tmp_path: Path) -> None:
    parts = run_child(tmp_path / "evidence", dict(os.environ), ["hanging", "good", "last"], total_s=1.5)
    assert [part["status"] for part in parts.values()] == ["over time", "not run", "not run"]
    assert "the parts before it took" in parts["last"]["reason"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_check_keeps_what_it_has(tmp_path: Path, number: int) -> None:
    child = start_child(tmp_path / "evidence", dict(os.environ), ["good", "waiting", "last"])
    left = tmp_path / "evidence/waiting/left"
    assert clock.wait_until(lambda: left.exists() and bool(left.read_text()), 60, 0.05)
    child.send_signal(number)
    parts = wait_for(child)
    assert [part["status"] for part in parts.values()] == ["ok", "failed", "not run"]
    assert parts["last"]["reason"] == "the check was interrupted during waiting"
    assert_ended(int(left.read_text()))


def test_longest_tests_run_last() -> None:
    assert (ROOT / part_tests.LONGEST).is_file()


def test_limits_leave_time_for_the_tests() -> None:
    """With one GPU, no layout trains, and the tests have more time."""
    *measurements, tests = list_parts("cuda")
    limits = {part.name: part.limit_s for part in measurements}
    assert sum(limits.values()) <= TOTAL_S - RESERVE_S - 50
    assert sum(limits.values()) - limits["layouts"] <= TOTAL_S - RESERVE_S - 150
    assert (tests.name, tests.limit_s) == ("tests", TOTAL_S)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_each_part_is_a_module(device: str) -> None:
    for part in list_parts(device):
        module = part.argv[2].replace(".", "/")
        assert (ROOT / f"{module}.py").is_file(), module


def test_without_a_gpu_it_says_so_at_once(nvml_stub: Stub, tmp_path: Path) -> None:
    nvml_stub.drive("fail * nvmlInitWithFlags 9\n")
    argv = [sys.executable, "-X", "importtime", "-m", "benchmarks.gpu_check", "--out", str(tmp_path / "evidence")]
    result = subprocess.run(argv, env=nvml_stub.environ(), cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert (result.returncode, result.stdout) == (3, "")
    assert lines == ["no GPU to check: DRIVER_NOT_LOADED: the NVIDIA driver is not loaded"]
    assert "| torch" not in result.stderr
    assert not (tmp_path / "evidence").exists()


def test_description_of_the_gpus(nvml_stub: Stub) -> None:
    """VBIOS, limits and clocks as nvidia-smi prints them for the recorded GPU; a missing one is named, not left out."""
    nvml_stub.drive(recording.load("gb200").text + "fail 0 nvmlDeviceGetPersistenceMode 4\n")
    program = "import json; from benchmarks.gpu_check import machine; print(json.dumps(machine.read_gpus()))"
    argv = [sys.executable, "-c", program]
    result = subprocess.run(argv, env=nvml_stub.environ(), cwd=ROOT, capture_output=True, text=True, check=True)
    driver, (gpu,) = json.loads(result.stdout)
    assert (driver, gpu["name"], gpu["vbios"]) == ("580.173.02", "NVIDIA GB200", "97.00.B9.00.69")
    assert (gpu["power_limit_mw"], gpu["max_sm_clock_mhz"], gpu["sm_clock_mhz"]) == (1_200_000, 2062, 120)
    assert gpu["persistence_mode"] == "NO_PERMISSION"
    assert not [name for name, value in gpu.items() if value in ("FUNCTION_NOT_FOUND", "NOT_SUPPORTED")]


GPUS = [
    {"uuid": "GPU-0", "name": "NVIDIA H100 80GB HBM3", "mig_slice_of": None, "unreadable": None,
     "power_limit_mw": 700_000},
    {"uuid": "GPU-1", "name": "NVIDIA H100 80GB HBM3", "mig_slice_of": None, "unreadable": None,
     "power_limit_mw": 700_000},
]  # fmt: skip
SLICES = [{"uuid": f"MIG-{i}", "name": "1g.10gb", "mig_slice_of": "GPU-0", "unreadable": None} for i in range(3)]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (GPUS[:1], {"one rank": ["GPU-0"], "two ranks on one GPU": ["GPU-0", "GPU-0"]}),
        (
            GPUS,
            {
                "one rank": ["GPU-0"],
                "two ranks on one GPU": ["GPU-0", "GPU-0"],
                "a rank per GPU, 2 GPUs": ["GPU-0", "GPU-1"],
            },
        ),
        (SLICES, {"one rank": ["MIG-0"], "a rank per MIG slice": ["MIG-0", "MIG-1", "MIG-2"]}),
        ([], {}),
    ],
    ids=["one", "two", "mig", "none"],
)
def test_collectives_that_the_machine_allows(
    monkeypatch: pytest.MonkeyPatch, listed: list[dict[str, Any]], expected: dict[str, list[str]]
) -> None:
    monkeypatch.setattr(machine, "read_gpus", lambda: ("580", listed))
    assert {case.name: list(case.devices) for case in part_nccl.list_cases("cuda")} == expected


def test_refusal_of_nccl_is_quoted() -> None:
    log = "\n".join(
        ("init", "host:1:2 [0] misc/x.cc:9 NCCL WARN Duplicate GPU detected : rank 0 and rank 1", "RuntimeError: NCCL")
    )
    assert part_nccl._cause(log).endswith("NCCL WARN Duplicate GPU detected : rank 0 and rank 1")
    assert part_nccl._cause("a\nlast\n") == "last"
    assert part_nccl._cause("") == "no output"


def test_failed_collective_keeps_what_others_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"one rank": {"bus_gb_s": 12.5}, "two ranks": {"error": "hung for 45 s"}}
    cases = [part_nccl.Case(name, ("0",)) for name in outcomes]
    monkeypatch.setattr(part_nccl, "list_cases", lambda device: cases)
    monkeypatch.setattr(part_nccl, "_run_case", lambda case, *_: outcomes[case.name])
    monkeypatch.setattr(sys, "argv", ["part", "--device", "cuda", "--out", str(tmp_path)])
    assert run_main(part_nccl.measure_cases) == 1
    figures = json.loads((tmp_path / "result.json").read_text())["figures"]
    assert figures["one rank: all-reduce bus GB/s"] == 12.5 and figures["two ranks"] == "failed: hung for 45 s"


MEASURED = {"gemm_tflops": 700.0, "gemm_dtype": "bf16", "device": "NVIDIA H100 80GB HBM3", "ranks": 2, "nodes": 1}


def make_evidence(folder: Path, device: str = "cuda") -> Path:
    folder.mkdir()
    figures = {"gpu_type": "h100", "matmul_tflops": 700.0, "calibration": 1.25}
    part = {"title": "t", "limit_s": 9.0, "seconds": 3.0}
    ok, failed = {"status": "ok", "reason": ""}, {"status": "failed", "reason": "out | of memory"}
    evidence.write_summaries(
        folder,
        {
            "device": device,
            "seconds": 30.0,
            "machine": {"time": "2026-11-27T12:00:00Z", "commit": "abc"},
            "driver": "580.105.08",
            "gpus": GPUS,
            "clocks": [],
            "torch": {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.9", "gpus": [{"name": GPUS[0]["name"]}]},
            "parts": [
                {**part, **ok, "name": "planner", "figures": figures, "details": {"measured": MEASURED}},
                {**part, **failed, "name": "mfu", "figures": {}, "details": None},
            ],
        },
    )
    (folder / "planner").mkdir()
    (folder / "planner/log.txt").write_text("a log\n")
    evidence.seal(folder)
    return folder


def test_evidence_tells_what_was_changed(tmp_path: Path) -> None:
    folder = make_evidence(tmp_path / "e")
    assert evidence.verify(folder) == []
    check = subprocess.run(["sha256sum", "--check", "--quiet", evidence.SUMS], cwd=folder, check=False)
    assert check.returncode == 0
    text = (folder / evidence.SUMMARY).read_text()
    (folder / evidence.SUMMARY).write_text(text.replace("1.25", "1.05"))
    (folder / "planner/log.txt").unlink()
    (folder / "extra").write_text("x")
    assert sorted(evidence.verify(folder)) == ["extra: added", "planner/log.txt: missing", "summary.json: changed"]
    with pytest.raises(UsageError, match=r"summary\.json: changed"):
        evidence.load(folder)


def test_report_for_people_names_what_failed(tmp_path: Path) -> None:
    report = (make_evidence(tmp_path / "e") / evidence.REPORT).read_text()
    assert report.startswith("# Check of 2 x NVIDIA H100 80GB HBM3\n")
    assert "| mfu: t | **failed** | 3 | out \\| of memory |" in report
    assert "| calibration | 1.25 |" in report
    assert "driver 580.105.08, torch 2.13.0, cuda 13.0, nccl 2.28.9." in report


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of cluster profiles; page and results are in the test's folder too."""
    page = tmp_path / "gpu-results.md"
    page.write_text(results.PAGE.read_text())
    monkeypatch.setattr(results, "PAGE", page)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results" / "gpu_check")
    monkeypatch.setattr(results.measure, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CLUSTERTRAIN_CLUSTER_PATH", raising=False)
    return tmp_path / "config/clustertrain/clusters"


def test_results_enter_profile_and_page(places: Path, tmp_path: Path) -> None:
    folder = make_evidence(tmp_path / "e")
    assert results.main([str(folder)]) == 0
    path = places / "nvidia-h100-80gb-hbm3.toml"
    profile = parse_profile(path.read_text(), str(path))
    assert (profile.device, profile.gpu_type, profile.gpus_per_node, profile.calibration) == ("cuda", "h100", 2, 1.25)
    assert profile.measured is not None and profile.measured.gemm_tflops == 700
    page = results.PAGE.read_text()
    assert "No result yet" not in page
    assert "| step, measured over predicted | 1.25 |" in page
    assert "| power limit, W | 700 |" in page
    assert f"| evidence | `{evidence.digest(folder)[:12]}` |" in page
    assert "| parts not ok | mfu (failed) |" in page
    # A second time changes nothing, and a user's own keys stay.
    path.write_text(path.read_text().replace('gpu_type = "h100"', 'gpu_type = "mine"'))
    assert results.main([str(folder)]) == 0
    assert parse_profile(path.read_text(), str(path)).gpu_type == "mine"
    assert results.PAGE.read_text() == page


PLANNER = f"""
import json, os, pathlib, sys
figures = {{"gpu_type": "h100", "calibration": 1.5, "seen": os.environ["CUDA_VISIBLE_DEVICES"]}}
result = {{"figures": figures, "details": {{"measured": {MEASURED!r}}}}}
pathlib.Path(sys.argv[1], "result.json").write_text(json.dumps(result))
"""


@pytest.mark.long
def test_whole_check_on_a_recorded_gpu(nvml_stub: Stub, places: Path, tmp_path: Path) -> None:
    """From NVML's devices to the profile; a part that fails makes the exit status 1 and keeps the rest."""
    nvml_stub.drive(recording.load("h100").text)
    folder = tmp_path / "evidence"
    facts = {"torch": "2.13.0", "cuda": "13.0", "cuda_available": True, "nccl": "2.28.9"}
    torch = {**facts, "gpus": [{"name": GPUS[0]["name"], "uuid": "00000000-0000-0000-0000-000000000000"}]}
    programs = {"planner": PLANNER, "tests": PROGRAMS["broken"][0]}
    parts = [(name, [sys.executable, "-c", code, "{out}"], 30.0) for name, code in programs.items()]
    request = json.dumps({"folder": str(folder), "parts": parts, "total_s": 120.0, "torch": torch})
    argv = [sys.executable, "-m", "tests.unit.gpu_check_child"]
    result = subprocess.run(
        argv, input=request, env=nvml_stub.environ(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 1, result.stderr
    summary = evidence.load(folder)
    assert (summary["driver"], summary["gpus"][0]["vbios"]) == ("580.105.08", "96.00.99.00.01")
    assert "msgspec==" in (folder / "packages.txt").read_text()
    planner, tests = summary["parts"]
    assert (planner["status"], tests["status"]) == ("ok", "failed")
    assert planner["figures"]["seen"] == summary["gpus"][0]["uuid"]
    clocks = summary["clocks"][0]
    assert (clocks["part"], clocks["power_w"], clocks["sm_clock_mhz"]) == ("planner", 68.6, 345)
    assert "| planner, GPU-00000000-0000-0000-0000-000000000000 | 68.6 | 345 | 29 | 0% |" in result_text(folder)
    assert results.main([str(folder)]) == 0
    path = places / "nvidia-h100-80gb-hbm3.toml"
    assert parse_profile(path.read_text(), str(path)).calibration == 1.5
    assert "| parts not ok | tests (failed) |" in results.PAGE.read_text()


def result_text(folder: Path) -> str:
    return (folder / evidence.REPORT).read_text()


@pytest.mark.parametrize("fault", ["tampered", "rehearsal", "absent"])
def test_bad_evidence_enters_nothing(
    places: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    folder = make_evidence(tmp_path / "e", "cpu" if fault == "rehearsal" else "cuda")
    if fault == "tampered":
        (folder / "planner/log.txt").write_text("another log\n")
    before = results.PAGE.read_text()
    assert results.main([str(tmp_path / "other" if fault == "absent" else folder)]) == 1
    message = {"tampered": "planner/log.txt: changed", "rehearsal": "a rehearsal on the CPU", "absent": "SHA256SUMS"}
    assert message[fault] in capsys.readouterr().err
    assert results.PAGE.read_text() == before
    assert not places.exists()


def test_page_in_the_docs_is_what_the_stored_results_give(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = results.PAGE.read_text()
    monkeypatch.setattr(results, "RESULTS", ROOT / "benchmarks/results/gpu_check")
    results.write_page()
    assert results.PAGE.read_text() == page
