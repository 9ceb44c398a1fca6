"""What can be told of a recipe's data before the queue. Only an index, headers, sizes and names are read of it."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from clustertrain.config import image_checks, slice_checks, token_shards
from clustertrain.config.data import BUILT_IN, DIGITS, DataKind
from clustertrain.config.image_checks import Known
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError
from clustertrain.submit.request import Prepared


def check(prepared: Prepared) -> str | None:
    """A note where the data is not here: on a cluster it may be on the nodes' own disks.

    Raises:
        ConfigError: this machine would train on it; it is here and empty, or not what the recipe says.
    """
    recipe = prepared.spec.recipe
    if prepared.spec.script is not None:
        return None
    learned, apart = recipe.data_path, recipe.validation_path
    if learned and apart and learned.exists() and apart.exists() and learned.samefile(apart):
        raise ConfigError(
            f"data.validation_path = {str(apart)!r} is what is learned from: it is data.path = {str(learned)!r}",
            fix="give others, or data.validation",
        )
    for key, path in (("path", learned), ("validation_path", apart)):
        if path is None:
            continue
        if path.exists():
            look = _LOOKS.get(recipe.data_kind)
            if look is not None:
                look(path, f"data.{key} = {str(path)!r}", recipe)
            continue
        if prepared.backend.name == "local":
            raise ConfigError(f"data.{key} = {str(path)!r}: no such file or folder", fix="give one that is there")
        return f"data.{key} = {str(path)!r} is not there on this machine; every node of the job must see it"
    return None


def epoch(prepared: Prepared) -> str | None:
    """A note where a global batch is more than all samples to learn from, as far as their number is known here."""
    recipe, batch = prepared.spec.recipe, prepared.plan.batch.global_batch
    samples = _samples(recipe) if prepared.spec.script is None else None
    if samples is None:
        return None
    of_file = recipe.data_path is not None and recipe.data_path.is_file()
    at_most = recipe.data_kind in ("text", "pairs") and recipe.data.path != DIGITS and not of_file
    about = "at most " if at_most else "about " if recipe.data.validation else ""
    samples = round(samples * (1 - recipe.data.validation))
    if batch <= samples:
        return None
    default, *_ = BUILT_IN.get(recipe.data_kind, ("",))
    words = recipe.data.words if recipe.data.path or recipe.data.entry else f"data.path = {default!r}, the default"
    return (
        f"train.global_batch = {batch} is more than all samples of {words}, {about}{samples}: each step "
        "learns from some of them more than once, and is more than an epoch"
    )


def _samples(recipe: Recipe) -> int | None:
    """How many there are, of several files of text at most, with those kept apart; None where that takes more than a
    look."""
    kind, path, data = recipe.data_kind, recipe.data_path, recipe.data
    if kind == "images" or (kind == "pairs" and data.path == DIGITS):
        here = path is not None and path.is_file()
        found = _arrays(path, f"data.path = {str(path)!r}") if path and here else image_checks.KNOWN.get(data.path)
        return found.samples if found is not None else None
    if data.pack or (path is not None and not path.exists()):
        return None
    if kind in ("text", "pairs"):
        there = path.stat().st_size if path is not None and path.is_file() else data.max_bytes  # of all files together
        # Of text each byte's target is the next one, which the last one does not have.
        return (min(there, data.max_bytes) - (kind == "text")) // recipe.tokens_per_sample
    if path is None:
        return None
    if kind == "tokens":
        counts = [shard.tokens for shard in token_shards.read_index(path).shards]
        known = [n for n in counts if n is not None]
        return (sum(known) - 1) // data.seq_len if len(known) == len(counts) else None
    return None


def _shards(folder: Path, said: str, recipe: Recipe) -> None:
    index = token_shards.read_index(folder)
    if not recipe.model.entry:
        token_shards.check_vocabulary(folder, index, recipe.model.vocab_size)
    counts = [shard.tokens for shard in index.shards]
    known = [n for n in counts if n is not None]
    if not recipe.data.pack and len(known) == len(counts) and sum(known) <= recipe.data.seq_len:
        raise ConfigError(
            f"{said}: {sum(known)} tokens are less than one sample of data.seq_len = {recipe.data.seq_len} and the "
            "token after it",
            fix="lower data.seq_len or give more text",
        )


def _text(path: Path, said: str, recipe: Recipe) -> None:
    needed = recipe.tokens_per_sample + (recipe.data_kind == "text")  # each byte's target is the next one
    if path.is_file() and path.stat().st_size < needed:
        raise ConfigError(
            f"{said}: {path.stat().st_size} bytes are less than one sample of {needed}",
            fix="lower data.seq_len or give more text",
        )
    if recipe.data.max_bytes < needed:
        raise ConfigError(
            f"data.max_bytes = {recipe.data.max_bytes} is less than one sample of {needed} bytes",
            fix="lower data.seq_len or raise data.max_bytes",
        )
    pattern = recipe.data.pattern
    if path.is_dir() and not any(Path(at, name).match(pattern) for at, _, names in os.walk(path) for name in names):
        raise ConfigError(f"{said}: no file fits data.pattern = {pattern!r}", fix="give the pattern of its files")


def _arrays(path: Path, said: str) -> Known:
    """What the header of the images in an ``.npz`` file says.

    Raises:
        ConfigError: it is none.
    """
    from numpy.lib import format as npy  # not at the top: it costs more than the rest of the command line

    try:
        with zipfile.ZipFile(path) as file, file.open("images.npy") as array:
            version = npy.read_magic(array)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, _ = read(array)
        count, _, _, channels = shape
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise ConfigError(
            f"{said}: not an .npz file with images (count, height, width, channels): {e}",
            fix="make it with numpy.savez(path, images=..., labels=...)",
        ) from e
    return Known(channels, None, count)


def _images(path: Path, said: str, recipe: Recipe) -> None:
    key = "path" if path == recipe.data_path else "validation_path"
    if not path.is_dir():
        image_checks.check(recipe, key, _arrays(path, said))
        return
    classes = sorted(inner.name for inner in path.iterdir() if inner.is_dir())
    if not classes:
        raise ConfigError(f"{said}: no images in folders of classes below it", fix="make a folder for each class")
    image_checks.check(recipe, key, Known(3, len(classes)))
    if path == (recipe.validation_path or recipe.data_path):
        try:
            slice_checks.check(recipe, classes)
        except ValueError as e:
            raise ConfigError(str(e), fix=f"name folders of {path}") from e


_LOOKS: Mapping[DataKind, Callable[[Path, str, Recipe], None]] = {
    "tokens": _shards,
    "text": _text,
    "pairs": _text,
    "images": _images,
}
