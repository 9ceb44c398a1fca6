"""Metrics as sums and counts, compared with known values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clustertrain.errors import ConfigError
from clustertrain.train.evaluation.metrics import build_metrics, compute_target_rank, compute_terms

LOGITS = torch.randn(6, 4, 9, generator=torch.Generator().manual_seed(1))
CLASSES = torch.randint(0, 9, (6, 4), generator=torch.Generator().manual_seed(2))


def compute_value(name: str, output: Any, target: Any, ignored: int = -100) -> float:
    metric = build_metrics([name])[0]
    total, count = compute_terms(metric, output, target, ignored)
    return metric.finalize(float(total) / float(count))


def test_accuracy_matches_argmax() -> None:
    expected = (LOGITS.argmax(-1) == CLASSES).float().mean().item()
    assert compute_value("accuracy", LOGITS, CLASSES) == pytest.approx(expected)
    torch_order = LOGITS.movedim(-1, 1)
    assert compute_value("accuracy", torch_order, CLASSES) == pytest.approx(expected)


def test_top5_matches_topk() -> None:
    expected = (LOGITS.topk(5).indices == CLASSES.unsqueeze(-1)).any(-1).float().mean().item()
    assert compute_value("top5", LOGITS, CLASSES) == pytest.approx(expected)


def test_ignored_targets_do_not_count() -> None:
    masked = CLASSES.clone()
    masked[:, 2:] = -1
    for name in ("accuracy", "top5", "perplexity", "bits_per_token"):
        assert compute_value(name, LOGITS, masked, -1) == pytest.approx(
            compute_value(name, LOGITS[:, :2], CLASSES[:, :2])
        ), name


def test_perplexity_and_bits_use_plain_cross_entropy() -> None:
    nats = F.cross_entropy(LOGITS.flatten(0, 1), CLASSES.flatten()).item()
    assert compute_value("perplexity", LOGITS, CLASSES) == pytest.approx(math.exp(nats))
    assert compute_value("bits_per_token", LOGITS, CLASSES) == pytest.approx(nats / math.log(2))
    assert build_metrics(["perplexity"])[0].finalize(1e4) == math.inf


def test_constant_and_nan_logits_do_not_count_as_hits() -> None:
    classes = torch.arange(10)
    assert compute_value("accuracy", torch.zeros(10, 10), classes) == pytest.approx(0.1)
    assert compute_value("top5", torch.zeros(10, 10), classes) == pytest.approx(0.5)
    assert compute_value("accuracy", torch.full((10, 10), math.nan), classes) == 0.0
    assert compute_target_rank(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2])).tolist() == [1]


def test_binary_accuracy() -> None:
    logits, targets = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert compute_value("accuracy", logits, targets) == 0.5


def test_recall_counts_both_directions() -> None:
    similar = torch.tensor([[[3.0, 1.0], [4.0, 2.0]]])  # one of two rows and one of two columns are right
    assert compute_value("recall_at_1", similar, torch.arange(2)) == 0.5
    first = torch.eye(3)
    assert compute_value("recall_at_1", (first, first * 7), torch.arange(3)) == 1.0


def test_mae_and_rmse() -> None:
    output, target = torch.tensor([[1.0], [5.0]]), torch.tensor([2.0, 2.0])
    assert compute_value("mae", output, target) == 2.0
    assert compute_value("rmse", output, target) == pytest.approx(math.sqrt(5.0))


@pytest.mark.parametrize(
    ("name", "output", "target", "message"),
    [
        ("accuracy", torch.zeros(4, 3), torch.zeros(5, dtype=torch.long), "accuracy needs logits .*int64 \\(5,\\)"),
        ("perplexity", torch.zeros(4, 3), torch.zeros(4), "perplexity needs logits"),
        ("recall_at_1", torch.zeros(4, 3), torch.zeros(4), "recall_at_1 needs similarities"),
        ("mae", torch.zeros(4, 3), torch.zeros(4), "mae needs as many outputs as targets"),
        ("rmse", (torch.zeros(4),), torch.zeros(4), "rmse needs .*output is \\(float32 \\(4,\\)\\)"),
    ],
    ids=["accuracy", "perplexity", "recall", "mae", "rmse"],
)
def test_incompatible_outputs_raise(name: str, output: Any, target: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        compute_value(name, output, target)
    assert "a custom function" in str(caught.value)


def test_unknown_metric_raises() -> None:
    with pytest.raises(ConfigError, match=r"unknown metric 'acuracy'\n.*did you mean accuracy"):
        build_metrics(["acuracy"])
    with pytest.raises(ConfigError, match="is reserved"):
        build_metrics({"loss": lambda output, target: (output.sum(), 1)})
    custom = build_metrics({"zeros": lambda output, target: ((output == 0).sum(), output.numel())})[0]
    assert float(custom.terms(torch.tensor([0.0, 1.0]), None, -100)[0]) == 1.0
