"""Classified images: generated shapes, scikit-learn's digits, an array file, or a folder per class."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from clustertrain import extras
from clustertrain.config.checks.image_checks import SHAPES
from clustertrain.config.checks.slice_checks import class_slices
from clustertrain.errors import ConfigError
from clustertrain.train.core.seeds import derive_seed

_MAX_STAT_FILES = 1000  # files of a folder whose sizes are part of its version
_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class ImageDataset(Protocol):
    """Interface of image datasets: sample i is (image, class), the image as bytes (height, width, channels).

    Classes are the slices that an evaluation reports on.
    """

    name: str
    version: str
    classes: int
    """Number of classes; each label is below it."""
    channels: int
    labels: Any
    """Class of each sample, shape (samples,)."""
    slice_names: tuple[str, ...]

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> tuple[torch.Tensor, int]: ...
    def slice_of(self, i: int, /) -> int: ...


def _chebyshev_norm(x: FloatArray, y: FloatArray) -> FloatArray:
    return np.maximum(abs(x), abs(y))


# Predicates for points inside the shape; coordinates are relative to its center, in units of its radius.
_SHAPE_MASKS: tuple[Callable[[FloatArray, FloatArray], BoolArray], ...] = (
    lambda x, y: x**2 + y**2 < 1,  # disc
    lambda x, y: _chebyshev_norm(x, y) < 0.85,  # square
    lambda x, y: abs(x) + abs(y) < 1.1,  # diamond
    lambda x, y: abs(np.hypot(x, y) - 0.8) < 0.25,  # ring
    lambda x, y: abs(_chebyshev_norm(x, y) - 0.75) < 0.2,  # frame
    lambda x, y: (np.minimum(abs(x), abs(y)) < 0.3) & (_chebyshev_norm(x, y) < 1),  # upright cross
    lambda x, y: (np.minimum(abs(x + y), abs(x - y)) < 0.4) & (_chebyshev_norm(x, y) < 1),  # diagonal cross
    lambda x, y: (abs(x) < (y + 1) / 2) & (y < 1),  # triangle
    lambda x, y: (np.floor(2.5 * y) % 2 == 0) & (_chebyshev_norm(x, y) < 1),  # rows
    lambda x, y: (np.floor(2.5 * x) % 2 == 0) & (_chebyshev_norm(x, y) < 1),  # columns
)


class LabelSlices:
    """Slices by class, for datasets with ``labels`` (samples,)."""

    labels: Any

    def slice_of(self, i: int) -> int:
        """Return the slice number of sample ``i``."""
        return int(self.labels[i])


class Shapes(LabelSlices):
    """Ten generated shapes with random positions, sizes and colors, plus noise.

    Each image is a pure function of its index, so all ranks see the same dataset.
    """

    name = f"data.path = {SHAPES!r}"
    classes = len(_SHAPE_MASKS)
    channels = 3
    slice_names = class_slices(len(_SHAPE_MASKS))

    def __init__(self, size: int, samples: int = 50_000) -> None:
        self._size = size
        self._samples = samples
        self.labels = np.arange(samples) % self.classes
        self.version = f"{SHAPES} 1, {size} x {size}"

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        label = i % self.classes
        rng = np.random.default_rng(derive_seed(0, SHAPES, i))
        center_y, center_x = rng.uniform(0.4, 0.6, 2) * self._size
        radius = rng.uniform(0.25, 0.4) * self._size
        rows, columns = np.mgrid[: self._size, : self._size] + 0.5
        inside = _SHAPE_MASKS[label]((columns - center_x) / radius, (rows - center_y) / radius)
        dark, light = rng.uniform(0, 110, 3), rng.uniform(145, 255, 3)
        image = np.where(inside[:, :, None], light, dark) + rng.normal(0, 15, (self._size, self._size, 3))
        return torch.from_numpy(np.clip(image, 0, 255).astype(np.uint8)), label


class ImageArrays(LabelSlices):
    """Contents of an ``.npz`` file, in memory: ``images`` (count, height, width, channels) as bytes and ``labels``
    (count,)."""

    def __init__(self, path: Path) -> None:
        """Load the file without unpickling.

        Raises:
            ConfigError: the file is not an archive with these arrays.
        """
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                self._images, labels = file["images"], file["labels"]
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
            raise ConfigError(f"data.path = {str(path)!r}: not an .npz file with images and labels: {e}") from e
        images = self._images
        if images.dtype != np.uint8 or images.ndim != 4 or not len(images):
            raise ConfigError(
                f"{path}: images are {images.dtype} {images.shape}", fix="store uint8 (count, height, width, channels)"
            )
        if labels.shape != (len(images),) or labels.dtype.kind not in "iu" or labels.min() < 0:
            raise ConfigError(
                f"{path}: labels are {labels.dtype} {labels.shape} for {len(images)} images",
                fix="store one integer >= 0 per image",
            )
        self.name = f"data.path = {str(path)!r}"
        self.labels = labels
        self.classes = int(labels.max()) + 1
        self.channels = int(images.shape[3])
        self.slice_names = class_slices(self.classes)
        digest = xxhash.xxh3_64(np.ascontiguousarray(images).data)
        digest.update(np.ascontiguousarray(labels).data)
        self.version = f"xxh3:{digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self._images[i]), int(self.labels[i])


class ImageFolder(LabelSlices):
    """A folder with one subfolder per class; classes are numbered in order of their names.

    Images are loaded as RGB, scaled so that the shorter side fits, and center-cropped.
    """

    channels = 3

    def __init__(self, path: Path, size: int) -> None:
        """List the image files below ``path``.

        Raises:
            ConfigError: there are no class folders with images.
            UnsuitableEnvironment: Pillow is not installed.
        """
        extras.require("PIL.ImageOps", f"data.path = {str(path)!r}", alternative="store the images in an .npz file")
        from PIL import Image, ImageOps

        self._open, self._fit, self._size = Image.open, ImageOps.fit, size
        folders = sorted(p for p in path.iterdir() if p.is_dir())
        self._files = [
            (file, label)
            for label, folder in enumerate(folders)
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in _SUFFIXES
        ]
        self.name = f"data.path = {str(path)!r}"
        self.classes = len(folders)
        self.slice_names = tuple(p.name for p in folders)
        if not self._files:
            raise ConfigError(f"{self.name}: no images found in class subfolders")
        self.labels = np.array([label for _, label in self._files])
        self.version = self._compute_version(path)

    def _compute_version(self, root: Path) -> str:
        """Return a hash of all file names and some sizes; reading all sizes takes minutes on a parallel file system."""
        digest = xxhash.xxh3_64("\n".join(str(f.relative_to(root)) for f, _ in self._files).encode())
        step = -(-len(self._files) // _MAX_STAT_FILES)
        digest.update(repr([f.stat().st_size for f, _ in self._files[::step]]).encode())
        return f"xxh3 of names and sizes: {digest.hexdigest()}, {self._size} x {self._size}"

    def where(self, i: int) -> str:
        """Return the path of sample ``i``."""
        return str(self._files[i][0])

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        """Load image ``i``.

        Raises:
            ConfigError: the file is not an image.
        """
        file, label = self._files[i]
        try:
            with self._open(file) as raw_image:
                image: ByteArray = np.array(self._fit(raw_image.convert("RGB"), (self._size, self._size)))
        except (OSError, SyntaxError, ValueError) as e:  # raised by Pillow's decoders
            if isinstance(e, OSError) and e.errno is not None:
                raise  # a file system error
            raise ConfigError(f"{file}: not an image: {e}", fix="remove it from the data") from e
        return torch.from_numpy(image), label
