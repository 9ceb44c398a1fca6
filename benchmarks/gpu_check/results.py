"""``python -m benchmarks.gpu_check.results FOLDER``: verify evidence, bring its results into the planner and the docs.

The planner reads the rates and the calibration from a cluster profile, which is written as ``cluster detect`` does. The
docs get a row per GPU type in ``docs/reference/gpu-results.md``; the figures behind it stay in
``benchmarks/results/gpu_check/``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.gpu_check import evidence
from clustertrain import clock, fsio, settings
from clustertrain.cluster import profile_file
from clustertrain.cluster.slurm_site_profile import DetectedValue
from clustertrain.config import cluster
from clustertrain.config.cluster import MeasuredRates
from clustertrain.config.parsing.documents import build, read_text
from clustertrain.errors import ClusterTrainError, UsageError

PAGE = measure.ROOT / "docs" / "reference" / "gpu-results.md"
RESULTS = measure.RESULTS / "gpu_check"
BEGIN, END = "<!-- begin: written by python -m benchmarks.gpu_check.results -->", "<!-- end -->"
# Columns of the page: label, part, figure.
COLUMNS = (
    ("sampler, share of a core", "nvml", "sampler_share_of_a_core"),
    ("readings of 8 GPUs, share of a core", "nvml", "readings_share_of_a_core_8_gpus"),
    ("state staged, GiB", "staging", "state_gib"),
    ("stall of a save, s", "staging", "stall_s"),
    ("plain copy, s", "staging", "plain_copy_s"),
    ("stall of a save in a session, s", "staging", "session_stall_s"),
    ("of which the host waits, s", "staging", "session_host_wait_s"),
    ("step of that session, s", "staging", "session_step_s"),
    ("matmul, TFLOP/s", "planner", "matmul_tflops"),
    ("share of the data sheet", "planner", "matmul_share_of_data_sheet"),
    ("the planner's share", "planner", "planner_matmul_share_of_data_sheet"),
    ("all-reduce in a node, bus GB/s", "planner", "node_bus_gb_s"),
    ("tokens/s of the 1.1B recipe", "mfu", "tokens_per_s"),
    ("step time over bare torch", "mfu", "step_time_over_bare"),
    ("MFU", "mfu", "mfu"),
    ("step, measured over predicted", "planner", "calibration"),
    ("layouts trained over NCCL", "layouts", "layouts_trained"),
    ("layouts failed", "layouts", "layouts_failed"),
    ("tests passed", "tests", "passed"),
    ("tests failed", "tests", "failed"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.results")
    parser.add_argument("folder", type=Path, help="the evidence of a check")
    parser.add_argument("--profile", metavar="NAME", help="cluster profile to update; default: named after the GPU")
    options = parser.parse_args(argv)
    try:
        summary = evidence.load(options.folder)
        if summary["device"] != "cuda":
            raise UsageError(f"{options.folder} is a rehearsal on the CPU", fix="run the check on a machine with a GPU")
        return _bring_in(summary, evidence.digest(options.folder), options.profile)
    except ClusterTrainError as e:
        print(f"{e}", file=sys.stderr)
        return 1


def _bring_in(summary: Mapping[str, Any], digest: str, profile: str | None) -> int:
    gpu = summary["torch"]["gpus"][0]["name"]
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    for part in summary["parts"]:
        if part["status"] != "ok":
            print(f"{part['name']} is {part['status']}: {part['reason']}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    stored = RESULTS / f"{name}.json"
    fsio.write_text(stored, json.dumps({"evidence_sha256": digest, **summary}, indent=1) + "\n", mode=0o644)
    write_page()
    print(f"docs: {PAGE.name}, from {stored.relative_to(measure.RESULTS.parent)}")
    rates = next((part["details"] for part in summary["parts"] if part["name"] == "planner"), None)
    if not rates:
        print("planner: nothing to bring in, as its part has no result")
        return 1
    path, written = update_profile(profile or name, summary, rates["measured"])
    print(f"planner: {', '.join(written) or 'nothing new'} in {path}; use it with --cluster {path.stem}")
    return 0


def update_profile(name: str, summary: Mapping[str, Any], rates: Mapping[str, Any]) -> tuple[Path, tuple[str, ...]]:
    """Write rates and calibration into the cluster profile ``name``; return its path and the keys that changed."""
    figures = _figures(summary)
    measured = build(rates, MeasuredRates, "the evidence")
    path = cluster.list_profiles(os.environ).get(name) or settings.profile_folders(os.environ)[-1] / f"{name}.toml"
    text = read_text(path) if path.exists() else None
    source = f"gpu-check of {summary['machine']['time']}"
    keys = {"device": DetectedValue("cuda", source), "gpus_per_node": DetectedValue(measured.ranks, source)}
    if gpu_type := figures.get("planner.gpu_type"):
        keys["gpu_type"] = DetectedValue(gpu_type, source)
    header = profile_file.format_header([source], clock.now())
    merged = profile_file.merge(text, keys, {"measured": measured}, header=header)
    written = merged.written
    if calibration := figures.get("planner.calibration"):
        calibrated = profile_file.merge(
            merged.text, {"calibration": DetectedValue(calibration, source)}, {}, force=True
        )
        merged, written = calibrated, written + calibrated.written
    profile_file.parse_profile(merged.text, str(path))
    profile_file.write(path, merged.text)
    return path, written


def write_page() -> None:
    """Write the page's table again from all stored results."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    stored = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    fsio.write_text(PAGE, head + "\n".join([BEGIN, "", *_table(stored), "", END]) + tail, mode=0o644)


def _table(stored: list[dict[str, Any]]) -> Iterator[str]:
    if not stored:
        yield "No result yet: nobody has run the check on a GPU."
        return
    yield "| | " + " | ".join(evidence.describe_gpus(summary) for summary in stored) + " |"
    yield "|---|" + "---|" * len(stored)
    for label, value in _about():
        yield f"| {label} | " + " | ".join(value(summary) for summary in stored) + " |"
    for label, part, figure in COLUMNS:
        yield f"| {label} | " + " | ".join(_cell(_figures(s).get(f"{part}.{figure}")) for s in stored) + " |"
    yield "| parts not ok | " + " | ".join(_not_ok(summary) for summary in stored) + " |"


def _about() -> Iterator[tuple[str, Any]]:
    yield "date", lambda s: s["machine"]["time"][:10]
    yield (
        "driver, CUDA, torch, NCCL",
        lambda s: ", ".join(str(v) for v in (s["driver"], *(s["torch"].get(k) for k in ("cuda", "torch", "nccl")))),
    )
    yield "power limit, W", lambda s: _cell(_watts(s["gpus"][0].get("power_limit_mw")))
    yield "evidence", lambda s: f"`{s['evidence_sha256'][:12]}`"


def _watts(milliwatts: Any) -> float | None:
    return milliwatts / 1000 if isinstance(milliwatts, int) else None


def _not_ok(summary: Mapping[str, Any]) -> str:
    return ", ".join(f"{p['name']} ({p['status']})" for p in summary["parts"] if p["status"] != "ok") or "none"


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return all figures as ``part.figure``."""
    return {f"{part['name']}.{key}": value for part in summary["parts"] for key, value in part["figures"].items()}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
