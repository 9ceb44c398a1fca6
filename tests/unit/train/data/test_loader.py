"""Order, position, workers and resume of the loader."""

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
from clustertrain.train.data import loader as loader_module
from clustertrain.train.data.loader import Loader, resolve_workers
from clustertrain.train.data.sample_checks import Limits

# torch warns on machines with fewer cores than workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CPU = torch.device("cpu")


class Squares:
    """Dataset whose sample i is (i, i * i)."""

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


def make_loader(dataset: Any = None, *, rank: int = 0, ranks: int = 1, workers: int = 0, **kw: Any) -> Loader:
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


def global_batches(steps: int, ranks: int, **kw: Any) -> list[list[int]]:
    """Return the samples of each global batch."""
    loaders = [make_loader(rank=r, ranks=ranks, **kw) for r in range(ranks)]
    return [[int(i) for loader in loaders for i in next(loader)[0]] for _ in range(steps)]


def test_order_does_not_depend_on_the_number_of_ranks() -> None:
    expected = global_batches(10, 1)
    assert [global_batches(10, n) for n in (2, 3, 4, 6, 12)] == [expected] * 5
    assert sorted(i for batch in global_batches(4, 4) for i in batch)[:48] == sorted(
        {i for b in global_batches(4, 4) for i in b}
    )


def test_position_resumes_the_order_on_other_ranks() -> None:
    whole = global_batches(9, 2)
    first = make_loader(rank=0, ranks=2)
    for _ in range(5):
        next(first)
    state = first.state_dict()
    resumed = [make_loader(rank=r, ranks=3) for r in range(3)]
    for one in resumed:
        one.load_state_dict(state)
    assert [[int(i) for one in resumed for i in next(one)[0]] for _ in range(4)] == whole[5:]


@pytest.mark.long
def test_item_is_a_list_only_for_micro_batches() -> None:
    for workers in (0, 1):
        whole, parts = make_loader(workers=workers), make_loader(workers=workers, micro_batch=4)
        assert isinstance(next(whole), tuple) and [type(p) for p in next(parts)] == [tuple] * 3
        whole.close()
        parts.close()


def test_micro_batches_split_the_same_samples() -> None:
    parts = next(make_loader(micro_batch=4))
    assert [len(p[0]) for p in parts] == [4, 4, 4]
    assert torch.cat([p[0] for p in parts]).tolist() == next(make_loader())[0].tolist()


def test_workers_change_neither_order_nor_position() -> None:
    with_workers, without = make_loader(workers=2), make_loader()
    for _ in range(6):
        assert next(with_workers)[0].tolist() == next(without)[0].tolist()
    assert with_workers.state_dict() == without.state_dict()
    with_workers.close()


@pytest.mark.long
def test_augmentation_in_workers_depends_only_on_position() -> None:
    one, three = make_loader(Noisy(), workers=1), make_loader(Noisy(), workers=3)
    first = [next(one)[1].tolist() for _ in range(4)]
    assert [next(three)[1].tolist() for _ in range(4)] == first
    resumed = make_loader(Noisy(), workers=2)
    resumed.load_state_dict({**one.state_dict(), "position": 24})
    assert next(resumed)[1].tolist() == first[2]
    for each in (one, three, resumed):
        each.close()


@pytest.mark.long
def test_reading_without_workers_matches_workers() -> None:
    in_process, workers = make_loader(Noisy()), make_loader(Noisy(), workers=2)
    for _ in range(4):
        assert next(in_process)[1].tolist() == next(workers)[1].tolist()
    workers.close()
    parts = [next(make_loader(Noisy(), rank=r, ranks=3, micro_batch=2)) for r in range(3)]
    assert [v for part in parts for m in part for v in m[1].tolist()] == next(make_loader(Noisy()))[1].tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_preserves_the_random_generators(workers: int) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    expected = draw()
    seed()
    data = make_loader(Noisy(), workers=workers)
    next(data)
    data.close()
    assert draw() == expected


class Bad(Squares):
    """Dataset whose sample 7 has another shape (of 50) or whose sample 8 cannot be read (of 60)."""

    name = "bad"

    def __getitem__(self, i: int) -> Any:
        if i == 8 and self.size == 60:
            raise OSError("no such disk")
        return torch.zeros(2 if i == 7 and self.size == 50 else 3), i

    def where(self, i: int) -> str:
        return f"file {i}"


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("size", "limits", "pattern"),
    [
        (50, Limits(), r"sample 7 \(file 7\) is \(float32 \(2,\), int\)"),
        (40, Limits(classes=30), r"sample 3\d \(file 3\d\): target is 3\d: must be between 0 and 29"),
    ],
    ids=["other shape", "target out of range"],
)
def test_bad_sample_is_named(workers: int, size: int, limits: Limits, pattern: str) -> None:
    data = make_loader(Bad(size), workers=workers, limits=limits)
    try:
        with pytest.raises(ConfigError) as raised:
            for _ in range(10):
                next(data)
        assert re.search(pattern, raised.value.message), raised.value.message
        assert raised.value.fix and "Traceback" not in raised.value.message
    finally:
        data.close()


