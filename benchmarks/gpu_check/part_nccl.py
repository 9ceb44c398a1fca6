"""Collectives: one rank, two ranks on one GPU, a rank per MIG slice and a rank per GPU, as the machine has them.

NCCL refuses two ranks on one GPU; what it says is recorded, and is no failure. The rehearsal uses gloo. Each case runs
in processes of its own for a bounded time: NCCL may hang where it does not refuse.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.gpu_check.parts import Figures, PartFailed, run_main
from benchmarks.measure import CannotRun
from clustertrain.scheduler.sockets import find_free_port

RESULT = "result: "  # begins the line of rank 0's log with its result
CASE_S = 45.0
MAX_RANKS = 8
BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
ITERATIONS = 10


@dataclass(frozen=True)
class Case:
    """Ranks that form a group; each sees only its device."""

    name: str
    devices: Sequence[str]
    """CUDA_VISIBLE_DEVICES of each rank."""
    may_be_refused: bool = False


def list_cases(device: str) -> list[Case]:
    """Return the cases that this machine has the devices for."""
    if device == "cpu":
        return [Case("one rank", [""]), Case("two ranks", ["", ""])]
    from benchmarks.gpu_check.machine import read_gpus

    listed = [gpu for gpu in read_gpus()[1] if not gpu["unreadable"]]
    slices = [gpu["uuid"] for gpu in listed if gpu["mig_slice_of"]]
    gpus = [gpu["uuid"] for gpu in listed if not gpu["mig_slice_of"]]
    devices = gpus or slices
    cases = [Case("one rank", devices[:1])] if devices else []
    cases += [Case("two ranks on one GPU", gpus[:1] * 2, may_be_refused=True)] if gpus else []
    cases += [Case("a rank per MIG slice", slices[:MAX_RANKS], may_be_refused=True)] if len(slices) > 1 else []
    cases += [Case(f"a rank per GPU, {min(len(gpus), MAX_RANKS)} GPUs", gpus[:MAX_RANKS])] if len(gpus) > 1 else []
    return cases


def measure_cases(options: argparse.Namespace) -> tuple[Figures, Any]:
    """Run all cases; fail if one that must work does not."""
    cases = list_cases(options.device)
    if not cases:
        raise CannotRun("NVML lists no GPU that can be used")
    figures: dict[str, float | str | None] = {}
    details, failed = {}, []
    for case in cases:
        outcome = _run_case(case, options.device, options.out)
        details[case.name] = outcome
        print(f"{case.name}: {outcome}", flush=True)
        if "error" not in outcome:
            figures[case.name] = "works"
            if outcome["bus_gb_s"]:
                figures[f"{case.name}: all-reduce bus GB/s"] = outcome["bus_gb_s"]
        else:
            figures[case.name] = ("refused: " if case.may_be_refused else "failed: ") + outcome["error"]
            failed += [] if case.may_be_refused else [case.name]
    if failed:
        raise PartFailed(f"{', '.join(failed)}: {details[failed[0]]['error']}", figures, details)
    return figures, details


def _run_case(case: Case, device: str, folder: Path) -> dict[str, Any]:
    """Return what rank 0 measured, or the ``error`` of the rank that failed first."""
    port, ranks = find_free_port(), []
    prefix = folder / case.name.replace(" ", "-").replace(",", "")
    logs = [Path(f"{prefix}-{rank}.log") for rank in range(len(case.devices))]
    for rank, visible in enumerate(case.devices):
        env = {
            **os.environ, "CUDA_VISIBLE_DEVICES": visible, "RANK": str(rank), "WORLD_SIZE": str(len(case.devices)),
            "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "NCCL_DEBUG": "WARN",
        }  # fmt: skip
        argv = [sys.executable, "-m", "benchmarks.gpu_check.part_nccl", "--rank", device]
        with logs[rank].open("wb") as log:
            ranks.append(subprocess.Popen(argv, env=env, cwd=measure.ROOT, stdout=log, stderr=subprocess.STDOUT))
    try:
        failed = _first_failure(ranks)
    except TimeoutError:
        return {"error": f"hung for {CASE_S:g} s"}
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if failed is not None:
        return {"error": _cause(logs[failed].read_text(errors="replace"))}
    # torch and NCCL write warnings into the same log, also after the result.
    (line,) = [line for line in logs[0].read_text(errors="replace").splitlines() if line.startswith(RESULT)]
    outcome: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    return outcome


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the rank that failed first, without waiting for the others; None once all have succeeded.

    Raises:
        TimeoutError: they take too long.
    """
    deadline = time.monotonic() + CASE_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return failed[0]
        if None not in codes:
            return None
        time.sleep(0.1)
    raise TimeoutError


def _cause(log: str) -> str:
    """Return NCCL's own line if there is one, otherwise the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines if "NCCL WARN" in line or "Duplicate GPU" in line]
    return (told or lines or ["no output"])[-1][-300:]


def run_rank(device_type: str) -> None:
    """Check each collective's values on this rank and print the all-reduce's bus bandwidth."""
    import torch
    import torch.distributed as dist

    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    backend = "nccl" if device_type == "cuda" else "gloo"
    options = {"device_id": device} if device_type == "cuda" else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=CASE_S / 2), **options)
    rank, size = dist.get_rank(), dist.get_world_size()
    ones = torch.ones(size, device=device)

    def expect(name: str, actual: torch.Tensor, expected: list[float]) -> None:
        if actual.tolist() != expected:
            raise RuntimeError(f"{name}: {actual.tolist()}, expected {expected}")

    total = ones * (rank + 1)
    dist.all_reduce(total)
    expect("all_reduce", total, [size * (size + 1) / 2.0] * size)
    gathered = torch.empty(size, device=device)
    dist.all_gather_into_tensor(gathered, ones[:1] * rank)
    expect("all_gather", gathered, [float(r) for r in range(size)])
    scattered = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(scattered, ones * (rank + 1))
    expect("reduce_scatter", scattered, [size * (size + 1) / 2.0])
    sent = ones[:1] * 7 * (rank == 0)
    dist.broadcast(sent, 0)
    expect("broadcast", sent, [7.0])
    exchanged = torch.empty(size, device=device)
    dist.all_to_all_single(exchanged, ones * rank)
    expect("all_to_all", exchanged, [float(r) for r in range(size)])
    print(RESULT + json.dumps({"ranks": size, "backend": backend, "bus_gb_s": _bus_gb_s(device, size)}), flush=True)
    dist.destroy_process_group()


def _bus_gb_s(device: Any, size: int) -> float | None:
    """Return the bus bandwidth as nccl-tests define it; None for one rank, which has no bus."""
    import torch
    import torch.distributed as dist

    buffer = torch.zeros(BYTES[device.type] // 4, device=device)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for timed in (False, True):  # the first round opens the connections
        dist.barrier()
        synchronize()
        started = time.perf_counter()
        for _ in range(ITERATIONS):
            dist.all_reduce(buffer)
        synchronize()
        seconds = (time.perf_counter() - started) / ITERATIONS
        if timed and size > 1:
            return round(BYTES[device.type] / seconds * 2 * (size - 1) / size / 1e9, 2)
    return None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(sys.argv[2])
    else:
        sys.exit(run_main(measure_cases))
