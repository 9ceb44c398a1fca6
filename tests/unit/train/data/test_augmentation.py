"""Images that are changed at random, the same way wherever they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from clustertrain.config.data import AugmentSpec
from clustertrain.errors import ConfigError
from clustertrain.train.data.augmentation import AugmentedImages
from clustertrain.train.data.images import LabelSlices

SIZE, COUNT = 12, 40


class Pictures(LabelSlices):
    """Image i: random bytes, the same each time; class i % 4."""

    name, version = "pictures", "1"

    def __init__(self, channels: int = 3) -> None:
        random = np.random.default_rng(0)
        self.pixels = torch.from_numpy(random.integers(0, 256, (COUNT, SIZE, SIZE, channels), dtype=np.uint8))
        self.labels = np.arange(COUNT) % 4

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.pixels[i], int(self.labels[i])


def drawn(seed: int, i: int = 3, channels: int = 3, **augment: Any) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(seed)
    found: tuple[torch.Tensor, Any] = AugmentedImages(Pictures(channels), AugmentSpec(**augment), classes=4)[i]
    return found


def test_a_crop_is_a_shifted_image_with_black_around_it() -> None:
    original = Pictures().pixels[3]
    padded = torch.nn.functional.pad(original, (0, 0, 2, 2, 2, 2))
    places = set()
    for seed in range(20):
        image, label = drawn(seed, crop=2)
        at = [(y, x) for y in range(5) for x in range(5) if torch.equal(image, padded[y : y + SIZE, x : x + SIZE])]
        assert len(at) == 1 and label == 3
        places.add(at[0])
    assert len(places) > 5


def test_a_flip_happens_every_other_time() -> None:
    original = Pictures().pixels[3]
    images = [drawn(seed, flip=True)[0] for seed in range(40)]
    flipped = sum(torch.equal(i, original.flip(1)) for i in images)
    assert flipped + sum(torch.equal(i, original) for i in images) == 40
    assert 10 < flipped < 30


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_change_and_stay_bytes(channels: int) -> None:
    original = Pictures(channels).pixels[3]
    image, _ = drawn(1, channels=channels, color=0.3)
    assert image.dtype == torch.uint8 and image.shape == original.shape
    difference = (image.float() - original.float()).abs()
    assert 1 < difference.mean() < 80


def test_images_of_two_channels_have_no_colour() -> None:
    with pytest.raises(ConfigError, match="images of 2 channels have no brightness"):
        drawn(1, channels=2, color=0.3)


def test_mixup_mixes_two_images_and_their_classes_in_one_proportion() -> None:
    pictures = Pictures()
    for seed in range(10):
        image, probabilities = drawn(seed, mixup=1.0)
        assert probabilities.shape == (4,) and probabilities.sum().item() == pytest.approx(1)
        share = float(probabilities[3])
        fits = [
            j
            for j in range(COUNT)
            if (image - (share * pictures.pixels[3] + (1 - share) * pictures.pixels[j])).abs().max() < 0.51
            and (probabilities[j % 4] > 1 - share - 1e-6)
        ]
        # A partner of the same class leaves the share open.
        assert fits or share == pytest.approx(1)


def test_what_is_drawn_depends_on_the_generator_alone() -> None:
    everything = {"crop": 2, "flip": True, "color": 0.4, "mixup": 0.4}
    one, again, other = drawn(5, **everything), drawn(5, **everything), drawn(6, **everything)
    assert torch.equal(one[0], again[0]) and torch.equal(one[1], again[1])
    assert not torch.equal(one[0], other[0])
