"""``data tokenize``: convert text to token shards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustertrain.cli.common import json_option, print_json

if TYPE_CHECKING:
    from clustertrain.config.parsing.token_shards import TokenDtype


@click.group()
def data() -> None:
    """Prepare data before a run: token shards."""


@data.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--out",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="New folder for the shards.",
)
@click.option("--pattern", default="*", show_default=True, help="Glob pattern of the files in a folder.")
@click.option(
    "--documents",
    type=click.Choice(["files", "lines", "jsonl"]),
    default="files",
    show_default=True,
    help="A document is a file, a line, or the text under --key of a JSON line.",
)
@click.option("--key", help="Key of the text in each JSON line.  [default: text]")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    help="bytes, or package.module:function that maps str to token ids.",
)
@click.option("--end", type=click.IntRange(min=0), help="Token id to append to each document.")
@click.option(
    "--dtype",
    type=click.Choice(["uint8", "uint16", "uint32"]),
    help="Type of the tokens.  [default: the smallest for bytes, else uint32]",
)
@click.option(
    "--shard-tokens", type=click.IntRange(min=1), help="Approximate number of tokens per shard.  [default: 33554432]"
)
@json_option
def tokenize(path: Path, folder: Path, as_json: bool, tokenizer: str, **options: Any) -> None:
    """Convert the text in PATH to token shards for data.kind = "tokens"."""
    import re

    from clustertrain.errors import UsageError
    from clustertrain.submit import python_path
    from clustertrain.train.core import entry_points
    from clustertrain.train.data.tokenize import (
        SHARD_TOKENS,
        append_end_token,
        read_documents,
        tokenize_bytes,
        tokenizer_from_function,
        write,
    )

    if options["key"] is not None and options["documents"] != "jsonl":
        raise UsageError(
            f"--key {options['key']} needs JSON lines, but --documents is {options['documents']}",
            fix="add --documents jsonl, or leave it out",
        )
    if tokenizer == "bytes":
        encode: Any = tokenize_bytes
    elif re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", tokenizer):
        if (
            python_path.find_entry(tokenizer, [Path.cwd()]) is not None
        ):  # otherwise nothing in this folder may be imported
            sys.path.insert(0, str(Path.cwd()))
        encode = tokenizer_from_function(entry_points.load_function(tokenizer, "--tokenizer"))
    else:
        raise UsageError(f"--tokenizer {tokenizer} is neither bytes nor package.module:function")
    default_dtype: TokenDtype = (
        "uint32" if tokenizer != "bytes" else "uint8" if (options["end"] or 0) < 256 else "uint16"
    )
    key = "text" if options["key"] is None else options["key"]
    texts = read_documents(path.absolute(), options["pattern"], options["documents"], key)
    index = write(
        folder,
        append_end_token(map(encode, texts), options["end"]),
        dtype=options["dtype"] or default_dtype,
        shard_tokens=options["shard_tokens"] or SHARD_TOKENS,
        tokenizer=tokenizer,
    )
    tokens = sum(shard.tokens or 0 for shard in index.shards)
    if as_json:
        print_json(
            {"folder": str(folder), "shards": len(index.shards), "tokens": tokens, "max_token_id": index.max_token_id}
        )
        return
    click.echo(
        f"{folder}: {tokens:,} tokens in {len(index.shards)} shard{'s' if len(index.shards) != 1 else ''} of "
        f"{index.dtype}, largest token {index.max_token_id}; "
        f"set model.vocab_size to at least {(index.max_token_id or 0) + 1}"
    )
