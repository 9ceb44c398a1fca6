"""Training and validation datasets of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from clustertrain.config.checks import image_checks
from clustertrain.config.checks.image_checks import SHAPES, ImageDatasetInfo
from clustertrain.config.data import DIGITS, DataSpec
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.train.core import entry_points
from clustertrain.train.data import validation_split
from clustertrain.train.data.augmentation import AugmentedImages
from clustertrain.train.data.chat import build_chat_datasets
from clustertrain.train.data.digits import DigitHalves, DigitImages
from clustertrain.train.data.images import ImageArrays, ImageDataset, ImageFolder, Shapes
from clustertrain.train.data.sample_checks import Limits
from clustertrain.train.data.sample_reader import MapStyleDataset
from clustertrain.train.data.streams.source import StreamSource, open_source
from clustertrain.train.data.text import BytePairs, ByteText
from clustertrain.train.data.token_shards import build_token_datasets

_SHARD_ARGUMENTS = ("data_rank", "data_ranks")


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run."""

    train: MapStyleDataset | StreamSource
    validation: MapStyleDataset | None = None
    """Validation samples in a fixed order; None if the recipe has none."""


def build_datasets(recipe: Recipe, limits: Limits, shard: tuple[int, int] = (0, 1)) -> Datasets:
    """Build the datasets of ``recipe``, for a model that accepts inputs within ``limits``.

    Args:
        shard: the data-parallel rank and their number, for an entry that opens a part of a stream.

    Raises:
        ConfigError: a dataset is missing, empty or unsuitable for the model.
        UnsuitableEnvironment: a required package is not installed.
    """
    data = recipe.data
    if recipe.data_kind == "tokens":
        train, validation = build_token_datasets(data, limits.vocab_size, recipe.objective.ignore_index)
        return Datasets(train, validation)
    if recipe.data_kind == "chat":
        train, validation = build_chat_datasets(recipe, limits.vocab_size)
        return Datasets(train, validation)
    train, validation = _build_dataset(recipe, data, shard), None
    if isinstance(train, StreamSource):
        _check_stream(recipe)
    else:
        _check_not_empty(train, data.description)
    if recipe.data_kind == "images":
        _check_images(train, recipe, "path")
    if data.validation_path:
        validation = _build_dataset(
            recipe, msgspec.structs.replace(data, path=data.validation_path, validation_path=""), shard
        )
        if isinstance(validation, StreamSource):
            raise ConfigError(
                f"data.validation_path = {data.validation_path!r}: {data.entry} returned a stream",
                fix="return map-style validation data, such as a list of samples",
            )
        _check_not_empty(validation, f"data.validation_path = {data.validation_path!r}")
        if recipe.data_kind == "images":
            _check_images(validation, recipe, "validation_path")
            _check_same_classes(train, validation)
    elif data.validation:
        train, validation = validation_split.split(train, data.validation, data.description)
    if data.augment.is_enabled:
        classes = recipe.model.convnet.classes if not recipe.model.entry else limits.classes or _count_classes(train)
        train = AugmentedImages(train, data.augment, classes)
    return Datasets(train, validation)


def _check_stream(recipe: Recipe) -> None:
    """Raise ConfigError for keys that need samples addressable by index."""
    data = recipe.data
    for is_set, key, fix in (
        (data.validation, f"data.validation = {data.validation:g}", "set data.validation_path"),
        (data.workers > 0, f"data.workers = {data.workers}", "set 0, and read ahead in the stream itself"),
        (recipe.stability.can_roll_back, "a rollback (stability)", 'use "skip", "warn" or "stop" instead'),
        (recipe.contract.resume == "exact", "contract.resume = 'exact'", 'set "elastic"'),
    ):
        if is_set:
            raise ConfigError(
                f"{key} requires map-style data, but data.entry = {data.entry!r} returned a stream", fix=fix
            )


def _build_dataset(recipe: Recipe, data: DataSpec, shard: tuple[int, int]) -> Any:
    if recipe.data_kind == "custom":
        return _build_from_entry(data, shard)
    if recipe.data_kind == "images":
        return build_image_dataset(data)
    if recipe.data_kind == "pairs" and data.path == DIGITS:
        return DigitHalves()
    return BytePairs(data) if recipe.data_kind == "pairs" else ByteText(data)


def build_image_dataset(spec: DataSpec) -> ImageDataset:
    """Return the dataset at ``data.path``: ``shapes``, ``digits``, an ``.npz`` file, or a folder of class subfolders.

    Raises:
        ConfigError: the path is none of these, or its contents are invalid.
        UnsuitableEnvironment: a folder needs Pillow, or ``digits`` needs scikit-learn, which is not installed.
    """
    if spec.path in ("", SHAPES):
        return Shapes(spec.image_size)
    if spec.path == DIGITS:
        return DigitImages()
    path = Path(spec.path).expanduser()
    if path.is_dir():
        return ImageFolder(path, spec.image_size)
    if path.is_file():
        return ImageArrays(path)
    raise ConfigError(
        f"data.path = {spec.path!r}: no such file or folder",
        fix="use a path that every node can read; 'shapes' needs no file",
    )


