"""What can be told of a recipe's data before the queue. Nothing of it is read but an index, sizes and names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from clustertrain.errors import ConfigError
from clustertrain.launch.request import Prepared
from clustertrain.spec import shards, slices
from clustertrain.spec.data import DataKind
from clustertrain.spec.recipe import Recipe


def check(prepared: Prepared) -> str | None:
    """A note where the data is not here: on a cluster it may be on the nodes' own disks.

    Raises:
        ConfigError: this machine would train on it; it is here and empty, or not what the recipe says.
    """
    recipe = prepared.spec.recipe
    if prepared.spec.script is not None:
        return None
    for key, path in (("path", recipe.data_path), ("validation_path", recipe.validation_path)):
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


def _shards(folder: Path, said: str, recipe: Recipe) -> None:
    index = shards.read_index(folder)
    if not recipe.model.entry:
        shards.check_vocabulary(folder, index, recipe.model.vocab_size)
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
    pattern = recipe.data.pattern
    if path.is_dir() and not any(Path(at, name).match(pattern) for at, _, names in os.walk(path) for name in names):
        raise ConfigError(f"{said}: no file fits data.pattern = {pattern!r}", fix="give the pattern of its files")


def _images(path: Path, said: str, recipe: Recipe) -> None:
    if not path.is_dir():
        return
    classes = sorted(inner.name for inner in path.iterdir() if inner.is_dir())
    if not classes:
        raise ConfigError(f"{said}: no images in folders of classes below it", fix="make a folder for each class")
    if path == (recipe.validation_path or recipe.data_path):
        try:
            slices.check(recipe, classes)
        except ValueError as e:
            raise ConfigError(str(e), fix=f"name folders of {path}") from e


_LOOKS: Mapping[DataKind, Callable[[Path, str, Recipe], None]] = {
    "tokens": _shards,
    "text": _text,
    "pairs": _text,
    "images": _images,
}
