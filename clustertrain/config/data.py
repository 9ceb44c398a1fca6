"""The ``[data]`` table: what is learned from, how it is read, and what is kept apart to validate on."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from clustertrain.config.checks.ranges import check_entry, check_positive, check_range

MAX_AUTO_WORKERS = 8  # more workers of one rank rarely read faster
DIGITS = "digits"
# By kind the data that is no file; no path at all means the first.
BUILT_IN_DATASETS = {"images": ("shapes", DIGITS), "pairs": ("stdlib", DIGITS), "text": ("stdlib",)}
DIGIT_HALF_PIXELS = 32  # pixels of half a digit, and so tokens of each passage of a pair

DataKind = Literal["auto", "text", "pairs", "images", "tokens", "own"]


class AugmentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[data.augment]`` table: random changes of training images, the same whatever the number of ranks."""

    crop: int = 0  # padded by so many pixels and cut back to size at a random place
    flip: bool = False  # left and right, every other time
    color: float = 0.0  # brightness, contrast and saturation change by up to this share
    mixup: float = 0.0  # alpha of arXiv 1710.09412: each image is mixed with another one; 0: none

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise ValueError(f"crop = {self.crop}: must be 0 or more pixels")
        check_range("color", self.color, 0.0, 1.0)
        check_range("mixup", self.mixup, 0.0, 10.0)

    @property
    def is_enabled(self) -> bool:
        return self != AugmentSpec()


class DataSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Byte-level text, pairs of passages of it, tokens, images with classes, or a data set of one's own.

    Of text ``path`` is a file, or a folder read recursively for ``pattern``; ``stdlib`` is the Python standard
    library's own source. Of pairs it may be ``digits`` too: the upper and lower halves of images. Of tokens it is a
    folder of shards (:mod:`clustertrain.config.parsing.token_shards`). Of images it is an ``.npz`` file or a folder
    with a folder for each class; ``shapes`` are drawn, ``digits`` are scikit-learn's. An entry gets it as an argument
    ``path``, as it stands here.
    """

    kind: DataKind = "auto"  # what the kind of the model learns from; for an entry: text
    path: str = ""  # stdlib or shapes
    pattern: str = "*.py"
    entry: str = ""  # kind own: "package.module:function", called with args, returns a map-style data set
    args: dict[str, Any] = {}
    seq_len: int = 256  # tokens of a sample; of a pair: of each passage
    pack: bool = False  # tokens: whole documents in a sample, padded; else samples are cut from the stream of tokens
    max_bytes: int = 64 * 1024 * 1024
    image_size: int = 32  # height and width; those in an .npz file have their own
    augment: AugmentSpec = AugmentSpec()
    validation: float = 0.0  # this share is kept apart, the same one whatever the seed; 0: none
    validation_path: str = ""  # or other data of the same kind
    workers: int = 0  # processes of each rank that read ahead; -1: as many as its cores allow (READERS at most)
    prefetch: int = 2  # micro-batches that each of them holds ready

    def __post_init__(self) -> None:
        for name in ("seq_len", "max_bytes", "image_size", "prefetch"):
            check_positive(name, getattr(self, name))
        if self.workers < -1:
            raise ValueError(f"workers = {self.workers}: must be 0 (none) or more, or -1 (as many as the cores allow)")
        check_range("validation", self.validation, 0.0, 0.9)
        if self.validation and self.validation_path:
            raise ValueError("validation and validation_path: give one of them")
        if self.entry:
            check_entry(self.entry)
        if (self.kind == "own") != bool(self.entry):
            raise ValueError("kind = 'own' and entry go together: the entry names the function that makes the data set")
        if self.args and not self.entry:
            raise ValueError("args are those of an entry, and there is none")

    @property
    def description(self) -> str:
        """How messages name it."""
        return f"data.entry = {self.entry!r}" if self.entry else f"data.path = {self.path!r}"

    @property
    def has_validation(self) -> bool:
        return bool(self.validation or self.validation_path)
