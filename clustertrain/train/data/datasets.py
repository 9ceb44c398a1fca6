"""What a recipe learns from and validates on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from torch import nn

from clustertrain.config import image_checks as known
from clustertrain.config.data import DIGITS, DataSpec
from clustertrain.config.image_checks import Known
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.train.core import entry_points
from clustertrain.train.data import validation_split
from clustertrain.train.data.augmentation import Augmented
from clustertrain.train.data.images import images
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.data.sample_reader import MapStyle
from clustertrain.train.data.text import BytePairs, ByteText
from clustertrain.train.data.token_shards import tokens


@dataclass(frozen=True)
class Datasets:
    """``validation`` is in an order of its own; None where the recipe keeps nothing apart."""

    train: MapStyle
    validation: MapStyle | None = None


def datasets(recipe: Recipe, limits: Limits) -> Datasets:
    """The data of ``recipe``, for a model that takes what is within ``limits``.

    Raises:
        ConfigError: it is not there, holds nothing, or is not what the model learns from.
        EnvironmentNotFit: a package that it needs is not installed.
    """
    data = recipe.data
    if recipe.data_kind == "tokens":
        train, validation = tokens(data, limits.vocab_size, recipe.objective.ignore_index)
        return Datasets(train, validation)
    train, validation = _one(recipe, data), None
    _check_filled(train, data.words)
    if recipe.data_kind == "images":
        _check_images(train, recipe, "path")
    if data.validation_path:
        validation = _one(recipe, msgspec.structs.replace(data, path=data.validation_path, validation_path=""))
        _check_filled(validation, f"data.validation_path = {data.validation_path!r}")
        if recipe.data_kind == "images":
            _check_images(validation, recipe, "validation_path")
            _check_same_classes(train, validation)
    elif data.validation:
        train, validation = validation_split.split(train, data.validation, data.words)
    if data.augment.any:
        classes = recipe.model.convnet.classes if not recipe.model.entry else limits.classes or _classes(train)
        train = Augmented(train, data.augment, classes)
    return Datasets(train, validation)


def _one(recipe: Recipe, data: DataSpec) -> Any:
    if recipe.data_kind == "own":
        return _own(data)
    if recipe.data_kind == "images":
        return images(data)
    if recipe.data_kind == "pairs" and data.path == DIGITS:
        from clustertrain.train.data.digits import DigitHalves

        return DigitHalves()
    return BytePairs(data) if recipe.data_kind == "pairs" else ByteText(data)


def _own(data: DataSpec) -> Any:
    """What ``data.entry`` makes of ``data.args``, and of ``path`` where one is given.

    Raises:
        ConfigError: there is no such function, it does not take the arguments, or what it returns is no map-style data
            set.
    """
    make = entry_points.function(data.entry, "data.entry")
    args = {**data.args, **({"path": data.path} if data.path else {})}
    entry_points.check_arguments(make, data.entry, args, "data.args")
    found = make(**args)
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigError(
            f"data.entry = {data.entry!r} returned {type(found).__name__}",
            fix="return a map-style data set, with __len__ and __getitem__; for a stream, list its parts by number",
        )
    if not isinstance(getattr(found, "version", None), str):
        return _Versioned(found, f"{data.entry} {args}")
    return found


class _Versioned:
    """A data set that says nothing of itself, under its recipe's words: other arguments make other data."""

    def __init__(self, whole: Any, version: str) -> None:
        self._whole = whole
        self.version = version

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, i: int) -> Any:
        return self._whole[i]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is unpickled, when it has no _whole yet
            raise AttributeError(name)
        return getattr(self._whole, name)


def limits_of(recipe: Recipe, model: nn.Module, *, own_loss: bool) -> Limits:
    """What ``model`` takes: of a built-in one from the recipe, of an entry from its attributes ``vocab_size``,
    ``classes`` and ``max_seq_len``, where it has them. Of an ``own_loss`` nothing is known of its targets."""
    spec = recipe.model
    counts_classes = recipe.objective_kind == "cross-entropy" and not own_loss
    vocabulary, classes = None, None
    names = ("model.vocab_size", "the model's number of classes")
    if spec.entry:
        vocabulary, classes = _whole(model, "vocab_size"), _whole(model, "classes")
        names = (f"vocab_size of {spec.entry}", f"classes of {spec.entry}")
    elif spec.kind == "convnet":
        classes, names = spec.convnet.classes, ("", "model.convnet.classes")
    else:
        vocabulary = spec.vocab_size
        classes = spec.vocab_size if spec.kind == "decoder" else None
        names = ("model.vocab_size", "model.vocab_size")
    longest = (_whole(model, "max_seq_len") if spec.entry else spec.max_seq_len) or 0
    if recipe.is_text and 0 < longest < recipe.data.seq_len:
        raise ConfigError(
            f"data.seq_len = {recipe.data.seq_len} is more than the model takes: max_seq_len = {longest}",
            fix=f"set data.seq_len = {longest} or less",
        )
    return Limits(
        vocab_size=vocabulary,
        classes=classes if counts_classes else None,
        max_seq_len=longest,
        ignore_index=recipe.objective.ignore_index,
        names=names,
    )


def _whole(model: nn.Module, name: str) -> int | None:
    value = getattr(model, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _classes(train: Any) -> int:
    found: int = getattr(train, "classes", 0) or len(train.slice_names)
    return found


def _check_filled(dataset: Any, words: str) -> None:
    if len(dataset) < 1:
        raise ConfigError(f"{words}: the data set is empty", fix="give one with samples")


def _check_images(dataset: Any, recipe: Recipe, key: str) -> None:
    known.check(recipe, key, Known(dataset.channels, dataset.classes))


def _check_same_classes(train: Any, validation: Any) -> None:
    """Classes are numbered in the order of their names, so another set of folders has other numbers."""
    if not set(validation.slice_names) <= set(train.slice_names) or (
        train.slice_names[: len(validation.slice_names)] != validation.slice_names
    ):
        raise ConfigError(
            f"data.validation_path has the classes {list(validation.slice_names)}, and data.path "
            f"{list(train.slice_names)}: their numbers would not be the same",
            fix="give both the same folders, also where one is empty",
        )
