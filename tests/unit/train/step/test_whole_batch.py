"""Steps whose loss compares the whole global batch: the split into micro-batches does not change them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import clustertrain as ct
from clustertrain.errors import UsageError
from clustertrain.train.core.step_types import sole_bad_micro_batch
from clustertrain.train.session.session import get_runtime

FEATURES = 3


@pytest.fixture(autouse=True)
def one_thread(session: ct.Session) -> None:
    """Sum in one order, so that batches of different sizes give the same bits."""
    torch.set_num_threads(1)


class Encoders(nn.Module):
    """Two views, or with ``scale`` two towers with a learned temperature."""

    def __init__(self, scale: bool = False, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = (
            nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 4))
            for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)
        self.log_scale = nn.Parameter(torch.ones(1)) if scale else None
        self.passes: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = self.first(x), self.dropout(self.second(x))
        self.passes.append(second.detach())
        return (first, second) if self.log_scale is None else (first, second, self.log_scale.exp())


def run_step(session: ct.Session, model: Encoders, sizes: list[int]) -> list[torch.Tensor]:
    """Return loss, gradient norm and weights after a step over 12 samples in micro-batches of these sizes."""
    prepared = session.parallelize(model)
    get_runtime(session).state.train_step = None
    session.optimizer(torch.optim.SGD, lr=0.1)
    inputs = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(1))
    batch = [(x, torch.zeros(len(x))) for x in inputs.split(sizes)]
    result = session.train_step(batch, ct.ContrastiveLoss())
    return [result.loss, result.grad_norm, *(p.detach() for p in prepared.parameters())]


@pytest.mark.parametrize("scale", [False, True], ids=["views", "towers"])
def test_micro_batches_equal_one_large_batch(session: ct.Session, scale: bool) -> None:
    whole = run_step(session, Encoders(scale), [12])
    for sizes in ([6, 6], [1] * 12, [5, 7]):
        for actual, expected in zip(run_step(session, Encoders(scale), sizes), whole, strict=True):
            assert torch.allclose(actual, expected, rtol=2e-6, atol=1e-7)


def test_gradient_is_that_of_autograd(session: ct.Session) -> None:
    model, inputs = Encoders(scale=True), torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(1))
    total, count = ct.ContrastiveLoss()(model(inputs), None)
    (total / count).backward()
    expected = [p.detach() - 0.1 * p.grad for p in model.parameters()]  # type: ignore[operator]
    actual = run_step(session, Encoders(scale=True), [4, 4, 4])[2:]
    assert all(torch.allclose(a, e, rtol=2e-6, atol=1e-7) for a, e in zip(actual, expected, strict=True))


def test_second_pass_repeats_dropout_and_statistics(session: ct.Session) -> None:
    model, micro = Encoders(dropout=0.5, norm=True), Encoders(norm=True)
    torch.manual_seed(7)
    run_step(session, model, [4, 4, 4])
    assert len(model.passes) == 6
    assert all(torch.equal(a, b) for a, b in zip(model.passes[:3], model.passes[3:], strict=True))
    assert not torch.equal(model.passes[0], model.passes[1])
    state = torch.get_rng_state()
    torch.manual_seed(7)
    for _ in range(3):
        nn.functional.dropout(torch.ones(4, 4), 0.5)
    assert torch.equal(state, torch.get_rng_state())
    run_step(session, micro, [4, 4, 4])
    assert micro.first[1].num_batches_tracked == 3  # not 6


def test_sole_nonfinite_micro_batch_is_identified(session: ct.Session) -> None:
    class Points:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.full((FEATURES,), float(i)), i

    model = session.parallelize(Encoders())
    session.optimizer(torch.optim.SGD, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    data = session.loader(Points(), global_batch=8, micro_batch=2)
    batch = [(x * math.nan if i == 2 else x, y) for i, (x, y) in enumerate(next(data))]
    result = session.train_step(batch, ct.ContrastiveLoss())
    assert result.skipped and sole_bad_micro_batch(*map(float, result.bad)) == 2
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_changing_number_of_samples_raises(session: ct.Session) -> None:
    session.parallelize(Encoders())
    session.optimizer(torch.optim.SGD, lr=0.1)
    session.train_step((torch.ones(4, FEATURES), torch.ones(4)), ct.ContrastiveLoss())
    with pytest.raises(UsageError, match="this batch has 3 samples and the earlier ones 4"):
        session.train_step((torch.ones(3, FEATURES), torch.ones(3)), ct.ContrastiveLoss())


def test_evaluation_compares_the_global_batch(session: ct.Session) -> None:
    points = torch.randn(13, FEATURES, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(points, torch.arange(13))
    model, loss = session.parallelize(Encoders()), ct.ContrastiveLoss()
    values = [session.evaluate(dataset, loss, metrics=["recall_at_1"], micro_batch=n, group=6) for n in (4, 13)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    sums = [loss(model(points[i : i + 6]), None) for i in (0, 6)]
    assert values[0]["validation_loss"] == pytest.approx(sum(s.item() for s, _ in sums) / 12, rel=1e-6)
    assert session.evaluate(dataset, loss)["validation_loss"] > values[0]["validation_loss"]  # all 13
    with pytest.raises(UsageError, match="pass the dataset itself"):
        session.evaluate(iter([(points, points)]), loss)
