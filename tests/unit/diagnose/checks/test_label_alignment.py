"""Detection of targets that do not match their inputs."""

from __future__ import annotations

import pytest
import torch

from clustertrain.diagnose.checks import label_alignment
from clustertrain.diagnose.checks.data import assess_shift, assess_slip


def tokens(count: int = 8, length: int = 40) -> torch.Tensor:
    return torch.randint(50, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shift", [-2, 0, 1, 2])
def test_token_shift_is_found(shift: int) -> None:
    long = tokens(length=46)
    inputs, targets = long[:, 3:43], long[:, 3 + shift : 43 + shift]
    assert label_alignment.find_token_shift(inputs, targets, -100) == shift


def test_token_shift_ignores_masked_and_unrelated_targets() -> None:
    long = tokens(length=41)
    inputs, targets = long[:, :-1], long[:, 1:].clone()
    targets[:, :30] = -100
    assert label_alignment.find_token_shift(inputs, targets, -100) == 1
    assert label_alignment.find_token_shift(inputs, torch.full_like(inputs, -100), -100) is None
    assert label_alignment.find_token_shift(inputs, tokens().flip(1), -100) is None


def test_shift_zero_fails_unless_the_model_defines_the_loss() -> None:
    assert (
        assess_shift(1, has_model_loss=False)
        == assess_shift(None, has_model_loss=False)
        == assess_shift(0, has_model_loss=True)
        == []
    )
    [(verdict, text, _)] = assess_shift(0, has_model_loss=False)
    assert verdict == "fail" and "copy" in text
    [(verdict, text, _)] = assess_shift(2, has_model_loss=True)
    assert verdict == "fail" and "2 tokens ahead" in text


def gaussian_clusters(noise: float, slip: int = 0, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    centers = torch.randn(classes, 12, generator=random)
    labels = torch.randint(classes, (400,), generator=random)
    points = centers[labels] + noise * torch.randn(400, 12, generator=random)
    return points, labels.roll(slip)


@pytest.mark.parametrize("slip", [1, -1, 2])
def test_shifted_labels_fail_with_their_slip(slip: int) -> None:
    agreement = label_alignment.measure_agreement(*gaussian_clusters(0.5, slip))
    assert agreement is not None and agreement.slip == slip
    [(verdict, text, _)] = assess_slip(agreement)
    assert verdict == "fail" and label_alignment.format_slip(slip) in text


@pytest.mark.parametrize(("noise", "expected"), [(0.5, 0), (1.5, 0), (50.0, None)])
def test_correct_labels_pass_at_any_noise(noise: float, expected: int | None) -> None:
    agreement = label_alignment.measure_agreement(*gaussian_clusters(noise))
    assert agreement is not None and agreement.slip == expected and assess_slip(agreement) == []


def test_numeric_targets_are_compared_by_correlation() -> None:
    points, _ = gaussian_clusters(1.0)
    targets = points @ torch.linspace(-1, 1, 12)
    aligned, shifted = (
        label_alignment.measure_agreement(points, targets),
        label_alignment.measure_agreement(points, targets.roll(1)),
    )
    assert aligned is not None and aligned.slip == 0
    assert shifted is not None and shifted.slip == 1


def test_too_few_samples_or_one_class_give_no_agreement() -> None:
    points, labels = gaussian_clusters(0.5)
    assert label_alignment.measure_agreement(points[:20], labels[:20]) is None
    assert label_alignment.measure_agreement(points, torch.zeros_like(labels)) is None
