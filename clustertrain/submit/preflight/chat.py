"""Checks of chat data before submission: tokenizer, template and rows, as far as this machine can read them.

They do without the tokenizers library, which only the ranks need.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clustertrain import extras, reading
from clustertrain.config.chat.encode import build_template
from clustertrain.config.chat.rows import Conversation, list_chat_files, read_conversations, read_preferences
from clustertrain.config.chat.shards import check_chat_shards, check_no_shards, has_shards
from clustertrain.config.chat.template import ChatTemplate
from clustertrain.config.chat.tokenizer import check_vocabulary, load_tokenizer_files
from clustertrain.config.parsing import saved_datasets
from clustertrain.config.parsing.token_shards import load_index
from clustertrain.config.recipe import Recipe
from clustertrain.errors import ConfigError

MAX_CHECKED_BYTES = 64 * reading.MIB  # of the rows, in all files together: about a second
MAX_RENDERED_ROWS = 256


def check_tokenizer(recipe: Recipe, *, must_exist: bool) -> str | None:
    """Return a note if the tokenizer or the template is not on this machine.

    Args:
        must_exist: refuse that instead.

    Raises:
        ConfigError: a file is not usable, the tokenizer has more tokens than the model, or there is no template.
    """
    files = recipe.data_files
    for key in ("tokenizer", "chat_template"):
        path = files.get(key)
        if path is not None and not path.exists():
            label = f"data.{key} = {str(path)!r}"
            if must_exist:
                raise ConfigError(f"{label}: no such file or folder", fix="check the path")
            return f"{label} does not exist on this machine; every node of the job must see it"
    _load_template(recipe)
    return None


def _load_template(recipe: Recipe) -> ChatTemplate:
    files = recipe.data_files
    tokenizer = load_tokenizer_files(files["tokenizer"])
    if not recipe.model.entry:
        check_vocabulary(tokenizer, recipe.model.vocab_size)
    return build_template(tokenizer, files.get("chat_template"))


def check_rows(path: Path, label: str, recipe: Recipe) -> None:
    """Check the first rows at ``path``, which exists, and where the template puts the answers of some of them; of
    token shards, the index.

    Raises:
        ConfigError: there is no row, or one is not usable; the message names it.
    """
    has_tokenizer = all(
        recipe.data_files[key].exists() for key in ("tokenizer", "chat_template") if key in recipe.data_files
    )
    has_pairs = recipe.objective_kind == "dpo"
    if has_pairs:
        check_no_shards(path, label.partition(" =")[0])
    if has_shards(path):
        index = load_index(path)
        if has_tokenizer:
            check_chat_shards(
                path, index, load_tokenizer_files(recipe.data_files["tokenizer"]), label.partition(" =")[0]
            )
        return
    template = _load_template(recipe) if has_tokenizer else None
    remaining, rows, are_all_read = MAX_CHECKED_BYTES, 0, True
    for file in list_chat_files(path, label.partition(" =")[0]):
        arrow_files = saved_datasets.list_arrow_files(file, label.partition(" =")[0]) if file.is_dir() else []
        if remaining <= 0 or ((arrow_files or file.suffix == ".parquet") and not extras.is_installed("pyarrow")):
            are_all_read = False
            continue
        for conversations in _read_rows(file, remaining, has_pairs=has_pairs):
            if template is not None and rows < MAX_RENDERED_ROWS:
                for conversation in conversations:
                    template.find_answers(conversation)
            rows += 1
        remaining -= sum(part.stat().st_size for part in arrow_files or [file])
    if not rows and are_all_read:
        raise ConfigError(f"{label}: no conversation", fix="write one JSON object per line")


def _read_rows(file: Path, max_bytes: int, *, has_pairs: bool) -> Iterator[tuple[Conversation, ...]]:
    """Yield the conversations of each row: one, or the two of a pair."""
    if has_pairs:
        yield from ((pair.chosen, pair.rejected) for pair in read_preferences(file, max_bytes))
    else:
        yield from ((conversation,) for conversation in read_conversations(file, max_bytes))
