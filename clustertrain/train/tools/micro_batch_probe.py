"""``python -m clustertrain.train.tools.micro_batch_probe``: one rank of a ``plan --find-micro-batch`` trial.

torchrun starts it. It runs a few of the trainer's steps and writes ``probe-<rank>.json`` next to its result record.
Each trial uses a new process, because memory held by torch after an out-of-memory error would distort the next one.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import sys
from pathlib import Path

import msgspec
import torch

from clustertrain import clock, fsio, settings
from clustertrain.plan.search.micro_batch import TrialMeasurement
from clustertrain.run.run_dir import RunDir
from clustertrain.run.run_spec import load_spec
from clustertrain.train.core.context import load_plan
from clustertrain.train.main import run_as_rank

PROBE_STEPS = 4  # the first one creates optimizer state and loads kernels, and is not timed
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(run: RunDir, limit_bytes: int) -> TrialMeasurement:
    """Train a few steps according to the plan in ``run``.

    Args:
        limit_bytes: memory limit of this process on the CPU; allocations beyond it fail as on a GPU.
    """
    from clustertrain.train.session.session import session
    from clustertrain.train.trainer import build_trainer

    recipe, batch = load_spec(run).recipe, load_plan(run)[1]
    with session() as s:
        if s.device.type == "cpu":
            _limit_memory(limit_bytes)
            rss, rss_file = _status_bytes("VmRSS"), _status_bytes("RssFile")
        trainer = build_trainer(s, recipe, batch)
        step_times_s = []
        for _ in range(PROBE_STEPS):
            started = clock.monotonic()
            trainer.step()
            if s.device.type == "cuda":
                torch.cuda.synchronize()
            step_times_s.append(clock.monotonic() - started)
        step_s = statistics.median(step_times_s[1:])
        if s.device.type == "cpu":
            # Pages of libraries count as resident once read, and how many were read before depends on the page cache.
            library_bytes = _status_bytes("RssFile") - rss_file
            peak_bytes = max(0, _status_bytes("VmHWM") - rss - library_bytes)
            return TrialMeasurement(peak_bytes=peak_bytes, step_s=step_s)
        return _measure_gpu(step_s)


def _measure_gpu(step_s: float) -> TrialMeasurement:
    free, capacity = torch.cuda.mem_get_info()
    # torch does not count the CUDA context and NCCL's buffers. This also counts other processes' memory, as it should.
    non_torch_bytes = max(0, capacity - free - torch.cuda.memory_reserved())
    return TrialMeasurement(
        peak_bytes=torch.cuda.max_memory_reserved() + non_torch_bytes,
        allocated_bytes=torch.cuda.max_memory_allocated(),
        capacity_bytes=capacity,
        step_s=step_s,
    )


def _limit_memory(limit_bytes: int) -> None:
    """Reset the peak of resident memory and allow the process ``limit_bytes`` more."""
    # Import now what building on the meta device and sharding need: 0.1 GiB, the same for every model.
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    # proc(5): 5 resets the peak resident set size. Otherwise the peak of the imports would hide that of a small model.
    _CLEAR_REFS.write_text("5")
    limit = _status_bytes("VmData") + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert match is not None, field
    return int(match.group(1)) * 1024


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit-bytes", type=int, required=True)
    limit_bytes = parser.parse_args().limit_bytes

    def run_probe(run: RunDir | None) -> None:
        assert run is not None
        measurement = measure(run, limit_bytes)
        path = Path(os.environ[settings.RANK_DIR], f"probe-{os.environ['RANK']}.json")
        fsio.write_json(path, msgspec.to_builtins(measurement))

    return run_as_rank(run_probe)


if __name__ == "__main__":
    sys.exit(main())
