"""A checkpoint's model as files that other programs read: safetensors, or one file for ``torch.load``.

Memory holds one tensor at a time. All is written beside the place that it is for, and gets its name when it is whole
and on the disk: an export is there as a whole or not at all.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clustertrain import fsio, reading
from clustertrain.checkpoint.format import dtypes
from clustertrain.checkpoint.format import manifest as index
from clustertrain.checkpoint.format.manifest import Manifest, TensorRecord
from clustertrain.checkpoint.format.storage import Folder
from clustertrain.checkpoint.offline import huggingface
from clustertrain.checkpoint.offline.inspect import Progress, assemble, unwatched
from clustertrain.checkpoint.offline.safetensors import Item, check_safetensors, write_safetensors
from clustertrain.config.parsing import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import CheckpointError, ClusterTrainError, NotFound, UsageError

Format = Literal["safetensors", "torch"]
Names = Literal["own", "huggingface"]

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ROOM = "make room, or name another place with --output"
_FIX = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "name a place that you may write to with --output"),
}
_OURS = re.compile(r"config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class Request:
    """What to export from the checkpoint in ``folder``, and where to.

    ``output`` is the file for torch and the folder for safetensors. ``dtype`` is what floating tensors are converted
    to; None: none is. A file of safetensors has at most ``shard_bytes``, or one tensor. ``names`` None: Hugging Face's
    for safetensors of a model that it has, else our own.
    """

    folder: Folder
    output: Path
    format: Format = "safetensors"
    dtype: str | None = None
    shard_bytes: int = 5_000_000_000
    names: Names | None = None
    force: bool = False


@dataclass(frozen=True)
class Exported:
    """``files`` are in ``path``; there are none where that is the file. ``bytes`` are those of the tensors."""

    step: int
    path: Path
    format: Format
    names: Names
    files: tuple[str, ...]
    tensors: int
    bytes: int


def export(request: Request, progress: Progress = unwatched) -> Exported:
    """Write the model's tensors as ``request`` says.

    Raises:
        UsageError: the output is there already, or cannot be what is asked for.
        NotFound: the folder that it shall lie in is not there.
        Damaged: bytes of the checkpoint are not as they were written.
        StorageError: the checkpoint cannot be read, now at least.
        CheckpointError: the disk is full, a folder is not writable, …; there are no tensors of a model, or they hold
            what the format or ``dtype`` cannot. Nothing is left there then.
    """
    manifest = index.read_manifest(request.folder)
    index.check_sizes(request.folder, manifest)
    recipe, named = _named(request, manifest)
    names: Names = "own" if recipe is None else "huggingface"
    items = [_item(n, t, request.dtype) for n, t in named]
    if request.format == "safetensors":
        check_safetensors(items)
    output = Path(os.path.realpath(request.output.expanduser()))
    _check_output(request, output)
    size = sum(i.nbytes for i in items)
    temporary = output.with_name(f".{output.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        _check_room(output.parent, size)
        files = _write(request, temporary, items, recipe, progress)
        _publish(temporary, output)
    except OSError as e:
        raise CheckpointError(
            f"{output}: cannot be written: {e.strerror or e}; nothing was left there", fix=_FIX.get(e.errno or 0)
        ) from e
    finally:
        _remove(temporary)
    return Exported(manifest.step, output, request.format, names, files, len(items), size)


# -- which tensors, and what they are called


def model_tensors(manifest: Manifest) -> dict[str, TensorRecord]:
    """Parameters and persistent buffers by their names in the module, as its state_dict has them; where the state has
    several modules, after the key of each and a dot. Tensors inside of extra state have no such name and are left out.
    """
    tensors = {t.name: t for t in manifest.tensors if t.kind == "model"}
    modules: dict[str, dict[str, TensorRecord]] = {}
    for key, value in manifest.values.items():
        for fqn, leaf in value.items() if isinstance(value, dict) else ():
            name = leaf.get("__tensor__") if isinstance(leaf, dict) else None
            if name in tensors:
                modules.setdefault(key, {})[fqn] = tensors[name]
    if len(modules) == 1:
        return next(iter(modules.values()))
    return {f"{key}.{fqn}": t for key, found in modules.items() for fqn, t in found.items()}


Named = list[tuple[str, TensorRecord]]  # in the order in which they are written


def _named(request: Request, manifest: Manifest) -> tuple[Recipe | None, Named]:
    """The tensors with their names; with Hugging Face's comes the recipe that says what they are."""
    tensors = model_tensors(manifest)
    if not tensors:
        raise CheckpointError(
            f"{request.folder}: holds no model",
            fix="put the module itself into the state, not what its state_dict says",
        )
    if request.names == "huggingface" or (request.names is None and request.format == "safetensors"):
        try:
            return _as_llama(request, manifest, tensors)
        except ClusterTrainError:
            if request.names is not None:
                raise
    return None, sorted(tensors.items(), key=lambda pair: _in_order(pair[0]))


