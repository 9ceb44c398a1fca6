"""Handwritten digits shipped with scikit-learn: 1797 images of 8 x 8 pixels, real data without a download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from clustertrain import extras
from clustertrain.config.checks.slice_checks import BUILT_IN_CLASSES, class_slices
from clustertrain.config.data import DIGIT_HALF_PIXELS, DIGITS
from clustertrain.train.data.images import LabelSlices

_MAX_PIXEL = 16


def _load_digits() -> tuple[Any, Any]:
    """Return (images (1797, 8, 8) with values 0 to 16, classes)."""
    extras.require("sklearn.datasets", f"data.path = {DIGITS!r}")
    return _read_digits()


@functools.cache
def _read_digits() -> tuple[Any, Any]:
    # The training and the validation data set share the arrays, so nothing may change them.
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, classes = digits.images.astype(np.uint8), digits.target
    images.flags.writeable = classes.flags.writeable = False
    return images, classes


class DigitImages(LabelSlices):
    """Samples (image, class), the image as bytes (8, 8, 1)."""

    name = f"data.path = {DIGITS!r}"
    version = f"{DIGITS} 1"
    classes = BUILT_IN_CLASSES
    channels = 1
    slice_names = class_slices(BUILT_IN_CLASSES)

    def __init__(self) -> None:
        """Load the images.

        Raises:
            UnsuitableEnvironment: scikit-learn is not installed.
        """
        images, self.labels = _load_digits()
        self._images = (images.astype(np.float32) * (255 / _MAX_PIXEL)).round().astype(np.uint8)[..., None]

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self._images[i]), int(self.labels[i])


class DigitHalves(LabelSlices):
    """Samples ((upper, lower), i): the two halves of an image as int64 tokens (32,) with values 0 to 16.

    A two-tower model learns which halves belong together.
    """

    name = f"data.path = {DIGITS!r}"
    version = f"{DIGITS} 1, halves"
    slice_names = class_slices(BUILT_IN_CLASSES)

    def __init__(self) -> None:
        """Load the images.

        Raises:
            UnsuitableEnvironment: scikit-learn is not installed.
        """
        images, self.labels = _load_digits()
        self._pixels = torch.from_numpy(images.reshape(len(images), 2 * DIGIT_HALF_PIXELS).astype(np.int64))

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, i: int) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        pixels = self._pixels[i]
        return (pixels[:DIGIT_HALF_PIXELS], pixels[DIGIT_HALF_PIXELS:]), i