def _build_from_entry(data: DataSpec, shard: tuple[int, int]) -> Any:
    """Call ``data.entry`` with ``data.args``, and with ``path`` if it is set.

    An entry with the arguments ``data_rank`` and ``data_ranks`` opens a part of a stream, and gets ``shard``.

    Raises:
        ConfigError: there is no such function, it does not accept the arguments, or its result is neither a map-style
            dataset nor iterable.
    """
    factory = entry_points.load_function(data.entry, "data.entry")
    args = {**data.args, **({"path": data.path} if data.path else {})}
    parts = dict(zip(_SHARD_ARGUMENTS, shard, strict=True))
    is_sharded = entry_points.has_parameters(factory, _SHARD_ARGUMENTS) and not args.keys() & parts.keys()
    entry_points.check_arguments(factory, data.entry, {**args, **(parts if is_sharded else {})}, "data.args")

    def build() -> Any:
        return factory(**args, **(parts if is_sharded else {}))

    dataset = build()
    version = getattr(dataset, "version", None)
    if not isinstance(version, str):
        version = f"{data.entry} {args}"
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        if is_sharded:
            raise ConfigError(
                f"data.entry = {data.entry!r} takes {' and '.join(_SHARD_ARGUMENTS)} and returned map-style data",
                fix="remove these arguments: map-style data is divided among the ranks by position",
            )
        return dataset if getattr(dataset, "version", None) == version else _VersionedDataset(dataset, version)
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"data.entry = {data.entry!r} returned {type(dataset).__name__}",
            fix="return a map-style dataset with __len__ and __getitem__, or a stream of samples with __iter__",
        )
    return open_source(dataset, build, f"data.entry = {data.entry!r}", version, is_sharded=is_sharded)


class _VersionedDataset:
    """Wrapper that gives a dataset a version made of its entry and arguments: other arguments mean other data."""

    def __init__(self, dataset: Any, version: str) -> None:
        self._dataset = dataset
        self.version = version

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> Any:
        return self._dataset[i]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # unpickling looks up attributes before _dataset exists
            raise AttributeError(name)
        return getattr(self._dataset, name)


def build_limits(recipe: Recipe, model: nn.Module, *, has_model_loss: bool) -> Limits:
    """Return the input limits of ``model``.

    They come from the recipe for a built-in model, and from the attributes ``vocab_size``, ``classes`` and
    ``max_seq_len`` (where present) for an entry, or from the ``config`` of a model of transformers. With
    ``has_model_loss`` the meaning of the targets is unknown, so they have no limit.
    """
    spec = recipe.model
    targets_are_classes = recipe.objective_kind == "cross-entropy" and not has_model_loss
    vocab_size, classes = None, None
    names = ("model.vocab_size", "the model's number of classes")
    if spec.entry:
        vocab_size, classes = _int_attribute(model, "vocab_size"), _int_attribute(model, "classes")
        names = (f"vocab_size of {spec.entry}", f"classes of {spec.entry}")
    elif spec.kind == "convnet":
        classes, names = spec.convnet.classes, ("", "model.convnet.classes")
    else:
        vocab_size = spec.vocab_size
        classes = spec.vocab_size if spec.kind == "decoder" else None
        names = ("model.vocab_size", "model.vocab_size")
    max_seq_len = (_int_attribute(model, "max_seq_len") if spec.entry else spec.max_seq_len) or 0
    if recipe.is_text and 0 < max_seq_len < recipe.data.seq_len:
        raise ConfigError(
            f"data.seq_len = {recipe.data.seq_len} exceeds the model's max_seq_len = {max_seq_len}",
            fix=f"set data.seq_len = {max_seq_len} or less",
        )
    return Limits(
        vocab_size=vocab_size,
        classes=classes if targets_are_classes else None,
        max_seq_len=max_seq_len,
        ignore_index=recipe.objective.ignore_index,
        needs_document_starts=recipe.attends_in_documents,
        names=names,
    )


_CONFIG_NAMES = {"max_seq_len": "max_position_embeddings"}


def _int_attribute(model: nn.Module, name: str) -> int | None:
    value = getattr(model, name, None)
    if value is None:  # a model of transformers
        value = getattr(getattr(model, "config", None), _CONFIG_NAMES.get(name, name), None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count_classes(train: Any) -> int:
    count: int = getattr(train, "classes", 0) or len(train.slice_names)
    return count


def _check_not_empty(dataset: Any, source: str) -> None:
    if len(dataset) < 1:
        raise ConfigError(f"{source}: the dataset is empty", fix="choose a dataset with samples")


def _check_images(dataset: Any, recipe: Recipe, key: str) -> None:
    image_checks.check_images(recipe, key, ImageDatasetInfo(dataset.channels, dataset.classes))


def _check_same_classes(train: Any, validation: Any) -> None:
    """Raise ConfigError if a class would get different numbers in the two datasets: numbers follow the sorted names."""
    if not set(validation.slice_names) <= set(train.slice_names) or (
        train.slice_names[: len(validation.slice_names)] != validation.slice_names
    ):
        raise ConfigError(
            f"data.validation_path has the classes {list(validation.slice_names)} and data.path "
            f"{list(train.slice_names)}: their class numbers would differ",
            fix="create the same class folders in both, even if one is empty",
        )
