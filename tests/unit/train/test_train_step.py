"""One step on one process: what is counted, what is updated, which samples a batch is taken to hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.errors import UsageError
from clustertrain.train.data import Loader
from clustertrain.train.places import Places

FEATURES = 3


class Numbers:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((FEATURES,), float(i)), torch.tensor([float(i)])


@pytest.fixture
def session() -> Iterator[ct.Session]:
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    with ct.session(device="cpu") as opened:
        yield opened
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)


def masked(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared error where the target is not nan, and how often it is not."""
    counts = ~target.isnan()
    return (output - target)[counts].square().sum(), counts.sum()


def test_a_step_that_counts_nothing_leaves_the_weights_as_they_are(session: ct.Session) -> None:
    model = session.parallelize(nn.Linear(FEATURES, 1))
    session.optimizer(torch.optim.SGD, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    nothing = (torch.ones(2, FEATURES), torch.full((2, 1), torch.nan))
    done = session.train_step(nothing, masked, clip_norm=1.0)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert (math.isnan(done.loss.item()), done.grad_norm.item(), done.skipped) == (True, 0.0, False)
    done = session.train_step((torch.ones(2, FEATURES), torch.ones(2, 1)), masked)
    assert math.isfinite(done.loss.item()) and done.grad_norm > 0


def test_one_optimizer_and_no_more(session: ct.Session) -> None:
    model = session.parallelize(nn.Linear(FEATURES, 1))
    session.optimizer(torch.optim.SGD, [model.weight], lr=0.1)
    with pytest.raises(UsageError, match="already") as caught:
        session.optimizer(torch.optim.SGD, [model.bias], lr=0.1)
    assert "several groups" in str(caught.value)


def test_gradients_of_what_no_group_has_do_not_add_up(session: ct.Session) -> None:
    model = session.parallelize(nn.Linear(FEATURES, 1))
    session.optimizer(torch.optim.SGD, [model.weight], lr=0.1)
    session.train_step((torch.ones(2, FEATURES), torch.ones(2, 1)), masked)
    assert [p.grad for p in model.parameters()] == [None, None]


def loader(rank: int = 0, ranks: int = 1, **more: Any) -> Loader:
    options = {"global_batch": 8, "micro_batch": 2, "ragged": True, **more}
    device = torch.device("cpu")
    return Loader(Numbers(), workers=0, seed=1, rank=rank, ranks=ranks, device=device, **options)


def transformed(batch: list[Any]) -> list[Any]:
    return [(inputs / 2, target) for inputs, target in batch]


def test_a_transformed_batch_keeps_its_places() -> None:
    data = loader()
    places = Places([data])
    for _ in range(2):
        batch = transformed(next(data))
        assert places.of(batch) is data.places
    assert places.of(batch) is None  # of no loader as far as can be told, and all samples count


def test_fillers_of_a_transformed_batch_are_known() -> None:
    data = loader(rank=1, ranks=2, global_batch=5)
    found = Places([data]).of(transformed(next(data)))
    assert found is not None and [len(p) for p in found] == [2, 1] and found[1].tolist() == [-1]


def test_of_two_loaders_the_one_with_such_micro_batches() -> None:
    training, other = loader(), loader(global_batch=6)
    batch = transformed(next(training))
    next(other)
    places = Places([training, other])
    assert places.of(batch) is training.places
    next(training), next(other)
    assert places.of(other.latest) is other.places


def test_a_ragged_batch_cut_anew_is_refused() -> None:
    data = loader(rank=1, ranks=2, global_batch=5)
    places = Places([data])
    whole = [tuple(torch.cat(side) for side in zip(*next(data), strict=True))]
    for _ in range(2):
        with pytest.raises(UsageError, match=r"micro-batches of \[3\] samples, it cannot be told"):
            places.of(whole)


def test_a_batch_cut_anew_that_divides_has_no_places() -> None:
    data = loader()
    whole = [tuple(torch.cat(side) for side in zip(*next(data), strict=True))]
    assert not data.ragged and Places([data]).of(whole) is None


def test_a_loader_without_micro_batches_feeds_a_step(session: ct.Session) -> None:
    """A data set of tuples: default_collate makes lists of them."""
    session.parallelize(nn.Linear(FEATURES, 1))
    session.optimizer(torch.optim.SGD, lr=0.0)
    numbers = Numbers()
    data = session.loader(numbers, global_batch=8)
    points, target = next(data)
    assert (points.shape, target.shape) == ((8, FEATURES), (8, 1))
    assert math.isfinite(session.train_step(next(data), nn.functional.mse_loss).loss.item())
