from __future__ import annotations

import os
import random
import re
import signal
import tempfile
from typing import Any

import numpy as np
import pytest
import torch

from clustertrain.errors import CheckpointError, ConfigError, UnsuitableEnvironment
from clustertrain.train.data import loader as data
from clustertrain.train.data.loader import Loader, resolve_workers
from clustertrain.train.data.sample_checks import Limits

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


def test_an_item_is_a_pair_and_a_list_only_of_micro_batches() -> None:
    for workers in (0, 1):
        whole, parts = loader(workers=workers), loader(workers=workers, micro_batch=4)
        assert isinstance(next(whole), tuple) and [type(p) for p in next(parts)] == [tuple] * 3
        whole.close()
        parts.close()


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


def test_the_ranks_own_process_reads_what_workers_would() -> None:
    alone, workers = loader(Noisy()), loader(Noisy(), workers=2)
    for _ in range(4):
        assert next(alone)[1].tolist() == next(workers)[1].tolist()
    workers.close()
    parts = [next(loader(Noisy(), rank=r, ranks=3, micro_batch=2)) for r in range(3)]
    assert [v for part in parts for m in part for v in m[1].tolist()] == next(loader(Noisy()))[1].tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_leaves_the_generators_of_the_rank_alone(workers: int) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    expected = drawn()
    seed()
    data = loader(Noisy(), workers=workers)
    next(data)
    data.close()
    assert drawn() == expected


class Bad(Squares):
    """Sample 7 is another kind of thing, 8 fails."""

    name = "bad"

    def __getitem__(self, i: int) -> Any:
        if i == 8 and self.size == 60:
            raise OSError("no such disk")
        return torch.zeros(2 if i == 7 and self.size == 50 else 3), i

    def where(self, i: int) -> str:
        return f"file {i}"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("size", "limits", "said"),
    [
        (50, Limits(), r"sample 7 \(file 7\) is \(float32 \(2,\), int\)"),
        (40, Limits(classes=30), r"sample 3\d \(file 3\d\): target is 3\d, and must lie between 0 and 29"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_named(workers: int, size: int, limits: Limits, said: str) -> None:
    data = loader(Bad(size), workers=workers, limits=limits)
    try:
        with pytest.raises(ConfigError) as found:
            for _ in range(10):
                next(data)
        assert re.search(said, found.value.message), found.value.message
        assert found.value.fix and "Traceback" not in found.value.message
    finally:
        data.close()


def test_an_error_of_the_data_set_stays_what_it_is_and_names_the_sample() -> None:
    data = loader(Bad(60))
    with pytest.raises(OSError, match="no such disk") as found:
        for _ in range(10):
            next(data)
    assert found.value.__notes__ == ["while sample 8 (file 8) was read"]


class NotANumber(Squares):
    """Sample ``bad`` is none."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def __getitem__(self, i: int) -> tuple[float, int]:  # type: ignore[override]
        return float("nan") if i == self.bad else float(i), i


def test_a_number_that_is_none_is_an_error_where_the_run_begins_and_not_where_it_goes_on() -> None:
    fifth = loader(global_batch=4).micro_batches_at(16)[0][0][0]
    from_the_start, gone_back = (loader(NotANumber(fifth), global_batch=4) for _ in range(2))
    for one in (from_the_start, gone_back):
        for _ in range(4):
            next(one)
    assert torch.isnan(next(from_the_start)[0]).any()  # the step is skipped, and counted
    resumed = loader(NotANumber(fifth), global_batch=4)
    resumed.load_state_dict(gone_back.state_dict())
    gone_back.leave_out([(0, 4)])
    for one in (resumed, gone_back):
        assert torch.isnan(next(one)[0]).any()
    first = loader().micro_batches_at(0)[0][0][0]
    with pytest.raises(ConfigError, match="holds nan"):
        next(loader(NotANumber(first)))


def test_what_fills_a_gap_is_a_sample_of_the_ranks_own() -> None:
    ranks = [loader(rank=r, ranks=2, global_batch=3, micro_batch=1, ragged=True) for r in range(2)]
    for position in range(0, 30, 3):
        for one in ranks:
            parts = one.micro_batches_at(position)
            assert {sample for part in parts for sample, place in part if place < 0} <= {parts[0][0][0]}
    assert [place for part in ranks[1].micro_batches_at(0) for _, place in part][-1] == -1


def test_the_samples_of_a_step_are_named_on_any_rank() -> None:
    ranks = [loader(Bad(40), rank=r, ranks=3, micro_batch=2) for r in range(3)]
    for position in (0, 12, 36):  # of which the last one reaches into the next epoch
        begins = [one.micro_batches_at(position) for one in ranks]
        everything = [sample for parts in begins for part in parts for sample, _ in part]
        first, *rest = re.findall(r"sample (\d+) \(file \1\)", ranks[1].describe_batch(position))
        assert [first, *rest] == [str(i) for i in everything[:4]]
        assert ranks[0].describe_batch(position).endswith(", ".join(map(str, everything[4:])))
        samples = ", ".join(f"sample {i} (file {i})" for i, _ in begins[2][1])
        epoch = 0 if position < 36 else 1
        assert (
            ranks[0].describe_batch(position, 5) == f"micro-batch 1 of data-parallel rank 2, epoch {epoch}: {samples}"
        )
    assert ranks[0].describe_batch(36).startswith("the global batch, epochs 0 and 1: ")


@pytest.mark.parametrize(
    ("asked", "device", "cores", "workers"),
    [
        (-1, "cuda", 16, 8),
        (-1, "cuda", 5, 4),
        (-1, "cuda", 1, 1),
        (-1, "cpu", 16, 0),
        (3, "cpu", 1, 3),
        (0, "cuda", 9, 0),
    ],
)
def test_as_many_workers_as_the_cores_allow(asked: int, device: str, cores: int, workers: int) -> None:
    assert resolve_workers(asked, torch.device(device), cores) == workers


def test_a_warning_to_the_job_does_not_kill_the_workers() -> None:
    data = loader(ProcessIds(), workers=2)
    pids = {int(p) for p in next(data)[1]} | {int(p) for p in next(data)[1]}
    assert os.getpid() not in pids
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
    # They are those of the whole run, over the ends of epochs too.
    assert {int(p) for _ in range(10) for p in next(data)[1]} == pids
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


def test_a_tmpdir_that_is_too_long_for_the_workers_sockets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hand over nothing, and the rank would wait for ever."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 80)
    with pytest.raises(UnsuitableEnvironment, match="is too long for the sockets of data workers, 85 characters"):
        data._check_tmpdir()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 70)
    data._check_tmpdir()
