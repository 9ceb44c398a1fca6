"""Cost of the hooks in a command's ranks, per Python process and per step, against the bare program.

The program steps a small AdamW as fast as it can, so the difference per step is the hooks'. The target is a fraction of
a step of 50 ms.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Command
from clustertrain.agent.ranks.command_start import RANK_HOOKS

STARTS, RUNS, STEPS = 30, 6, 3000
STEP_MS = 50.0
MAX_STEP_FRACTION = 0.005
MAX_START_MS = 20.0
_PROGRAM = f"""
import time, torch
loader = iter(torch.utils.data.DataLoader(torch.zeros({STEPS + 10}, 8)))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for step in range({STEPS + 5}):
    if step == 5:
        cpu = time.process_time()
    model(next(loader)).sum().backward()
    optimizer.step()
print((time.process_time() - cpu) / {STEPS} * 1e3)
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        starts = _compare(Path(folder), ["pass"], STARTS)
        steps = _compare(Path(folder), [_PROGRAM], RUNS)
    start_ms = _median_difference(starts)
    step_ms = _median_difference(steps)
    fraction = step_ms / STEP_MS
    result = measure.context(("clustertrain", "torch"))
    result |= {"start_ms": starts, "step_ms": steps, "start_difference_ms": start_ms, "step_difference_ms": step_ms}
    result["fraction_of_50_ms_step"] = fraction
    print(f"a Python process starts {start_ms:.1f} ms later (target: at most {MAX_START_MS:.0f} ms)")
    print(
        f"a step costs {step_ms * 1e3:.0f} µs more, {fraction:.2%} of 50 ms (target: at most {MAX_STEP_FRACTION:.1%})"
    )
    print(f"written to {measure.write('rank_hooks', result).relative_to(measure.ROOT)}")
    return 0 if start_ms <= MAX_START_MS and fraction <= MAX_STEP_FRACTION else 1


def _compare(folder: Path, program: list[str], pairs: int) -> dict[str, list[float]]:
    """Return the milliseconds of the bare program and of the hooked one, in alternation."""
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("CLUSTERTRAIN_", "PYTHON"))}
    bare |= {"OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    hooked = {**bare, "PYTHONPATH": str(RANK_HOOKS), "CLUSTERTRAIN_ATTEMPT": "1"}
    hooked |= {"CLUSTERTRAIN_RUN_DIR": str(folder), "CLUSTERTRAIN_RANK_DIR": str(folder)}
    times: dict[str, list[float]] = {"bare": [], "hooked": []}
    for _ in range(pairs):
        for label, env in (("bare", bare), ("hooked", hooked)):
            printed: list[str] = []
            command = Command(label, [sys.executable, "-c", *program], env, folder, printed.append)
            cpu_s = command.run().cpu_s
            times[label].append(json.loads(printed[0]) if printed[0] else cpu_s * 1e3)
    return times


def _median_difference(times: dict[str, list[float]]) -> float:
    """Return the median of the differences of the pairs."""
    return statistics.median(h - b for b, h in zip(times["bare"], times["hooked"], strict=True))