def _as_llama(request: Request, manifest: Manifest, tensors: Mapping[str, TensorRecord]) -> tuple[Recipe, Named]:
    document = manifest.about.get("recipe")
    recipe = build(document, Recipe, f"{request.folder}: recipe") if document else None
    if recipe is None or not recipe.model.is_decoder:
        raise UsageError(
            f"--names huggingface: {request.folder} is not known to be a built-in decoder's",
            fix="name a run of the built-in trainer with model.kind decoder, or say --names own",
        )
    wanted = huggingface.tensors(recipe.model)
    found = {ours: t.shape for ours, t in tensors.items()}
    expected = {ours: shape for ours, (_, shape) in wanted.items()}
    if found != expected:
        name = min(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        raise UsageError(
            f"--names huggingface: {request.folder} is no built-in decoder's: {name} has shape "
            f"{found.get(name, 'none')}, by the recipe {expected.get(name, 'none')}",
            fix="say --names own",
        )
    return recipe, [(theirs, tensors[ours]) for ours, (theirs, _) in wanted.items()]


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """For sorting: layer 10 comes after layer 9."""
    return [(reading.is_count(p), int(p) if reading.is_count(p) else 0, p) for p in name.split(".")]


def _item(name: str, tensor: TensorRecord, dtype: str | None) -> Item:
    if dtype is None or not dtypes.is_float(tensor.dtype):
        return Item(name=name, dtype=tensor.dtype, itemsize=tensor.itemsize, record=tensor)
    return Item(name=name, dtype=dtype, itemsize=dtypes.ITEMSIZE[dtype], record=tensor)


# -- where to


def _check_output(request: Request, output: Path) -> None:
    if not output.parent.is_dir():
        raise NotFound(f"--output {request.output}: there is no folder {output.parent}", fix="make it first")
    as_file = request.format == "torch"
    if as_file and output.is_dir():
        raise UsageError(f"--output {request.output}: is a folder, and torch's format is one file", fix="name a file")
    if not output.exists() or (not as_file and output.is_dir() and not any(output.iterdir())):
        return
    if not request.force:
        raise UsageError(f"--output {request.output}: is there already", fix="name another, or replace it with --force")
    if as_file:
        return
    if not output.is_dir():
        raise UsageError(f"--output {request.output}: is a file, and safetensors go to a folder", fix="name a folder")
    others = sorted(p.name for p in output.iterdir() if not _OURS.fullmatch(p.name))
    if others:
        raise UsageError(
            f"--output {request.output}: holds {others[0]}, which is no part of an export",
            fix="--force replaces an earlier export as a whole: name another folder, or move that away",
        )


def _check_room(folder: Path, size: int) -> None:
    """So that a disk which is too small is told in a second and not after an hour."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if size > free:
        raise CheckpointError(f"{folder}: {size:,} bytes are needed, {free:,} are free", fix=_ROOM)


def _publish(temporary: Path, output: Path) -> None:
    """Give ``temporary`` its name. What is replaced is there until then, and again if that fails."""
    aside = temporary.with_name(f"{temporary.name}-replaced")
    replaces = temporary.is_dir() and output.is_dir() and any(output.iterdir())
    if replaces:
        output.rename(aside)
    try:
        temporary.replace(output)
    except OSError:
        if replaces:
            aside.rename(output)
        raise
    fsio.fsync_folder(output.parent)
    if replaces:
        shutil.rmtree(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # it must not hide why there is something to take away
    else:
        path.unlink(missing_ok=True)


# -- the bytes


def _write(
    request: Request, path: Path, items: Sequence[Item], recipe: Recipe | None, progress: Progress
) -> tuple[str, ...]:
    """Write the file or the folder ``path``; returns the names of the files in the folder."""
    total, done = sum(i.nbytes for i in items), 0

    def content(item: Item) -> Iterator[memoryview]:
        nonlocal done
        raw = assemble(request.folder, item.record).reshape(-1, item.record.itemsize)
        yield from dtypes.converted(raw, item.record.dtype, item.dtype, item.name)
        done += item.nbytes
        progress(done, total)

    if request.format == "torch":
        from clustertrain.checkpoint.offline.torch_file import write_torch  # torch takes seconds to import

        write_torch(path, items, content)
        return ()
    path.mkdir()
    shards = list(_shards(items, request.shard_bytes))
    files = [WHOLE]
    if len(shards) > 1:
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(path / file, shard, content)
    if len(shards) > 1:
        where = {i.name: file for file, shard in zip(files, shards, strict=True) for i in shard}
        _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        files.append(INDEX)
    if recipe is not None:
        _write_json(path / CONFIG, huggingface.config(recipe.model, recipe.data.seq_len, items[0].dtype))
        files.append(CONFIG)
    fsio.fsync_folder(path)
    return tuple(files)


def _shards(items: Iterable[Item], most: int) -> Iterator[list[Item]]:
    """Items in their order, in groups of at most ``most`` bytes, or of one item."""
    shard: list[Item] = []
    size = 0
    for item in items:
        if shard and size + item.nbytes > most:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item.nbytes
    yield shard


def _write_json(path: Path, document: dict[str, Any]) -> None:
    with path.open("x") as f:
        f.write(json.dumps(document, indent=2) + "\n")
        f.flush()
        os.fsync(f.fileno())
