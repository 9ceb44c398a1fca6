"""Checks of a recipe's data before submission. They read indexes, headers, sizes and names, of samples only chats."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from clustertrain import extras
from clustertrain.config.checks import image_checks, slice_checks
from clustertrain.config.checks.image_checks import ImageDatasetInfo
from clustertrain.config.data import BUILT_IN_DATASETS, DIGITS, DataKind
from clustertrain.config.parsing import foreign_shards, saved_datasets, token_shards
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.submit.prepared_run import PreparedRun


def check_data(prepared: PreparedRun) -> str | None:
    """Return a note if the data is not on this machine: on a cluster it may be on the nodes' disks.

    Raises:
        ConfigError: the data is empty or does not match the recipe, or the local backend would run without it.
    """
    recipe = prepared.spec.recipe
    if prepared.spec.script is not None:
        return None
    train_path, validation_path = recipe.data_path, recipe.validation_path
    note = None
    if recipe.data_kind == "chat":
        note = _check_tokenizer(recipe, must_exist=prepared.backend.name == "local")
    if (
        train_path
        and validation_path
        and train_path.exists()
        and validation_path.exists()
        and train_path.samefile(validation_path)
    ):
        raise ConfigError(
            f"data.validation_path = {str(validation_path)!r} is the training data: it is the same file as"
            f" data.path = {str(train_path)!r}",
            fix="give another path, or set data.validation instead",
        )
    for key, path in (("path", train_path), ("validation_path", validation_path)):
        if path is None:
            continue
        if path.exists():
            check_kind = _CHECKS.get(recipe.data_kind)
            if check_kind is not None:
                check_kind(path, f"data.{key} = {str(path)!r}", recipe)
            continue
        if prepared.backend.name == "local":
            is_prefix = path.with_name(f"{path.name}{foreign_shards.MEGATRON_SUFFIX}").exists()
            raise ConfigError(
                f"data.{key} = {str(path)!r}: no such file or folder",
                fix=f"add {foreign_shards.MEGATRON_SUFFIX}" if is_prefix else "check the path",
            )
        return f"data.{key} = {str(path)!r} does not exist on this machine; every node of the job must see it"
    return note


def check_epoch_size(prepared: PreparedRun) -> str | None:
    """Return a note if a global batch exceeds the number of training samples, as far as that is known here."""
    recipe, batch = prepared.spec.recipe, prepared.plan.batch.global_batch
    if prepared.spec.script is not None:
        return None
    if recipe.data.samples:
        return _note_large_batch(recipe, batch, str(recipe.data.samples), recipe.data.samples)
    samples = count_samples(recipe)
    if samples is None:
        return None
    is_single_file = recipe.data_path is not None and recipe.data_path.is_file()
    is_upper_bound = recipe.data_kind in ("text", "pairs") and recipe.data.path != DIGITS and not is_single_file
    qualifier = "at most " if is_upper_bound else "about " if recipe.data.validation else ""
    samples = round(samples * (1 - recipe.data.validation))
    return _note_large_batch(recipe, batch, f"{qualifier}{samples}", samples)


def _note_large_batch(recipe: Recipe, batch: int, formatted: str, samples: int) -> str | None:
    if batch <= samples:
        return None
    default, *_ = BUILT_IN_DATASETS.get(recipe.data_kind, ("",))
    source = (
        recipe.data.description if recipe.data.path or recipe.data.entry else f"data.path = {default!r}, the default"
    )
    return (
        f"train.global_batch = {batch} is more than all samples of {source}, {formatted}: each step "
        "repeats some of them and covers more than an epoch"
    )


def count_samples(recipe: Recipe) -> int | None:
    """Return the number of samples including validation; for a folder of text, an upper bound.

    None if counting them would require reading the data.
    """
    kind, path, data = recipe.data_kind, recipe.data_path, recipe.data
    if kind == "images" or (kind == "pairs" and data.path == DIGITS):
        is_file = path is not None and path.is_file()
        info = (
            _read_image_header(path, f"data.path = {str(path)!r}")
            if path and is_file
            else image_checks.BUILT_IN_IMAGES.get(data.path)
        )
        return info.samples if info is not None else None
    if data.pack or (path is not None and not path.exists()):
        return None
    if kind in ("text", "pairs") and not (path is not None and saved_datasets.is_saved_dataset(path)):
        size_bytes = (
            path.stat().st_size if path is not None and path.is_file() else data.max_bytes
        )  # of all files together
        # The target of a byte of text is the next byte, so the last byte has none.
        return (min(size_bytes, data.max_bytes) - (kind == "text")) // recipe.tokens_per_sample
    if path is None:
        return None
    if kind == "tokens" and not saved_datasets.is_saved_dataset(path):
        token_counts = [shard.tokens for shard in foreign_shards.load_shards(path)[1].shards]
        known_counts = [n for n in token_counts if n is not None]
        return (sum(known_counts) - 1) // data.seq_len if len(known_counts) == len(token_counts) else None
    return None


def _check_shards(folder: Path, label: str, recipe: Recipe) -> None:
    if saved_datasets.is_saved_dataset(folder):
        _check_saved_tokens(folder, label, recipe)
        return
    _, index = foreign_shards.load_shards(folder)
    if not recipe.model.entry:
        token_shards.check_vocabulary(folder, index, recipe.model.vocab_size)
    token_counts = [shard.tokens for shard in index.shards]
    known_counts = [n for n in token_counts if n is not None]
    if not recipe.data.pack and len(known_counts) == len(token_counts) and sum(known_counts) <= recipe.data.seq_len:
        raise ConfigError(
            f"{label}: {sum(known_counts)} tokens are less than one sample of data.seq_len = {recipe.data.seq_len} and"
            " the token after it",
            fix="lower data.seq_len or give more text",
        )


def _check_saved_tokens(folder: Path, label: str, recipe: Recipe) -> None:
    """Check the files, the columns and the first rows of a saved data set, if pyarrow is here."""
    key = label.partition(" =")[0]
    saved_datasets.list_arrow_files(folder, key)
    if not extras.is_installed("pyarrow"):
        return
    from clustertrain.config.parsing.saved_tokens import iter_token_rows  # not at the top: NumPy is slow

    first = next((rows for rows in iter_token_rows(folder, key) if len(rows.ends)), None)
    if first is None:
        raise ConfigError(f"{label}: no rows", fix="choose a data set with rows")
    largest = int(first.ids.max()) if len(first.ids) else 0
    if not recipe.model.entry and largest >= recipe.model.vocab_size:
        raise ConfigError(
            f"{label}: the token {largest}, but model.vocab_size = {recipe.model.vocab_size} allows tokens up to "
            f"{recipe.model.vocab_size - 1}",
            fix=f"set model.vocab_size = {largest + 1} or more, or tokenize the text again",
        )


def _check_saved_text(folder: Path, label: str) -> None:
    key, column = label.partition(" =")[0], saved_datasets.TEXT_COLUMN
    saved_datasets.list_arrow_files(folder, key)
    if extras.is_installed("pyarrow") and column not in (names := saved_datasets.read_columns(folder, key)):
        raise saved_datasets.missing_columns(folder, names, (column,), key)


def _check_text(path: Path, label: str, recipe: Recipe) -> None:
    if saved_datasets.is_saved_dataset(path):
        _check_saved_text(path, label)
        return
    sample_bytes = recipe.tokens_per_sample + (recipe.data_kind == "text")  # the target of a byte is the next byte
    if path.is_file() and path.stat().st_size < sample_bytes:
        raise ConfigError(
            f"{label}: {path.stat().st_size} bytes are less than one sample of {sample_bytes}",
            fix="lower data.seq_len or give more text",
        )
    if recipe.data.max_bytes < sample_bytes:
        raise ConfigError(
            f"data.max_bytes = {recipe.data.max_bytes} is less than one sample of {sample_bytes} bytes",
            fix="lower data.seq_len or raise data.max_bytes",
        )
    pattern = recipe.data.pattern
    if path.is_dir() and not any(
        Path(parent, name).match(pattern) for parent, _, names in os.walk(path) for name in names
    ):
        raise ConfigError(f"{label}: no file fits data.pattern = {pattern!r}", fix="give the pattern of its files")


def _check_tokenizer(recipe: Recipe, *, must_exist: bool) -> str | None:
    from clustertrain.submit.preflight import chat  # jinja2 and numpy, which other recipes do without here

    return chat.check_tokenizer(recipe, must_exist=must_exist)


def _check_chat(path: Path, label: str, recipe: Recipe) -> None:
    from clustertrain.submit.preflight import chat

    chat.check_rows(path, label, recipe)


def _read_image_header(path: Path, label: str) -> ImageDatasetInfo:
    """Return the shape of the images in an ``.npz`` file, from its header.

    Raises:
        ConfigError: the file does not contain images.
    """
    from numpy.lib import format as npy  # not at the top: slower than the rest of the command line

    try:
        with zipfile.ZipFile(path) as file, file.open("images.npy") as array:
            version = npy.read_magic(array)
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, _ = read_header(array)
        count, _, _, channels = shape
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise ConfigError(
            f"{label}: not an .npz file with images (count, height, width, channels): {e}",
            fix="make it with numpy.savez(path, images=..., labels=...)",
        ) from e
    return ImageDatasetInfo(channels, None, count)


def _check_images(path: Path, label: str, recipe: Recipe) -> None:
    key = "path" if path == recipe.data_path else "validation_path"
    if not path.is_dir():
        image_checks.check_images(recipe, key, _read_image_header(path, label))
        return
    classes = sorted(inner.name for inner in path.iterdir() if inner.is_dir())
    if not classes:
        raise ConfigError(f"{label}: no images in folders of classes below it", fix="make a folder for each class")
    image_checks.check_images(recipe, key, ImageDatasetInfo(3, len(classes)))
    if path == (recipe.validation_path or recipe.data_path):
        try:
            slice_checks.check_slices(recipe, classes)
        except ValueError as e:
            raise ConfigError(str(e), fix=f"name folders of {path}") from e


_CHECKS: Mapping[DataKind, Callable[[Path, str, Recipe], None]] = {
    "tokens": _check_shards,
    "chat": _check_chat,
    "text": _check_text,
    "pairs": _check_text,
    "images": _check_images,
}
