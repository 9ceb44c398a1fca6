"""``data tokenize``: convert text and conversations to token shards."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import json_option, print_json

if TYPE_CHECKING:
    from clustertrain.config.parsing.token_shards import TokenDtype


@click.group()
def data() -> None:
    """Prepare data before a run: token shards."""


@data.command(short_help="Convert text or conversations to token shards.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="New folder for the shards.",
)
@click.option(
    "--pattern", metavar="GLOB", default="*", show_default=True, help="Glob pattern of the files in a folder."
)
@click.option(
    "--documents",
    type=click.Choice(["files", "lines", "jsonl", "rows", "chat"]),
    default="files",
    show_default=True,
    help="A document is a file, a line, the text under --key of a JSON line or of a row of a data set saved with "
    'save_to_disk, or a conversation (for data.kind = "chat").',
)
@click.option(
    "--key", metavar="NAME", help="Key of the text in each JSON line, or its column in each row.  [default: text]"
)
@click.option(
    "--tokenizer",
    metavar="NAME",
    default="bytes",
    show_default=True,
    help="bytes, a tokenizer.json or a folder with one, or package.module:function that maps str to token ids.",
)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Chat template in Jinja.  [default: the tokenizer's own]",
)
@click.option("--end", type=click.IntRange(min=0), metavar="ID", help="Token id to append to each document.")
@click.option(
    "--dtype",
    type=click.Choice(["uint8", "uint16", "uint32"]),
    help="Type of the tokens.  [default: the smallest for bytes and for a tokenizer.json, else uint32]",
)
@click.option(
    "--shard-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Approximate number of tokens per shard.  [default: 33554432]",
)
@json_option
def tokenize(path: Path, folder: Path, as_json: bool, tokenizer: str, **options: Any) -> None:
    """Convert the text or the conversations in PATH to token shards, for data.kind = "tokens" or "chat"."""
    from clustertrain.train.data.tokenize import SHARD_TOKENS, write

    _check_options(path, tokenizer, options)
    documents, default_dtype, name = _open_documents(path.absolute(), tokenizer, options)
    index = write(
        folder,
        documents,
        dtype=options["dtype"] or default_dtype,
        shard_tokens=options["shard_tokens"] or SHARD_TOKENS,
        tokenizer=name,
    )
    tokens = sum(shard.tokens or 0 for shard in index.shards)
    if as_json:
        from clustertrain.report.documents.tools import TokenShards

        shards = TokenShards(
            folder=str(folder), shards=len(index.shards), tokens=tokens, max_token_id=index.max_token_id
        )
        print_json("data-tokenize", shards)
        return
    click.echo(
        f"{folder}: {tokens:,} tokens in {len(index.shards)} shard{'s' if len(index.shards) != 1 else ''} of "
        f"{index.dtype}, largest token {index.max_token_id}; "
        f"set model.vocab_size to at least {(index.max_token_id or 0) + 1}"
    )


def _check_options(path: Path, tokenizer: str, options: dict[str, Any]) -> None:
    """Raise UsageError for options that have no effect with the others, or that do not fit ``path``."""
    from clustertrain.config.parsing.saved_datasets import is_saved_dataset
    from clustertrain.errors import UsageError

    unit = options["documents"]
    if options["key"] is not None and unit not in ("jsonl", "rows"):
        raise UsageError(
            f"--key {options['key']} needs JSON lines or rows, but --documents is {unit}",
            fix="add --documents jsonl or --documents rows, or leave it out",
        )
    if is_saved_dataset(path) and unit not in ("rows", "chat"):
        raise UsageError(
            f"{path} is a data set saved with save_to_disk, but --documents is {unit}",
            fix="add --documents rows and --key COLUMN, or --documents chat",
        )
    if unit == "rows" and not is_saved_dataset(path):
        raise UsageError(
            f"--documents rows needs a data set saved with save_to_disk, and {path} is none",
            fix="use --documents jsonl, lines or files",
        )
    if unit == "rows" and options["pattern"] != "*":
        raise UsageError("--pattern has no effect with --documents rows", fix="leave it out")
    if options["chat_template"] is not None and unit != "chat":
        raise UsageError(f"--chat-template needs conversations, but --documents is {unit}", fix="add --documents chat")
    if unit != "chat":
        return
    if options["end"] is not None:
        raise UsageError("--end has no effect with --documents chat", fix="the chat template writes the last token")
    if options["pattern"] != "*":
        raise UsageError("--pattern has no effect with --documents chat: it reads .jsonl and .parquet files")
    if tokenizer == "bytes" or _is_entry(tokenizer):
        raise UsageError(
            f"--documents chat needs a tokenizer with a chat template, but --tokenizer is {tokenizer}",
            fix="name the folder with tokenizer.json and tokenizer_config.json",
        )


def _is_entry(tokenizer: str) -> bool:
    import re

    return re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", tokenizer) is not None


def _open_documents(path: Path, tokenizer: str, options: dict[str, Any]) -> tuple[Iterable[Any], TokenDtype, str]:
    """Return the tokenized documents, the default type of their tokens, and the name of the tokenizer."""
    from clustertrain.config.chat.tokenizer import load_tokenizer_files
    from clustertrain.errors import UsageError
    from clustertrain.submit.snapshot import python_path
    from clustertrain.train.core import entry_points
    from clustertrain.train.data import tokenize as tokenizing

    end, unit = options["end"], options["documents"]
    key = "text" if options["key"] is None else options["key"]
    if tokenizer == "bytes" or _is_entry(tokenizer):
        encode: Any = tokenizing.tokenize_bytes
        if tokenizer != "bytes":
            # Otherwise nothing in this folder may be imported.
            if python_path.find_entry(tokenizer, [Path.cwd()]) is not None:
                sys.path.insert(0, str(Path.cwd()))
            encode = tokenizing.tokenizer_from_function(entry_points.load_function(tokenizer, "--tokenizer"))
        texts = tokenizing.read_documents(path, options["pattern"], unit, key)
        dtype: TokenDtype = "uint32" if tokenizer != "bytes" else "uint8" if (end or 0) < 256 else "uint16"
        return tokenizing.append_end_token(map(encode, texts), end), dtype, tokenizer
    if not Path(tokenizer).exists():
        raise UsageError(
            f"--tokenizer {tokenizer} is neither bytes, nor a tokenizer.json or its folder, nor package.module:function"
        )
    files = load_tokenizer_files(Path(tokenizer), "--tokenizer")
    dtype = "uint16" if max(files.largest_id, end or 0) < 1 << 16 else "uint32"
    if unit == "chat":
        return tokenizing.encode_chats(Path(tokenizer), options["chat_template"], path), dtype, files.version
    texts = tokenizing.read_documents(path, options["pattern"], unit, key)
    return tokenizing.append_end_token(tokenizing.encode_documents(files, texts), end), dtype, files.version
