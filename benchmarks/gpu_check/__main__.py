"""``python -m benchmarks.gpu_check``: do all that waits for a GPU, in at most 15 minutes; leave a folder of evidence.

Exit status: 0 all parts are ok, 1 a part is not, 3 there is no GPU. ``--device cpu`` rehearses: the same parts, tiny,
on the CPU with gloo and a stub of NVML; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import evidence, machine
from benchmarks.gpu_check.clocks import ClockLog
from benchmarks.gpu_check.parts import CANNOT_RUN, RESERVE_S, TOTAL_S, Part, list_parts
from benchmarks.gpu_check.runner import PartResult, run_parts
from clustertrain import clock
from clustertrain.telemetry.readers.nvml import NvmlError

# Of an enclosing job or run; each part sets its own.
_FOREIGN = ("SLURM_", "CLUSTERTRAIN_", "NVML_STUB_")
_FOREIGN_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("--out", type=Path, help="folder of the evidence; default: gpu-check/<time>")
    parser.add_argument("--limit", type=float, default=TOTAL_S, metavar="S", help=f"default: {TOTAL_S:g}")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these; default: all")
    options = parser.parse_args(argv)
    parts = list_parts(options.device)
    unknown = set(options.parts or ()) - {part.name for part in parts}
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(part.name for part in parts)}")
    if options.out is not None and options.out.exists():
        parser.error(f"{options.out} exists; evidence needs a new folder")
    chosen = [part for part in parts if options.parts is None or part.name in options.parts]
    return check(chosen, options.device, options.out or _default_folder(), options.limit)


def check(parts: list[Part], device: str, folder: Path, total_s: float) -> int:
    """Run ``parts`` and seal the evidence in ``folder``; return the exit status."""
    started = clock.monotonic()
    driver, gpus = None, []
    if device == "cuda":
        try:
            driver, gpus = machine.read_gpus()
        except NvmlError as e:
            return _refuse(e.reason)
        if not gpus:
            return _refuse("NVML lists no GPU")
    torch = machine.read_torch()
    if device == "cuda" and not torch["cuda_available"]:
        return _refuse(torch["unavailable"])
    folder.mkdir(parents=True)
    print(f"{len(gpus)} GPUs and MIG slices; evidence in {folder}", flush=True)
    description = machine.describe()
    machine.save_packages(folder / "packages.txt")
    machine.save_nvidia_smi(folder / "nvidia-smi-before.txt")
    clocks = ClockLog(folder / "clocks.jsonl")
    remaining_s = total_s - RESERVE_S - (clock.monotonic() - started)
    try:
        results = run_parts(
            parts, folder, remaining_s, _environment(), _first_gpu(torch, gpus), clocks.record, _announce
        )
    finally:
        clocks.close()
    machine.save_nvidia_smi(folder / "nvidia-smi-after.txt")
    summary = {
        "device": device,
        "seconds": round(clock.monotonic() - started, 1),
        "limit_s": total_s,
        "machine": description,
        "driver": driver,
        "gpus": gpus,
        "torch": torch,
        "clocks": clocks.summarize(),
        "parts": [result._asdict() for result in results],
    }
    evidence.write_summaries(folder, summary)
    digest = evidence.seal(folder)
    _print(results)
    print(f"{folder / evidence.REPORT}; SHA-256 of {evidence.SUMS}: {digest}")
    return 0 if all(result.status == "ok" for result in results) else 1


def _first_gpu(torch: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> str:
    """Return NVML's name of torch's first device, a GPU or a MIG slice; empty if NVML does not list it."""
    number = torch["gpus"][0]["uuid"] if torch.get("gpus") else "none"
    return next((gpu["uuid"] for gpu in gpus if number in gpu["uuid"]), "")


def _refuse(reason: str) -> int:
    print(f"no GPU to check: {reason}", file=sys.stderr)
    return CANNOT_RUN


def _default_folder() -> Path:
    return Path("gpu-check", time.strftime("%Y%m%d-%H%M%S", time.gmtime(clock.now())))


def _environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN) and k not in _FOREIGN_RANK}
    return {**env, "PYTHONUNBUFFERED": "1"}


def _announce(part: Part, limit_s: float) -> None:
    print(f"{part.name}: {part.title}, at most {limit_s:.0f} s", flush=True)


def _print(results: list[PartResult]) -> None:
    for result in results:
        print(f"{result.name:8} {result.status:10} {result.seconds:6.1f} s  {result.reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
