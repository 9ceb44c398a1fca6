"""session.evaluate on one process: exact means without side effects."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clustertrain as ct
from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.core import seeds
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.evaluation.dataset_pass import DatasetPass
from clustertrain.train.evaluation.evaluator import MAX_SLICES, NO_SLICES, find_slices
from clustertrain.train.session.session import get_runtime

CPU = torch.device("cpu")
FEATURES, CLASSES = 4, 3


class Points:
    slice_names = ("even", "odd")

    def __init__(self, count: int = 11) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, FEATURES, generator=generator)
        self.y = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]

    def slice_of(self, i: int) -> int:
        return i % 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(FEATURES)
        self.norm, self.drop, self.head = nn.BatchNorm1d(FEATURES), nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head: torch.Tensor = self.head(self.drop(self.norm(self.frozen(x))))
        return head


def sum_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(target)


@pytest.fixture
def net(session: ct.Session) -> Net:
    model = session.parallelize(Net())
    assert isinstance(model, Net)
    model(Points().x)  # changes the running statistics
    model.frozen.eval()
    return model


@pytest.mark.parametrize("micro_batch", [1, 4, 11, 32])
def test_means_are_exact_for_any_micro_batch(session: ct.Session, net: Net, micro_batch: int) -> None:
    data = Points()
    values = session.evaluate(data, F.cross_entropy, metrics=["accuracy", "perplexity"], micro_batch=micro_batch)
    net.eval()
    with torch.no_grad():
        logits = net(data.x)
    for name, rows in (("", slice(None)), ("/even", slice(0, None, 2)), ("/odd", slice(1, None, 2))):
        loss = F.cross_entropy(logits[rows], data.y[rows])
        hits = (logits.argmax(-1) == data.y)[rows].float().mean()
        assert values[f"validation_loss{name}"] == pytest.approx(loss.item(), rel=1e-6)
        assert values[f"validation_accuracy{name}"] == pytest.approx(hits.item())
        assert values[f"validation_perplexity{name}"] == pytest.approx(loss.exp().item(), rel=1e-6)
    assert len(values) == 9


def state(net: Net) -> Any:
    return (
        [(n, m.training) for n, m in net.named_modules()],
        {k: v.clone() for k, v in net.state_dict().items()},
        [p.grad for p in net.parameters()],
    )


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_has_no_side_effects(session: ct.Session, net: Net, fails: bool) -> None:
    class Random(Points):
        def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.x[i] + torch.rand(1) + np.random.rand() + random.random(), self.y[i]

    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        assert not torch.is_grad_enabled() and not net.training and not output.requires_grad
        net.norm.running_mean += 1.0  # type: ignore[operator]
        if fails:
            raise RuntimeError("no")
        return sum_loss(output, target)

    before, generators = state(net), seeds.capture_rng_state(CPU)
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            session.evaluate(Random(), loss)
    else:
        assert session.evaluate(Random(), loss, micro_batch=32) == session.evaluate(Random(), loss, micro_batch=32)
    after = state(net)
    assert after[0] == before[0] and ("frozen", False) in after[0] and ("norm", True) in after[0]
    assert all(torch.equal(after[1][k], v) for k, v in before[1].items())
    assert after[2] == before[2]
    assert random.getstate()[1] == tuple(generators["python"][1].tolist())
    assert torch.equal(torch.get_rng_state(), generators["torch"])
    assert torch.is_grad_enabled()


def test_evaluate_accepts_a_custom_loader(session: ct.Session, net: Net) -> None:
    data = Points()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.x, data.y), batch_size=4)
    result = session.evaluate(loader, F.cross_entropy)
    assert result["validation_loss"] == pytest.approx(session.evaluate(data, F.cross_entropy)["validation_loss"])
    with pytest.raises(ConfigError, match="the validation data is empty"):
        session.evaluate(iter([]), F.cross_entropy)


def test_custom_metrics_and_fewer_samples(session: ct.Session, net: Net) -> None:
    def wrong(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output.argmax(-1) != target).sum(), len(target)

    values = session.evaluate(Points(), sum_loss, metrics={"error": wrong}, samples=5, workers=-1)
    expected = session.evaluate(Points(), sum_loss, metrics=["accuracy"], samples=5)
    assert values["validation_error"] == pytest.approx(1 - expected["validation_accuracy"])
    assert values["validation_loss"] == expected["validation_loss"]
    assert values["validation_loss"] != session.evaluate(Points(), sum_loss)["validation_loss"]


def test_all_targets_masked_raises(session: ct.Session, net: Net) -> None:
    with pytest.raises(ConfigError, match="has no targets: all targets"):
        session.evaluate(Points(), lambda output, target: (output.sum() * 0, 0))


def test_evaluate_without_model_or_samples_raises(session: ct.Session) -> None:
    with pytest.raises(UsageError, match=r"call session.parallelize\(model\) first, or pass model="):
        session.evaluate(Points(), sum_loss)
    with pytest.raises(ConfigError, match="the validation dataset is empty"):
        session.evaluate(Points(0), sum_loss, model=Net())
    assert "validation_loss" in session.evaluate(Points(), sum_loss, model=Net())


@pytest.mark.parametrize(("value", "message"), [(7, "sample 9: target is 7: must be between 0 and 2"), (-3, "is -3")])
def test_target_out_of_range_names_the_sample(session: ct.Session, net: Net, value: int, message: str) -> None:
    data = Points()
    data.y[9] = value
    with pytest.raises(ConfigError, match=message):
        session.evaluate(data, F.cross_entropy, limits=Limits(classes=CLASSES))


def test_nonfinite_validation_sample_is_named(session: ct.Session, net: Net) -> None:
    data = Points()
    data.x[5, 2] = math.nan
    with pytest.raises(ConfigError, match="sample 5: inputs holds nan"):
        session.evaluate(data, F.cross_entropy)


def test_layers_run_eagerly_before_the_compile_trial(session: ct.Session) -> None:
    layers = nn.ModuleList([nn.Linear(FEATURES, CLASSES)])

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)  # type: ignore[no-any-return]

    def fails(*args: Any) -> None:
        raise RuntimeError("no g++ here")

    session.parallelize(Stack())
    session.optimizer(torch.optim.SGD, lr=0.1)
    step: Any = get_runtime(session).state.train_step
    layers[0]._compiled_call_impl = fails  # what nn.Module.compile sets
    step._emit_event = lambda name, **fields: None  # as with parallel.compile, before the first step
    assert session.evaluate(Points(), F.cross_entropy)["validation_loss"] > 0
    assert layers[0]._compiled_call_impl is fails
    step._emit_event = None  # state after the trial
    with pytest.raises(RuntimeError, match="no g"):
        session.evaluate(Points(), F.cross_entropy)


def make_pass(rank: int, ranks: int, count: int = 11, **options: Any) -> DatasetPass:
    options = {"micro_batch": 2, "workers": 0, "seed": 1, **options}
    return DatasetPass(Points(count), rank=rank, ranks=ranks, device=CPU, **options)


@pytest.mark.parametrize(
    ("count", "ranks", "group"), [(11, 1, 1), (11, 2, 1), (11, 3, 1), (2, 4, 1), (11, 2, 3), (8, 3, 2)]
)
def test_each_sample_once_with_equal_rounds_on_all_ranks(count: int, ranks: int, group: int) -> None:
    parts = [list(make_pass(rank, ranks, count, group=group).indices()) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    seen = [i for round_ in zip(*parts, strict=True) for samples in round_ for i in samples]
    assert seen == list(range(count - count % group))
    assert all(len(samples) % group == 0 for part in parts for samples in part)


def test_padding_does_not_count() -> None:
    (portion,) = list(make_pass(3, 4, 5))
    assert portion.sample_indices == () and len(portion.batch[0]) == 1
    (full,) = list(make_pass(2, 4, 5, pad=True))
    assert full.sample_indices == (4,) and len(full.batch[0]) == 2


@pytest.mark.long
def test_workers_give_the_same_result(session: ct.Session, net: Net) -> None:
    results = [session.evaluate(Points(), sum_loss, micro_batch=3, workers=n) for n in (0, 2)]
    assert results[0] == results[1]


def test_too_few_samples_for_a_group_raise() -> None:
    with pytest.raises(ConfigError, match="has 5 samples, and the loss compares 8 with each other"):
        make_pass(0, 1, 5, group=8)


def test_find_slices_checks_names_and_limits_their_number() -> None:
    with pytest.raises(ConfigError, match=r"no slice 'evn'\n.*did you mean even"):
        find_slices(Points(), ("evn",))
    with pytest.raises(ConfigError, match=r"no slice 'even'\n.*slice_names and slice_of"):
        find_slices([1, 2], ("even",))
    slices = find_slices(Points(), ("odd",))
    assert slices.names == ("odd",) and [slices.index_of(i) for i in range(3)] == [-1, 0, -1]
    outside = Points()
    outside.slice_of = lambda i: 5  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="sample 1: slice_of returned 5, but slice_names has 2"):
        find_slices(outside, ("odd",)).index_of(1)
    many = Points()
    many.slice_names = tuple(map(str, range(MAX_SLICES + 1)))  # type: ignore[assignment]
    assert find_slices(many).names == () and find_slices(many, ("7",)).names == ("7",)


def test_grouped_samples_have_no_slices() -> None:
    class Halves:
        slice_names = ("a", "b")

        def slice_of(self, i: int) -> int:
            return i % 2

    assert find_slices(Halves()).names == ("a", "b")
    assert find_slices(Halves(), group=8) is NO_SLICES
    with pytest.raises(ConfigError, match="compares 8 samples with each other"):
        find_slices(Halves(), ["a"], 8)
