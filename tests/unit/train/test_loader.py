from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch

from clustertrain.errors import CheckpointError, ConfigError
from clustertrain.train.data import Loader

# torch warns on machines with fewer cores than workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CPU = torch.device("cpu")


class Squares:
    """Sample i is (i, i * i)."""

    def __init__(self, size: int = 50) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i, i * i


class Noisy(Squares):
    def __getitem__(self, i: int) -> tuple[int, float]:
        return i, random.random() + float(np.random.rand()) + torch.rand(1).item()


class ProcessIds(Squares):
    def __getitem__(self, i: int) -> tuple[int, int]:
        return i, os.getpid()


def loader(dataset: Any = None, *, rank: int = 0, ranks: int = 1, workers: int = 0, **kw: Any) -> Loader:
    arguments: dict[str, Any] = {"global_batch": 12, "micro_batch": None, **kw}
    return Loader(
        dataset if dataset is not None else Squares(),
        workers=workers,
        seed=1,
        rank=rank,
        ranks=ranks,
        device=CPU,
        **arguments,
    )


def taken(steps: int, ranks: int, **kw: Any) -> list[list[int]]:
    """The samples of each global batch."""
    loaders = [loader(rank=r, ranks=ranks, **kw) for r in range(ranks)]
    return [[int(i) for one in loaders for i in next(one)[0]] for _ in range(steps)]


def test_the_order_does_not_depend_on_the_number_of_ranks() -> None:
    alone = taken(10, 1)
    assert [taken(10, n) for n in (2, 3, 4, 6, 12)] == [alone] * 5
    assert sorted(i for batch in taken(4, 4) for i in batch)[:48] == sorted({i for b in taken(4, 4) for i in b})


def test_the_position_alone_continues_the_order_on_another_number_of_ranks() -> None:
    whole = taken(9, 2)
    first = loader(rank=0, ranks=2)
    for _ in range(5):
        next(first)
    state = first.state_dict()
    resumed = [loader(rank=r, ranks=3) for r in range(3)]
    for one in resumed:
        one.load_state_dict(state)
    assert [[int(i) for one in resumed for i in next(one)[0]] for _ in range(4)] == whole[5:]


def test_micro_batches_are_the_same_samples_in_parts() -> None:
    parts = next(loader(micro_batch=4))
    assert [len(p[0]) for p in parts] == [4, 4, 4]
    assert torch.cat([p[0] for p in parts]).tolist() == next(loader())[0].tolist()


def test_workers_do_not_change_the_order_and_prefetching_does_not_move_the_position() -> None:
    with_workers, without = loader(workers=2), loader()
    for _ in range(6):
        assert next(with_workers)[0].tolist() == next(without)[0].tolist()
    assert with_workers.state_dict() == without.state_dict()
    with_workers.close()


def test_random_augmentation_in_a_worker_depends_on_the_position_alone() -> None:
    one, three = loader(Noisy(), workers=1), loader(Noisy(), workers=3)
    first = [next(one)[1].tolist() for _ in range(4)]
    assert [next(three)[1].tolist() for _ in range(4)] == first
    resumed = loader(Noisy(), workers=2)
    resumed.load_state_dict({**one.state_dict(), "position": 24})
    assert next(resumed)[1].tolist() == first[2]
    for each in (one, three, resumed):
        each.close()


def test_reading_leaves_the_generators_of_the_rank_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    data = loader(workers=1)
    next(data)
    data.close()
    next(loader())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_warning_to_the_job_does_not_kill_the_workers() -> None:
    data = loader(ProcessIds(), workers=2)
    pids = {int(p) for p in next(data)[1]} | {int(p) for p in next(data)[1]}
    assert os.getpid() not in pids
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
    for _ in range(10):
        next(data)
    data.close()


def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide over 5"):
        loader(ranks=5)
    with pytest.raises(ConfigError, match="micro-batches of 5"):
        loader(micro_batch=5)
    with pytest.raises(ConfigError, match="empty"):
        loader(Squares(0))


def test_another_data_set_is_refused() -> None:
    with pytest.raises(CheckpointError, match="50 samples, and had 60"):
        loader().load_state_dict(loader(Squares(60)).state_dict())


def test_an_epoch_may_end_inside_a_batch() -> None:
    seen = [i for batch in taken(25, 1) for i in batch]
    assert all(sorted(seen[e * 50 : (e + 1) * 50]) == list(range(50)) for e in range(6))
