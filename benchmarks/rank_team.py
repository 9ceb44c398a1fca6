"""Ranks that a benchmark measures in: processes with a gloo group, all doing the same."""

from __future__ import annotations

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
from tests.ranks.rank_pool import CONTEXT

T = TypeVar("T")


class Team:
    """One rank's view of it. All methods but :meth:`say` are collective."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def own_group(self) -> dist.ProcessGroup:
        """One more of all ranks, whose collectives are not matched with anybody else's."""
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return group

    def meet(self) -> None:
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        """The largest ``seconds`` of all ranks."""
        found = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def timed(self, act: Callable[[], T]) -> tuple[T, float]:
        """What ``act`` returns, and the seconds of the slowest rank; all begin together."""
        self.meet()
        started = time.perf_counter()
        value = act()
        return value, self.slowest(time.perf_counter() - started)

    def on_rank_0(self, act: Callable[[], None]) -> None:
        """The others wait until it is done."""
        if self.rank == 0:
            act()
        self.meet()

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)


def together(ranks: int, threads: int, job: Callable[..., T], *args: Any) -> T:
    """Run ``job(team, *args)`` on so many ranks with so many threads each; returns what rank 0's returned.

    Raises:
        CannotRun: a rank raised it or failed; the others are killed.
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
            process = CONTEXT.Process(target=_begin, args=(environ, threads, theirs, job, args))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _answers(pipes)[0]  # type: ignore[no-any-return]
    finally:
        for process in processes:
            process.join(10 if sys.exc_info()[0] is None else 0)
            if process.exitcode is None:
                process.kill()
                process.join()


def _answers(pipes: list[Connection[Any, Any]]) -> list[Any]:
    """By rank."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        for pipe in wait([p for rank, p in enumerate(pipes) if rank not in answers]):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, answers[rank] = pipes[rank].recv()
            except EOFError:
                good, answers[rank] = False, "was killed"
            if not good:
                raise CannotRun(f"rank {rank}: {answers[rank]}")
    return [answers[rank] for rank in range(len(pipes))]


def _begin(
    environ: dict[str, str], threads: int, pipe: Connection[Any, Any], job: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(environ)
    warnings.simplefilter("ignore")  # of the peers, about themselves
    torch.set_num_threads(threads)
    try:
        dist.init_process_group("gloo")
        pipe.send((True, job(Team(), *args)))
        dist.barrier()  # nobody goes while another may still want an answer
        dist.destroy_process_group()
    except CannotRun as e:
        pipe.send((False, str(e)))
    except BaseException:  # the parent prints it, and kills the ranks that wait for this one
        pipe.send((False, traceback.format_exc()[-3000:]))
