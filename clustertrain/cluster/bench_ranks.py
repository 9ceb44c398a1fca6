"""``python -m clustertrain.cluster.bench_ranks gemm|all-reduce|all-reduce-across``: short measurements with torch.

``gemm`` is one process, the others are ranks of torchrun. What was measured goes to standard output, one line of JSON
after ``MARK``, so that it comes through srun and torchrun, and needs no filesystem that all nodes see.
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
from clustertrain.cluster.bench import MARK
from clustertrain.scheduler.sockets import free_port

SAMPLES = 7
WARM_UP = 3
# (m, n, k). On GPUs large enough for a plateau: a square, a feed-forward of Llama 3 8B and a square of half the size.
SHAPES = {
    "cuda": ((8192, 8192, 8192), (8192, 14336, 4096), (4096, 4096, 4096)),
    "cpu": ((512, 512, 512), (256, 1024, 256)),
}
# In a row for one sample: on a GPU the start of a kernel would else be a part of the time.
IN_A_ROW = {"cuda": 10, "cpu": 1}
# Past the sizes at which latency counts; a flattened gradient bucket or the shard of a large layer.
ALL_REDUCE_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}
_FIRST_BF16 = (8, 0)  # compute capability of Ampere; older ones multiply bf16 in fp32


def look(asked: str) -> dict[str, Any]:
    """What this process sees: ``asked`` is a device, or auto. ``port`` is one that is free here."""
    cuda = torch.cuda.is_available() if asked == "auto" else asked == "cuda"
    if cuda and not torch.cuda.is_available():
        raise RuntimeError("CUDA was asked for, and torch sees no GPU it can use")
    return {
        "kind": "cuda" if cuda else "cpu",
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "count": torch.cuda.device_count() if cuda else 0,
        "torch": str(torch.__version__),
        "port": free_port(),
    }


def gemm(kind: str) -> dict[str, Any]:
    """The median over :data:`SHAPES` of dense matrix products, 2mnk operations each, in TFLOP/s."""
    dtype = torch.float32
    if kind == "cuda":
        new = torch.version.hip is not None or torch.cuda.get_device_capability() >= _FIRST_BF16
        dtype = torch.bfloat16 if new else torch.float16
    name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    rates = []
    for m, n, k in SHAPES[kind]:
        a = torch.randn(m, k, device=kind, dtype=dtype)
        b = torch.randn(k, n, device=kind, dtype=dtype)
        seconds = _median_s(lambda a=a, b=b: torch.mm(a, b), kind, IN_A_ROW[kind])  # type: ignore[misc]
        rates.append(2 * m * n * k / seconds / 1e12)
    return {"gemm_tflops": statistics.median(rates), "gemm_dtype": name}


def all_reduce(kind: str, across: bool) -> dict[str, Any]:
    """Bus bandwidth in GB/s, see ``Measured``. ``across``: ranks of the same local rank form a group, and all groups
    reduce at once; the slowest counts."""
    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if kind == "cuda":
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    else:
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    if across:
        mesh = init_device_mesh(kind, (dist.get_world_size() // per_node, per_node), mesh_dim_names=("node", "local"))
        group = mesh["node"].get_group()
    ranks = dist.get_world_size(group)
    size = ALL_REDUCE_BYTES[kind]
    buffer = torch.zeros(size // 4, device=kind)

    def once() -> None:
        dist.all_reduce(buffer, group=group)

    seconds = torch.tensor([_median_s(once, kind, IN_A_ROW[kind], before=dist.barrier)], device=kind)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return {"bus_gb_s": size / float(seconds) * 2 * (ranks - 1) / ranks / 1e9, "ranks": ranks}


def _median_s(work: Callable[[], Any], kind: str, times: int, before: Callable[[], Any] | None = None) -> float:
    """Seconds of one ``work``, after a warm-up; every sample does it ``times`` times, and starts after ``before``."""
    samples = []
    for i in range(WARM_UP + SAMPLES):
        if before is not None:
            before()
        _synchronize(kind)
        start = clock.monotonic()
        for _ in range(times):
            work()
        _synchronize(kind)
        if i >= WARM_UP:
            samples.append((clock.monotonic() - start) / times)
    return statistics.median(samples)


def _synchronize(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def say(**found: Any) -> None:
    print(MARK + json.dumps(found), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("gemm", "all-reduce", "all-reduce-across"))
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), required=True)
    options = parser.parse_args()
    try:
        if options.what == "gemm":
            seen = look(options.device)
            say(**seen)
            say(**gemm(seen["kind"]))
        else:
            found = all_reduce(options.device, options.what == "all-reduce-across")
            if os.environ["RANK"] == "0":
                say(**found)
    except Exception as e:  # the process's edge: the reason must reach the one who asked, through srun and torchrun
        say(error=f"{type(e).__name__}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
