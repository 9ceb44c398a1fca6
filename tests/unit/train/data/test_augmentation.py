"""Image augmentation, which depends only on the generator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clustertrain.config.data import AugmentSpec
from clustertrain.errors import ConfigError
from clustertrain.train.data.augmentation import AugmentedImages
from clustertrain.train.data.images import LabelSlices

pytestmark = pytest.mark.long  # as the import of kornia

SIZE, COUNT = 12, 40


class Pictures(LabelSlices):
    """Random but fixed images; image i has class i % 4."""

    name, version = "pictures", "1"

    def __init__(self, channels: int = 3) -> None:
        random = np.random.default_rng(0)
        self.pixels = torch.from_numpy(random.integers(0, 256, (COUNT, SIZE, SIZE, channels), dtype=np.uint8))
        self.labels = np.arange(COUNT) % 4

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.pixels[i], int(self.labels[i])


def augmented(seed: int, i: int = 3, channels: int = 3, **augment: Any) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(seed)
    sample: tuple[torch.Tensor, Any] = AugmentedImages(Pictures(channels), AugmentSpec(**augment), classes=4)[i]
    return sample


@pytest.mark.long
def test_crop_shifts_the_image_with_black_padding() -> None:
    original = Pictures().pixels[3]
    padded = torch.nn.functional.pad(original, (0, 0, 2, 2, 2, 2))
    offsets = set()
    for seed in range(20):
        image, label = augmented(seed, crop=2)
        matches = [(y, x) for y in range(5) for x in range(5) if torch.equal(image, padded[y : y + SIZE, x : x + SIZE])]
        assert len(matches) == 1 and label == 3
        offsets.add(matches[0])
    assert len(offsets) > 5


def test_flip_has_probability_one_half() -> None:
    original = Pictures().pixels[3]
    images = [augmented(seed, flip=True)[0] for seed in range(40)]
    flipped = sum(torch.equal(i, original.flip(1)) for i in images)
    assert flipped + sum(torch.equal(i, original) for i in images) == 40
    assert 10 < flipped < 30


@pytest.mark.parametrize("channels", [1, 3])
def test_color_jitter_keeps_bytes(channels: int) -> None:
    original = Pictures(channels).pixels[3]
    image, _ = augmented(1, channels=channels, color=0.3)
    assert image.dtype == torch.uint8 and image.shape == original.shape
    difference = (image.float() - original.float()).abs()
    assert 1 < difference.mean() < 80


def test_color_jitter_of_two_channels_raises() -> None:
    with pytest.raises(ConfigError, match="needs 1 or 3 channels, and the images have 2"):
        augmented(1, channels=2, color=0.3)


def test_mixup_weighs_images_and_classes_alike() -> None:
    pictures = Pictures()
    for seed in range(10):
        image, probabilities = augmented(seed, mixup=1.0)
        assert probabilities.shape == (4,) and probabilities.sum().item() == pytest.approx(1)
        weight = float(probabilities[3])
        fits = [
            j
            for j in range(COUNT)
            if (image - (weight * pictures.pixels[3] + (1 - weight) * pictures.pixels[j])).abs().max() < 0.51
            and (probabilities[j % 4] > 1 - weight - 1e-6)
        ]
        # With a partner of the same class the weight cannot be recovered.
        assert fits or weight == pytest.approx(1)


def test_augmentation_depends_only_on_the_generator() -> None:
    options = {"crop": 2, "flip": True, "color": 0.4, "mixup": 0.4}
    first, again, other = augmented(5, **options), augmented(5, **options), augmented(6, **options)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
