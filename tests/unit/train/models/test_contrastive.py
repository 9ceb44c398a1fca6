"""The contrastive loss compared with its definitions in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clustertrain.errors import ConfigError, UsageError
from clustertrain.train.models.contrastive import ContrastiveLoss, embed, row_losses


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean(summed: tuple[torch.Tensor, int]) -> float:
    return float(summed[0]) / summed[1]


def normalized(t: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(t.double(), dim=-1)


def test_views_match_equation_1_of_the_paper() -> None:
    first, second, temperature = random(4, 8), random(4, 8, seed=2), 0.2
    z = normalized(torch.cat([first, second]))
    s = (z @ z.T / temperature).exp()
    pair = [(i + 4) % 8 for i in range(8)]
    pair_losses = [-torch.log(s[i, pair[i]] / (s[i].sum() - s[i, i])) for i in range(8)]
    expected = float(torch.stack(pair_losses).mean())
    assert mean(ContrastiveLoss(temperature)((first, second), None)) == pytest.approx(expected, rel=1e-5)


def test_towers_average_both_directions() -> None:
    first, second, scale = random(3, 8), random(3, 8, seed=2), torch.tensor([5.0])
    s = (normalized(first) @ normalized(second).T * 5).exp()
    expected = -(s.diag() / s.sum(1)).log().mean() / 2 - (s.diag() / s.sum(0)).log().mean() / 2
    assert mean(ContrastiveLoss()((first, second, scale), None)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("scale", [(), (torch.tensor([4.0]),)], ids=["views", "towers"])
def test_groups_are_independent(scale: tuple[torch.Tensor, ...]) -> None:
    first, second, loss = random(16, 8), random(16, 8, seed=2), ContrastiveLoss(group=8)
    whole = loss((first, second, *scale), None)
    parts = [loss((first[i : i + 8], second[i : i + 8], *scale), None) for i in (0, 8)]
    assert whole[1] == 16 and float(whole[0]) == pytest.approx(sum(float(p[0]) for p in parts), rel=1e-6)
    assert float(ContrastiveLoss()((first, second, *scale), None)[0]) > float(whole[0])
    with pytest.raises(ConfigError, match="12 does not divide into groups of 8"):
        loss((first[:12], second[:12], *scale), None)


@pytest.mark.parametrize("scale", [(), (torch.tensor([4.0]),)], ids=["views", "towers"])
def test_rows_of_parts_are_those_of_the_whole(scale: tuple[torch.Tensor, ...]) -> None:
    loss, ids = ContrastiveLoss(ids_in_targets=True), torch.tensor([0, 1, 2, 3, 4, 1])
    whole = embed(loss, (random(6, 8), random(6, 8, seed=2), *scale), ids)
    rows = row_losses(whole, whole)
    parts = [row_losses(whole.with_rows(whole.pack()[i : i + 2], ids[i : i + 2]), whole, i) for i in (0, 2, 4)]
    assert torch.allclose(torch.cat(parts), rows, rtol=1e-6)


@pytest.mark.parametrize("scale", [(), (torch.tensor([1e4]),)], ids=["views", "towers"])
def test_duplicates_are_no_negatives(scale: tuple[torch.Tensor, ...]) -> None:
    first, second, loss = torch.eye(2), torch.eye(2).flip(0), ContrastiveLoss(1e-4, ids_in_targets=True)
    assert float(loss((first, second, *scale), torch.arange(2))[0]) == pytest.approx(2e4)  # finite
    assert float(loss((first, second, *scale), torch.tensor([5, 5]))[0]) == 0
    with pytest.raises(ConfigError, match="as many int64 ids"):
        loss((first, second, *scale), torch.zeros(2))


@pytest.mark.parametrize(
    "output",
    [
        random(4, 8), (random(4, 8),), (random(4, 8), random(4, 7)), (random(4, 8), random(4, 8), random(4)),
        (random(4, 8, 2), random(4, 8, 2)), (random(4, 8), None),
    ],
)  # fmt: skip
def test_other_outputs_raise(output: Any) -> None:
    with pytest.raises(ConfigError, match="did not return a pair of embeddings"):
        ContrastiveLoss()(output, None)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"group": 1}, {"group": -2}])
def test_invalid_options_raise(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ContrastiveLoss(**options)
