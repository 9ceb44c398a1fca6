"""Ranks for a benchmark: processes with a gloo group that all run the same job."""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.measure import CannotRun
from clustertrain.checkpoint.core.control_group import ControlGroup
from tests.ranks.rank_pool import CONTEXT

T = TypeVar("T")


class Team:
    """A rank's view of the team. All methods except :meth:`log` are collective."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group_ids = itertools.count()

    def new_group(self) -> dist.ProcessGroup:
        """Create another gloo group of all ranks: its collectives cannot match those of other groups."""
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return group

    def new_control_group(self) -> ControlGroup:
        """Create a control group of all ranks: its operations cannot match those of other groups."""
        store = dist.PrefixStore(f"control-{next(self._group_ids)}", dist.distributed_c10d._get_default_store())
        return ControlGroup(store, self.rank, self.size, dist.default_pg_timeout)

    def barrier(self) -> None:
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        """Return the largest ``seconds`` of all ranks."""
        slowest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def time(self, action: Callable[[], T]) -> tuple[T, float]:
        """Run ``action`` on all ranks at once; return its value and the seconds of the slowest rank."""
        self.barrier()
        started = time.perf_counter()
        value = action()
        return value, self.slowest(time.perf_counter() - started)

    def on_rank_0(self, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 while the others wait."""
        if self.rank == 0:
            action()
        self.barrier()

    def log(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)


def run_team(ranks: int, threads: int, job: Callable[..., T], *args: Any) -> T:
    """Run ``job(team, *args)`` on ``ranks`` ranks with ``threads`` threads each; return rank 0's value.

    Raises:
        CannotRun: a rank raised it or failed. The others are then killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    processes, pipes = [], []
    try:
        for rank in range(ranks):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            environ = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = CONTEXT.Process(target=_rank_main, args=(environ, threads, theirs, job, args))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collect_results(pipes)[0]  # type: ignore[no-any-return]
    finally:
        for process in processes:
            process.join(10 if sys.exc_info()[0] is None else 0)
            if process.exitcode is None:
                process.kill()
                process.join()


def _collect_results(pipes: list[Connection[Any, Any]]) -> list[Any]:
    """Return the ranks' results, by rank."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for pipe in wait([p for rank, p in enumerate(pipes) if rank not in results]):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, results[rank] = pipes[rank].recv()
            except EOFError:
                ok, results[rank] = False, "was killed"
            if not ok:
                raise CannotRun(f"rank {rank}: {results[rank]}")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    environ: dict[str, str], threads: int, pipe: Connection[Any, Any], job: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(environ)
    warnings.simplefilter("ignore")  # the peers' own
    torch.set_num_threads(threads)
    try:
        dist.init_process_group("gloo")
        pipe.send((True, job(Team(), *args)))
        dist.barrier()  # no rank exits while another may still need it
        dist.destroy_process_group()
    except CannotRun as e:
        pipe.send((False, str(e)))
    except BaseException:  # the parent prints it, and kills the ranks that wait for this one
        pipe.send((False, traceback.format_exc()[-3000:]))