def test_dataset_exception_gets_a_note_with_the_sample() -> None:
    data = make_loader(Bad(60))
    with pytest.raises(OSError, match="no such disk") as raised:
        for _ in range(10):
            next(data)
    assert raised.value.__notes__ == ["while sample 8 (file 8) was read"]


class NotANumber(Squares):
    """Dataset whose sample ``bad`` is NaN."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def __getitem__(self, i: int) -> tuple[float, int]:  # type: ignore[override]
        return float("nan") if i == self.bad else float(i), i


def test_nonfinite_sample_raises_only_on_a_fresh_run() -> None:
    fifth = make_loader(global_batch=4).micro_batches_at(16)[0][0][0]
    fresh, rolled_back = (make_loader(NotANumber(fifth), global_batch=4) for _ in range(2))
    for one in (fresh, rolled_back):
        for _ in range(4):
            next(one)
    assert torch.isnan(next(fresh)[0]).any()  # the step is skipped and counted
    resumed = make_loader(NotANumber(fifth), global_batch=4)
    resumed.load_state_dict(rolled_back.state_dict())
    rolled_back.exclude([(0, 4)])
    for one in (resumed, rolled_back):
        assert torch.isnan(next(one)[0]).any()
    first = make_loader().micro_batches_at(0)[0][0][0]
    with pytest.raises(ConfigError, match="holds nan"):
        next(make_loader(NotANumber(first)))


def test_padding_repeats_a_sample_of_the_rank() -> None:
    ranks = [make_loader(rank=r, ranks=2, global_batch=3, micro_batch=1, ragged=True) for r in range(2)]
    for position in range(0, 30, 3):
        for one in ranks:
            parts = one.micro_batches_at(position)
            assert {sample for part in parts for sample, sample_position in part if sample_position < 0} <= {
                parts[0][0][0]
            }
    assert [sample_position for part in ranks[1].micro_batches_at(0) for _, sample_position in part][-1] == -1


def test_describe_batch_names_samples_on_any_rank() -> None:
    ranks = [make_loader(Bad(40), rank=r, ranks=3, micro_batch=2) for r in range(3)]
    for position in (0, 12, 36):  # the last one reaches into the next epoch
        micro_batches = [one.micro_batches_at(position) for one in ranks]
        everything = [sample for parts in micro_batches for part in parts for sample, _ in part]
        first, *rest = re.findall(r"sample (\d+) \(file \1\)", ranks[1].describe_batch(position))
        assert [first, *rest] == [str(i) for i in everything[:4]]
        assert ranks[0].describe_batch(position).endswith(", ".join(map(str, everything[4:])))
        samples = ", ".join(f"sample {i} (file {i})" for i, _ in micro_batches[2][1])
        epoch = 0 if position < 36 else 1
        assert (
            ranks[0].describe_batch(position, 5) == f"micro-batch 1 of data-parallel rank 2, epoch {epoch}: {samples}"
        )
    assert ranks[0].describe_batch(36).startswith("the global batch, epochs 0 and 1: ")


@pytest.mark.parametrize(
    ("requested", "device", "cores", "workers"),
    [
        (-1, "cuda", 16, 8),
        (-1, "cuda", 5, 4),
        (-1, "cuda", 1, 1),
        (-1, "cpu", 16, 0),
        (3, "cpu", 1, 3),
        (0, "cuda", 9, 0),
    ],
)
def test_resolve_workers_limits_to_cores(requested: int, device: str, cores: int, workers: int) -> None:
    assert resolve_workers(requested, torch.device(device), cores) == workers


@pytest.mark.long
def test_warning_signals_do_not_kill_workers() -> None:
    data = make_loader(ProcessIds(), workers=2)
    pids = {int(p) for p in next(data)[1]} | {int(p) for p in next(data)[1]}
    assert os.getpid() not in pids
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
    # The same workers serve the whole run, across epochs.
    assert {int(p) for _ in range(10) for p in next(data)[1]} == pids
    data.close()


def test_sizes_that_do_not_divide_raise() -> None:
    with pytest.raises(ConfigError, match="does not divide over 5"):
        make_loader(ranks=5)
    with pytest.raises(ConfigError, match="micro-batches of 5"):
        make_loader(micro_batch=5)
    with pytest.raises(ConfigError, match="empty"):
        make_loader(Squares(0))


def test_dataset_of_another_length_raises_on_resume() -> None:
    with pytest.raises(CheckpointError, match="50 samples, but the checkpoint was saved with 60"):
        make_loader().load_state_dict(make_loader(Squares(60)).state_dict())


def test_epoch_can_end_inside_a_batch() -> None:
    seen = [i for batch in global_batches(25, 1) for i in batch]
    assert all(sorted(seen[e * 50 : (e + 1) * 50]) == list(range(50)) for e in range(6))


def test_tmpdir_too_long_for_worker_sockets_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 80)
    with pytest.raises(UnsuitableEnvironment, match="is too long for the sockets of data workers: 85 characters"):
        loader_module._check_tmpdir()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 70)
    loader_module._check_tmpdir()
