"""``python -m clustertrain.cluster.bench_ranks gemm|all-reduce|all-reduce-across``: short measurements with torch.

``gemm`` is one process; the others run as ranks of torchrun. Results are printed as lines of JSON after
``OUTPUT_PREFIX``: standard output passes through srun and torchrun and needs no shared file system.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from clustertrain import clock
from clustertrain.cluster.bench import OUTPUT_PREFIX
from clustertrain.scheduler.sockets import find_free_port

SAMPLES = 7
WARMUP_SAMPLES = 3
# (m, n, k). On GPUs, large enough for peak speed: a square, a feed-forward of Llama 3 8B, a square of half the size.
SHAPES = {
    "cuda": ((8192, 8192, 8192), (8192, 14336, 4096), (4096, 4096, 4096)),
    "cpu": ((512, 512, 512), (256, 1024, 256)),
}
# Several iterations per sample hide the launch overhead of GPU kernels.
ITERS_PER_SAMPLE = {"cuda": 10, "cpu": 1}
# Large enough that latency does not matter, like a flattened gradient bucket or the shard of a large layer.
ALL_REDUCE_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}
_MIN_BF16_CAPABILITY = (8, 0)  # compute capability of Ampere; older ones multiply bf16 in fp32


def inspect_device(requested: str) -> dict[str, Any]:
    """Return the facts of the ``requested`` device (cuda, cpu or auto), the torch version and a free port."""
    cuda = torch.cuda.is_available() if requested == "auto" else requested == "cuda"
    if cuda and not torch.cuda.is_available():
        raise RuntimeError("CUDA was requested, but torch finds no usable GPU")
    return {
        "kind": "cuda" if cuda else "cpu",
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "count": torch.cuda.device_count() if cuda else 0,
        "torch": str(torch.__version__),
        "port": find_free_port(),
    }


def gemm(device_type: str) -> dict[str, Any]:
    """Return the median TFLOP/s of dense matrix products over :data:`SHAPES`, counting 2mnk operations each."""
    dtype = torch.float32
    if device_type == "cuda":
        supports_bf16 = torch.version.hip is not None or torch.cuda.get_device_capability() >= _MIN_BF16_CAPABILITY
        dtype = torch.bfloat16 if supports_bf16 else torch.float16
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    rates = []
    for m, n, k in SHAPES[device_type]:
        a = torch.randn(m, k, device=device_type, dtype=dtype)
        b = torch.randn(k, n, device=device_type, dtype=dtype)
        seconds = _median_s(lambda a=a, b=b: torch.mm(a, b), device_type, ITERS_PER_SAMPLE[device_type])  # type: ignore[misc]
        rates.append(2 * m * n * k / seconds / 1e12)
    return {"gemm_tflops": statistics.median(rates), "gemm_dtype": name}


def all_reduce(device_type: str, inter_node: bool) -> dict[str, Any]:
    """Return the bus bandwidth in GB/s, defined in ``MeasuredRates``.

    With ``inter_node``, ranks of equal local rank form a group, and all groups reduce at once; the slowest counts.
    """
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    if inter_node:
        mesh = init_device_mesh(
            device_type, (dist.get_world_size() // local_world_size, local_world_size), mesh_dim_names=("node", "local")
        )
        group = mesh["node"].get_group()
    ranks = dist.get_world_size(group)
    size = ALL_REDUCE_BYTES[device_type]
    buffer = torch.zeros(size // 4, device=device_type)

    def run_once() -> None:
        dist.all_reduce(buffer, group=group)

    seconds = torch.tensor(
        [_median_s(run_once, device_type, ITERS_PER_SAMPLE[device_type], before_sample=dist.barrier)],
        device=device_type,
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return {"bus_gb_s": size / float(seconds) * 2 * (ranks - 1) / ranks / 1e9, "ranks": ranks}


def _median_s(
    fn: Callable[[], Any], device_type: str, repeats: int, before_sample: Callable[[], Any] | None = None
) -> float:
    """Return the median seconds of one ``fn()`` after a warm-up.

    Every sample calls ``before_sample``, then ``fn`` ``repeats`` times.
    """
    samples = []
    for i in range(WARMUP_SAMPLES + SAMPLES):
        if before_sample is not None:
            before_sample()
        _synchronize(device_type)
        start = clock.monotonic()
        for _ in range(repeats):
            fn()
        _synchronize(device_type)
        if i >= WARMUP_SAMPLES:
            samples.append((clock.monotonic() - start) / repeats)
    return statistics.median(samples)


def _synchronize(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def print_result(**fields: Any) -> None:
    """Print ``fields`` as one line for the parent process."""
    print(OUTPUT_PREFIX + json.dumps(fields), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("gemm", "all-reduce", "all-reduce-across"))
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), required=True)
    options = parser.parse_args()
    try:
        if options.what == "gemm":
            device_info = inspect_device(options.device)
            print_result(**device_info)
            print_result(**gemm(device_info["kind"]))
        else:
            result = all_reduce(options.device, options.what == "all-reduce-across")
            if os.environ["RANK"] == "0":
                print_result(**result)
    except Exception as e:  # the edge of the process: the reason must reach the parent through srun and torchrun
        print_result(error=f"{type(e).__name__}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
