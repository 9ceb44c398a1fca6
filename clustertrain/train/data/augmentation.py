"""Random augmentation of training images, with kornia.

Random numbers come from torch's generator, which the loader seeds with the sample's position in the run. An image
therefore changes in the same way for any number of ranks and workers, any micro-batch size, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clustertrain import extras
from clustertrain.config.data import AugmentSpec
from clustertrain.errors import ConfigError

Transform = Callable[[torch.Tensor], torch.Tensor]


class AugmentedImages:
    """Randomly augmented samples of ``images``: the image as bytes (height, width, channels), and its class.

    With mixup, the class is replaced by the fp32 class probabilities (classes,) of the two mixed images.

    The second image of a mix is drawn at random rather than taken from the micro-batch; otherwise results would depend
    on how the global batch is split.
    """

    def __init__(self, images: Any, spec: AugmentSpec, classes: int) -> None:
        """Wrap ``images``, whose labels are below ``classes``.

        Raises:
            UnsuitableEnvironment: kornia is not installed.
        """
        self.images = images
        self._spec = spec
        self._classes = classes
        self._transforms: list[Transform] | None = None
        self.name, self.version = images.name, images.version
        _import_kornia()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, Any]:
        image, label = self._augment(i)
        if self._spec.mixup == 0:
            return _to_uint8(image), label
        other, other_label = self._augment(int(torch.randint(len(self.images), ())))
        # Argument validation synchronizes and takes as long as the draw itself.
        lam = torch.distributions.Beta(self._spec.mixup, self._spec.mixup, validate_args=False).sample()
        probabilities = torch.zeros(self._classes)
        probabilities[label] += lam
        probabilities[other_label] += 1 - lam
        return _to_uint8(torch.lerp(other, image, lam)), probabilities

    def where(self, i: int) -> str:
        """Return a description of sample ``i``, from the underlying dataset if that has one."""
        describe = getattr(self.images, "where", None)
        return str(describe(i)) if callable(describe) else f"of {self.name}, randomly augmented"

    def _augment(self, i: int) -> tuple[torch.Tensor, int]:
        """Return the augmented image as fp32 (1, channels, height, width) in [0, 1], and its class."""
        image, label = self.images[i]
        pixels = image.permute(2, 0, 1)[None].float() / 255
        if self._transforms is None:
            self._transforms = _build_transforms(self._spec, pixels.shape)
        for transform in self._transforms:
            pixels = transform(pixels)
        return pixels, label


def _build_transforms(spec: AugmentSpec, shape: torch.Size) -> list[Transform]:
    """Return the transforms that ``spec`` enables, for images (1, channels, height, width)."""
    kornia = _import_kornia()
    _, channels, height, width = shape
    transforms: list[Transform] = []
    if spec.crop:
        transforms.append(kornia.RandomCrop((height, width), padding=spec.crop))
    if spec.flip:
        transforms.append(kornia.RandomHorizontalFlip(p=0.5))
    if spec.color and channels not in (1, 3):
        raise ConfigError(
            f"data.augment.color = {spec.color:g}: color jitter needs 1 or 3 channels, and the images have {channels}",
            fix="leave it out, or use images with 1 or 3 channels",
        )
    if spec.color:
        transforms.append(kornia.ColorJitter(spec.color, spec.color, spec.color, 0.0))
    return transforms


def _to_uint8(image: torch.Tensor) -> torch.Tensor:
    """Return the image as bytes, a quarter of the fp32 transfer to the device."""
    return (image[0].permute(1, 2, 0) * 255).round().clamp(0, 255).to(torch.uint8)


def _import_kornia() -> Any:
    extras.require("kornia.augmentation", "data.augment", alternative="remove the table")
    import kornia.augmentation

    return kornia.augmentation
