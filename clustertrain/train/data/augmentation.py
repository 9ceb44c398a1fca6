"""Random changes of training images, by kornia.

What is drawn comes from torch's generator, which the loader seeds by the sample's position in the run: so an image is
changed in the same way on any number of ranks and workers, in other micro-batches, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clustertrain.config.data import AugmentSpec
from clustertrain.errors import ConfigError, UnsuitableEnvironment

Transform = Callable[[torch.Tensor], torch.Tensor]


class AugmentedImages:
    """Sample i is that of ``images``, changed: bytes (height, width, channels) again, and the class; with mixup the
    class probabilities (classes,) fp32 of the two images that were mixed.

    Each image is mixed with another one that is drawn for it, and not with its neighbour in the micro-batch: otherwise
    what is learned would depend on how the global batch is cut up.
    """

    def __init__(self, images: Any, spec: AugmentSpec, classes: int) -> None:
        """``classes`` of the model. Raises UnsuitableEnvironment without kornia."""
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
        # Without its own arguments' check, which synchronises and takes as long as the draw.
        lam = torch.distributions.Beta(self._spec.mixup, self._spec.mixup, validate_args=False).sample()
        probabilities = torch.zeros(self._classes)
        probabilities[label] += lam
        probabilities[other_label] += 1 - lam
        return _to_uint8(torch.lerp(other, image, lam)), probabilities

    def where(self, i: int) -> str:
        describe = getattr(self.images, "where", None)
        return str(describe(i)) if callable(describe) else f"of {self.name}, changed at random"

    def _augment(self, i: int) -> tuple[torch.Tensor, int]:
        """(1, channels, height, width) fp32 from 0 to 1, and the class."""
        image, label = self.images[i]
        pixels = image.permute(2, 0, 1)[None].float() / 255
        if self._transforms is None:
            self._transforms = _build_transforms(self._spec, pixels.shape)
        for transform in self._transforms:
            pixels = transform(pixels)
        return pixels, label


def _build_transforms(spec: AugmentSpec, shape: torch.Size) -> list[Transform]:
    """Of images (1, channels, height, width)."""
    kornia = _import_kornia()
    _, channels, height, width = shape
    transforms: list[Transform] = []
    if spec.crop:
        transforms.append(kornia.RandomCrop((height, width), padding=spec.crop))
    if spec.flip:
        transforms.append(kornia.RandomHorizontalFlip(p=0.5))
    if spec.color and channels not in (1, 3):
        raise ConfigError(
            f"data.augment.color = {spec.color:g}: images of {channels} channels have no brightness that is known",
            fix="leave it out, or give images of 1 or 3 channels",
        )
    if spec.color:
        transforms.append(kornia.ColorJitter(spec.color, spec.color, spec.color, 0.0))
    return transforms


def _to_uint8(image: torch.Tensor) -> torch.Tensor:
    """A quarter of what floats would take to the device."""
    return (image[0].permute(1, 2, 0) * 255).round().clamp(0, 255).to(torch.uint8)


def _import_kornia() -> Any:
    try:
        import kornia.augmentation
    except ImportError as e:
        raise UnsuitableEnvironment(
            "data.augment: random changes of images are kornia's, which is not installed",
            fix="pip install 'clustertrain[augment]', or leave the table out",
        ) from e
    return kornia.augmentation
