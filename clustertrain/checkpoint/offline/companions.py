"""Files beside the weights of a pretrained model that an export needs as well: tokenizer, chat template, generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustertrain import reading
from clustertrain.config.recipe import Recipe

NAMES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_token_ids(recipe: Recipe) -> dict[str, Any]:
    """Return the ids of special tokens from ``config.json`` in ``model.init``; empty without that file."""
    folder = _find_model_folder(recipe)
    try:
        document = reading.read_json(folder / "config.json") if folder is not None else None
    except (OSError, ValueError):
        return {}
    return {key: document[key] for key in _TOKEN_IDS if key in document} if isinstance(document, dict) else {}


def copy_files(recipe: Recipe, output: Path) -> list[str]:
    """Copy what is there of :data:`NAMES` to ``output``, and return the names.

    The data's tokenizer takes precedence over the one in ``model.init``. Files that cannot be read are left out: the
    weights are complete without them.
    """
    copied = []
    for name in NAMES:
        for source in _list_sources(recipe, name):
            try:
                content = reading.read_bytes(source)
            except OSError:
                continue
            (output / name).write_bytes(content)
            copied.append(name)
            break
    return copied


def _list_sources(recipe: Recipe, name: str) -> Iterator[Path]:
    tokenizer, folder = Path(recipe.data.tokenizer), _find_model_folder(recipe)
    if tokenizer.is_absolute() and (tokenizer.is_dir() or name == "tokenizer.json"):
        yield tokenizer / name if tokenizer.is_dir() else tokenizer
    if folder is not None:
        yield folder / name


def _find_model_folder(recipe: Recipe) -> Path | None:
    """Return the folder of ``model.init`` if it is one of transformers, not a checkpoint."""
    init = Path(recipe.model.init)
    folder = init if init.is_dir() else init.parent
    return folder if init.is_absolute() and not (folder / "manifest.json").exists() else None
