"""Cost of each NVML call on this machine's first GPU, idle: wall time, and processor time of the caller.

A call that waits for the GPU costs wall time; one that takes the driver's lock delays other processes. The total of the
sampler's calls, per second and per ten seconds, is also given as a share of one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import measure
from benchmarks.measure import CannotRun
from clustertrain.telemetry import fields
from clustertrain.telemetry.readers.gpu_reader import GpuReader
from clustertrain.telemetry.readers.nvml import Nvml, NvmlError
from clustertrain.telemetry.readers.nvml_events import GpuEvents
from clustertrain.telemetry.readers.nvml_gpm import MIN_INTERVAL_S
from clustertrain.telemetry.readers.nvml_queries import GpuQueries

ROUNDS = 300
PAIR_ROUNDS = 30  # each waits for the minimum interval between two samples
GPUS = 8
TICK_S, SLOW_S = 1.0, 10.0


def main() -> int:
    """Measure and write ``benchmarks/results/nvml_calls.json``.

    Raises:
        CannotRun: no driver, or no GPU.
    """
    result = measure_first_gpu()
    _print(result["result"])
    path = measure.write("nvml_calls", result)
    print(f"written to {path.relative_to(measure.ROOT)}")
    return 0


def measure_first_gpu(rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the costs on the first GPU that can be read, each call measured ``rounds`` times.

    Raises:
        CannotRun: no driver, or no GPU.
    """
    nvml = Nvml()
    try:
        driver = nvml.open()
        devices = [d for d in nvml.devices() if d.reason is None]
    except NvmlError as e:
        raise CannotRun(f"no NVML: {e.reason}") from e
    try:
        if not devices:
            raise CannotRun("NVML lists no GPU that can be read")
        result = measure.context(("clustertrain", "nvidia-ml-py"))
        result["machine"] |= {"gpu": devices[0].name, "gpus": len(devices), "driver": driver}
        result["result"] = _measure(nvml, devices[0], rounds)
    finally:
        nvml.close()
    return result


def _measure(nvml: Nvml, device: Any, rounds: int) -> dict[str, Any]:
    calls = GpuQueries(nvml, device)
    pair_rounds = max(3, rounds * PAIR_ROUNDS // ROUNDS)
    costs = {}
    for pace, queries in calls.queries.items():
        for call in queries:
            pairs = "sm_activity" in call.fields
            cost = _cost(lambda c=call: c.read(calls.handle(), c.fields), pair_rounds if pairs else rounds, pairs=pairs)
            costs[", ".join(call.fields)] = {"pace": pace, **cost}
    events = GpuEvents(nvml, [device])
    events.open()
    costs["poll of events"] = {"pace": fields.FAST, **_cost(events.poll, rounds)}
    # The readers of a node, after a pause as between two samples: only the first one finds cold caches.
    readers = [GpuReader(nvml, device) for _ in range(GPUS)]
    whole = {
        pace: _cost(lambda p=pace: [r.read(p) for r in readers], pair_rounds, pairs=True) for pace in calls.queries
    }
    busy_us = whole[fields.FAST]["cpu_us"]["median"] / TICK_S + whole[fields.SLOW]["cpu_us"]["median"] / SLOW_S
    return {
        "calls": costs,
        f"readers_of_{GPUS}_gpus": whole,
        f"share_of_a_core_for_{GPUS}_gpus": round(busy_us / 1e6, 6),
        "without_a_value": dict(readers[0].reasons),
        "events_not_told": events.reasons,
    }


def _cost(call: Callable[[], Any], rounds: int, *, pairs: bool = False) -> dict[str, Any]:
    """Return the cost of a call in µs; ``refused`` is the reason if it returns no value."""
    wall, cpu, refused = [], [], None
    for _ in range(rounds):
        if pairs:
            time.sleep(1.1 * MIN_INTERVAL_S)
        before, spent = time.perf_counter_ns(), time.thread_time_ns()
        try:
            call()
        except NvmlError as e:
            refused = e.reason
        cpu.append((time.thread_time_ns() - spent) / 1e3)
        wall.append((time.perf_counter_ns() - before) / 1e3)
    cost: dict[str, Any] = {"wall_us": _spread(wall), "cpu_us": _spread(cpu)}
    return cost if refused is None else {**cost, "refused": refused}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 2),
        "max": round(ordered[-1], 2),
    }


def _print(result: dict[str, Any]) -> None:
    whole = result[f"readers_of_{GPUS}_gpus"]
    rows = {**result["calls"], **{f"all {p} fields of {GPUS} GPUs": c for p, c in whole.items()}}
    print(f"{'':75} {'wall µs':>9} {'p95':>9} {'cpu µs':>9}")
    for name, cost in rows.items():
        refused = f"  {cost['refused'].partition(':')[0]}" if "refused" in cost else ""
        wall, cpu = cost["wall_us"], cost["cpu_us"]
        print(f"{name[:75]:75} {wall['median']:9.1f} {wall['p95']:9.1f} {cpu['median']:9.1f}{refused}")
    share = result[f"share_of_a_core_for_{GPUS}_gpus"]
    print(f"{GPUS} such GPUs: {100 * share:.3f} % of one core")
