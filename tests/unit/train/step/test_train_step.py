"""A training step on one process: counts, updates, and the samples of a batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.errors import UsageError
from clustertrain.train.core.step_types import compute_nonfinite_moments, index_powers, sole_bad_micro_batch
from clustertrain.train.data.loader import Loader
from clustertrain.train.session.session import get_runtime
from clustertrain.train.step.sample_positions import SamplePositions

FEATURES = 3


class Numbers:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((FEATURES,), float(i)), torch.tensor([float(i)])


def masked(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed squared error over targets that are not NaN, and their number."""
    counts = ~target.isnan()
    return (output - target)[counts].square().sum(), counts.sum()


def test_step_with_zero_count_keeps_weights(session: ct.Session) -> None:
    model = session.parallelize(nn.Linear(FEATURES, 1))
    session.optimizer(torch.optim.SGD, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    masked_batch = (torch.ones(2, FEATURES), torch.full((2, 1), torch.nan))
    result = session.train_step(masked_batch, masked, clip_norm=1.0)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert (math.isnan(result.loss.item()), result.grad_norm.item(), result.skipped) == (True, 0.0, False)
    result = session.train_step((torch.ones(2, FEATURES), torch.ones(2, 1)), masked)
    assert math.isfinite(result.loss.item()) and result.grad_norm > 0


def run_step(session: ct.Session, batch: Any) -> list[torch.Tensor]:
    """Return loss, gradient norm and weights after one step of a fixed model over ``batch``."""
    torch.manual_seed(3)
    model = session.parallelize(nn.Linear(FEATURES, 1))
    get_runtime(session).state.train_step = None
    session.optimizer(torch.optim.SGD, lr=0.1)
    result = session.train_step(batch, masked)
    return [result.loss, result.grad_norm, *(p.detach() for p in model.parameters())]


def test_ragged_micro_batches_equal_one_large_batch(session: ct.Session) -> None:
    torch.manual_seed(1)
    inputs, target = torch.randn(11, FEATURES), torch.randn(11, 4)
    target[torch.rand(11, 4) < 0.4] = torch.nan  # the counts of the samples differ; the last one is zero
    target[10] = torch.nan
    whole = run_step(session, (inputs, target))
    for sizes in ([4, 4, 3], [1, 2, 8], [5, 5, 1]):
        parts = list(zip(inputs.split(sizes), target.split(sizes), strict=True))
        assert len({int((~t.isnan()).sum()) for _, t in parts}) > 1
        for actual, expected in zip(run_step(session, parts), whole, strict=True):
            assert torch.allclose(actual, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_step_is_skipped_and_reported(session: ct.Session, bad: float) -> None:
    model = session.parallelize(nn.Linear(FEATURES, 1))
    session.optimizer(torch.optim.AdamW, lr=0.1)
    good = (torch.ones(2, FEATURES), torch.ones(2, 1))
    session.train_step(good, masked)
    before = [p.detach().clone() for p in model.parameters()]
    result = session.train_step((torch.full((2, FEATURES), bad), torch.ones(2, 1)), masked)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert (bool(result.skipped), bool(result.finite), bool(result.clipped), result.overflow) == (
        True,
        False,
        False,
        False,
    )
    assert not session.train_step(good, masked).skipped


def test_sole_nonfinite_micro_batch_is_identified(session: ct.Session) -> None:
    session.parallelize(nn.Linear(FEATURES, 1))
    session.optimizer(torch.optim.SGD, lr=0.0)
    data = session.loader(Numbers(), global_batch=8, micro_batch=2)

    def sole_bad(*bad: int, **cut: int) -> int:
        batch = [(x * math.nan if i in bad else x, y) for i, (x, y) in enumerate(next(data))]
        if cut:  # by the script, so that the samples of a micro-batch are unknown
            batch = [tuple(torch.cat(side) for side in zip(*batch, strict=True))]
        return sole_bad_micro_batch(*map(float, session.train_step(batch, nn.functional.mse_loss).bad))

    assert [sole_bad(), sole_bad(0), sole_bad(2), sole_bad(1, 3), sole_bad(0, cut=1)] == [-1, 0, 2, -1, -1]


def test_sole_nonfinite_micro_batch_across_ranks() -> None:
    def totals(*losses: float) -> torch.Tensor:
        return torch.tensor([[loss, 1.0] for loss in losses], dtype=torch.float64)

    def sole_bad(*rank_totals: torch.Tensor, same: bool = False) -> int:
        sums = [
            compute_nonfinite_moments(t, index_powers(0 if same else 2 * r, 2, t.device))
            for r, t in enumerate(rank_totals)
        ]
        return sole_bad_micro_batch(*torch.stack(sums).sum(0).tolist())

    good, bad, other = totals(1.0, 2.0), totals(1.0, math.inf), totals(math.nan, 1.0)
    assert [sole_bad(good, good), sole_bad(good, bad), sole_bad(good, other), sole_bad(bad, bad)] == [-1, 3, 2, -1]
    assert sole_bad(bad, bad, same=True) == 1


def test_clip_options_of_train_step(session: ct.Session) -> None:
    model = session.parallelize(nn.Linear(FEATURES, 1, bias=False))
    session.optimizer(torch.optim.SGD, lr=1.0)
    batch = (torch.ones(2, FEATURES), torch.full((2, 1), 100.0))
    before = model.weight.detach().clone()
    result = session.train_step(batch, masked, clip=ct.Clipping("value", value=0.25))
    assert result.clipped and result.clip_fraction == 1.0 and result.grad_norm > 1
    assert torch.allclose(model.weight - before, torch.full_like(before, 0.25))
    with pytest.raises(UsageError, match="not both"):
        session.train_step(batch, masked, clip_norm=1.0, clip=ct.Clipping())


def test_second_optimizer_raises(session: ct.Session) -> None:
    model = session.parallelize(nn.Linear(FEATURES, 1))
    session.optimizer(torch.optim.SGD, [model.weight], lr=0.1)
    with pytest.raises(UsageError, match="already") as caught:
        session.optimizer(torch.optim.SGD, [model.bias], lr=0.1)
    assert "several groups" in str(caught.value)


def test_gradients_outside_groups_do_not_accumulate(session: ct.Session) -> None:
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


def test_transformed_batch_keeps_sample_positions() -> None:
    data = loader()
    positions = SamplePositions([data])
    for _ in range(2):
        batch = transformed(next(data))
        assert positions.for_batch(batch) is data.sample_positions
    assert positions.for_batch(batch) is None  # matches no loader, so all samples count


def test_padding_of_transformed_batch_is_known() -> None:
    data = loader(rank=1, ranks=2, global_batch=5)
    sample_positions = SamplePositions([data]).for_batch(transformed(next(data)))
    assert (
        sample_positions is not None
        and [len(p) for p in sample_positions] == [2, 1]
        and sample_positions[1].tolist() == [-1]
    )


def test_batch_is_matched_to_loader_by_micro_batch_sizes() -> None:
    training, other = loader(), loader(global_batch=6)
    batch = transformed(next(training))
    next(other)
    positions = SamplePositions([training, other])
    assert positions.for_batch(batch) is training.sample_positions
    next(training), next(other)
    assert positions.for_batch(other.last_item) is other.sample_positions


def test_resplit_ragged_batch_raises() -> None:
    data = loader(rank=1, ranks=2, global_batch=5)
    positions = SamplePositions([data])
    whole = [tuple(torch.cat(side) for side in zip(*next(data), strict=True))]
    for _ in range(2):
        with pytest.raises(UsageError, match=r"micro-batches of \[3\] samples, does not show"):
            positions.for_batch(whole)


def test_resplit_even_batch_has_no_positions() -> None:
    data = loader()
    whole = [tuple(torch.cat(side) for side in zip(*next(data), strict=True))]
    assert not data.ragged and SamplePositions([data]).for_batch(whole) is None


def test_loader_without_micro_batches(session: ct.Session) -> None:
    """Train on lists, into which default_collate turns tuples."""
    session.parallelize(nn.Linear(FEATURES, 1))
    session.optimizer(torch.optim.SGD, lr=0.0)
    numbers = Numbers()
    data = session.loader(numbers, global_batch=8)
    points, target = next(data)
    assert (points.shape, target.shape) == ((8, FEATURES), (8, 1))
    assert math.isfinite(session.train_step(next(data), nn.functional.mse_loss).loss.item())
