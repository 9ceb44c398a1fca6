"""Targets that do not belong to their inputs."""

from __future__ import annotations

import pytest
import torch

from clustertrain.diagnose.checks import label_alignment
from clustertrain.diagnose.checks.data import assess_shift, assess_slip


def tokens(count: int = 8, length: int = 40) -> torch.Tensor:
    return torch.randint(50, (count, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shift", [-2, 0, 1, 2])
def test_the_shift_of_tokens_is_found(shift: int) -> None:
    long = tokens(length=46)
    inputs, targets = long[:, 3:43], long[:, 3 + shift : 43 + shift]
    assert label_alignment.find_token_shift(inputs, targets, -100) == shift


def test_masked_targets_do_not_count_and_other_targets_have_no_shift() -> None:
    long = tokens(length=41)
    inputs, targets = long[:, :-1], long[:, 1:].clone()
    targets[:, :30] = -100
    assert label_alignment.find_token_shift(inputs, targets, -100) == 1
    assert label_alignment.find_token_shift(inputs, torch.full_like(inputs, -100), -100) is None
    assert label_alignment.find_token_shift(inputs, tokens().flip(1), -100) is None


def test_copying_is_wrong_unless_the_loss_is_the_models_own() -> None:
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


def clouds(noise: float, slip: int = 0, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    centres = torch.randn(classes, 12, generator=random)
    labels = torch.randint(classes, (400,), generator=random)
    points = centres[labels] + noise * torch.randn(400, 12, generator=random)
    return points, labels.roll(slip)


@pytest.mark.parametrize("slip", [1, -1, 2])
def test_labels_that_have_slipped_are_found_with_their_slip(slip: int) -> None:
    found = label_alignment.measure_agreement(*clouds(0.5, slip))
    assert found is not None and found.slip == slip
    [(verdict, text, _)] = assess_slip(found)
    assert verdict == "fail" and label_alignment.format_slip(slip) in text


@pytest.mark.parametrize(("noise", "expected"), [(0.5, 0), (1.5, 0), (50.0, None)])
def test_sound_labels_are_left_alone_however_hard_they_are_to_tell(noise: float, expected: int | None) -> None:
    found = label_alignment.measure_agreement(*clouds(noise))
    assert found is not None and found.slip == expected and assess_slip(found) == []


def test_numbers_as_targets_are_told_by_their_correlation() -> None:
    points, _ = clouds(1.0)
    targets = points @ torch.linspace(-1, 1, 12)
    sound, slipped = (
        label_alignment.measure_agreement(points, targets),
        label_alignment.measure_agreement(points, targets.roll(1)),
    )
    assert sound is not None and sound.slip == 0
    assert slipped is not None and slipped.slip == 1


def test_too_few_samples_and_one_class_say_nothing() -> None:
    points, labels = clouds(0.5)
    assert label_alignment.measure_agreement(points[:20], labels[:20]) is None
    assert label_alignment.measure_agreement(points, torch.zeros_like(labels)) is None
