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
from clustertrain.checkpoint.format.manifest import Manifest, TensorRecord, check_sizes, read_manifest
from clustertrain.checkpoint.format.storage import Folder
from clustertrain.checkpoint.offline import huggingface
from clustertrain.checkpoint.offline.inspect import Progress, assemble_tensor, no_progress
from clustertrain.checkpoint.offline.safetensors import ExportTensor, check_safetensors, write_safetensors
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import CheckpointError, ClusterTrainError, NotFound, UsageError

ExportFormat = Literal["safetensors", "torch"]
Naming = Literal["own", "huggingface"]

CONFIG_FILE, SINGLE_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
_FIX_FULL = "make room, or name another place with --output"
_FIX_BY_ERRNO = {
    errno.ENOSPC: _FIX_FULL,
    errno.EDQUOT: _FIX_FULL,
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "name a place that you may write to with --output"),
}
_EXPORT_FILE_NAMES = re.compile(r"config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class ExportRequest:
    """What to export from the checkpoint in ``folder``, and where to.

    ``output`` is the file for torch and the folder for safetensors. ``dtype`` is what floating tensors are converted
    to; None: none is. A file of safetensors has at most ``shard_bytes``, or one tensor. ``names`` None: Hugging Face's
    for safetensors of a model that it has, else our own.
    """

    folder: Folder
    output: Path
    format: ExportFormat = "safetensors"
    dtype: str | None = None
    shard_bytes: int = 5_000_000_000
    names: Naming | None = None
    force: bool = False


@dataclass(frozen=True)
class ExportResult:
    """``files`` are in ``path``; there are none where that is the file. ``bytes`` are those of the tensors."""

    step: int
    path: Path
    format: ExportFormat
    names: Naming
    files: tuple[str, ...]
    tensors: int
    bytes: int


def export_checkpoint(request: ExportRequest, progress: Progress = no_progress) -> ExportResult:
    """Write the model's tensors as ``request`` says.

    Raises:
        UsageError: the output is there already, or cannot be what is asked for.
        NotFound: the folder that it shall lie in is not there.
        DamagedCheckpoint: bytes of the checkpoint are not as they were written.
        StorageError: the checkpoint cannot be read, now at least.
        CheckpointError: the disk is full, a folder is not writable, …; there are no tensors of a model, or they hold
            what the format or ``dtype`` cannot. Nothing is left there then.
    """
    manifest = read_manifest(request.folder)
    check_sizes(request.folder, manifest)
    recipe, named = _name_tensors(request, manifest)
    names: Naming = "own" if recipe is None else "huggingface"
    items = [_make_item(n, t, request.dtype) for n, t in named]
    if request.format == "safetensors":
        check_safetensors(items)
    output = Path(os.path.realpath(request.output.expanduser()))
    _check_output(request, output)
    size = sum(i.nbytes for i in items)
    temporary = output.with_name(f".{output.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        _check_free_space(output.parent, size)
        files = _write(request, temporary, items, recipe, progress)
        _publish(temporary, output)
    except OSError as e:
        raise CheckpointError(
            f"{output}: cannot be written: {e.strerror or e}; nothing was left there",
            fix=_FIX_BY_ERRNO.get(e.errno or 0),
        ) from e
    finally:
        _remove_leftover(temporary)
    return ExportResult(manifest.step, output, request.format, names, files, len(items), size)


# -- which tensors, and what they are called


def find_model_tensors(manifest: Manifest) -> dict[str, TensorRecord]:
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
    return {f"{key}.{fqn}": t for key, module_tensors in modules.items() for fqn, t in module_tensors.items()}


NamedTensors = list[tuple[str, TensorRecord]]  # in the order in which they are written


def _name_tensors(request: ExportRequest, manifest: Manifest) -> tuple[Recipe | None, NamedTensors]:
    """The tensors with their names; with Hugging Face's comes the recipe that says what they are."""
    tensors = find_model_tensors(manifest)
    if not tensors:
        raise CheckpointError(
            f"{request.folder}: holds no model",
            fix="put the module itself into the state, not what its state_dict says",
        )
    if request.names == "huggingface" or (request.names is None and request.format == "safetensors"):
        try:
            return _name_as_llama(request, manifest, tensors)
        except ClusterTrainError:
            if request.names is not None:
                raise
    return None, sorted(tensors.items(), key=lambda pair: _natural_sort_key(pair[0]))


def _name_as_llama(
    request: ExportRequest, manifest: Manifest, tensors: Mapping[str, TensorRecord]
) -> tuple[Recipe, NamedTensors]:
    document = manifest.about.get("recipe")
    recipe = build(document, Recipe, f"{request.folder}: recipe") if document else None
    if recipe is None or not recipe.model.is_decoder:
        raise UsageError(
            f"--names huggingface: {request.folder} is not known to be a built-in decoder's",
            fix="name a run of the built-in trainer with model.kind decoder, or say --names own",
        )
    hf_tensors = huggingface.llama_tensors(recipe.model)
    actual_shapes = {ours: t.shape for ours, t in tensors.items()}
    expected_shapes = {ours: shape for ours, (_, shape) in hf_tensors.items()}
    if actual_shapes != expected_shapes:
        name = min(
            n for n in actual_shapes.keys() | expected_shapes.keys() if actual_shapes.get(n) != expected_shapes.get(n)
        )
        raise UsageError(
            f"--names huggingface: {request.folder} is no built-in decoder's: {name} has shape "
            f"{actual_shapes.get(name, 'none')}, by the recipe {expected_shapes.get(name, 'none')}",
            fix="say --names own",
        )
    return recipe, [(theirs, tensors[ours]) for ours, (theirs, _) in hf_tensors.items()]


def _natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    """For sorting: layer 10 comes after layer 9."""
    return [(reading.is_unsigned_int(p), int(p) if reading.is_unsigned_int(p) else 0, p) for p in name.split(".")]


def _make_item(name: str, tensor: TensorRecord, dtype: str | None) -> ExportTensor:
    if dtype is None or not dtypes.is_float(tensor.dtype):
        return ExportTensor(name=name, dtype=tensor.dtype, itemsize=tensor.itemsize, record=tensor)
    return ExportTensor(name=name, dtype=dtype, itemsize=dtypes.ITEMSIZE[dtype], record=tensor)


# -- where to


def _check_output(request: ExportRequest, output: Path) -> None:
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
    others = sorted(p.name for p in output.iterdir() if not _EXPORT_FILE_NAMES.fullmatch(p.name))
    if others:
        raise UsageError(
            f"--output {request.output}: holds {others[0]}, which is no part of an export",
            fix="--force replaces an earlier export as a whole: name another folder, or move that away",
        )


def _check_free_space(folder: Path, size: int) -> None:
    """So that a disk which is too small is told in a second and not after an hour."""
    fs_stats = os.statvfs(folder)
    free = fs_stats.f_bavail * fs_stats.f_frsize
    if size > free:
        raise CheckpointError(f"{folder}: {size:,} bytes are needed, {free:,} are free", fix=_FIX_FULL)


def _publish(temporary: Path, output: Path) -> None:
    """Give ``temporary`` its name. What is replaced is there until then, and again if that fails."""
    replaced = temporary.with_name(f"{temporary.name}-replaced")
    replaces = temporary.is_dir() and output.is_dir() and any(output.iterdir())
    if replaces:
        output.rename(replaced)
    try:
        temporary.replace(output)
    except OSError:
        if replaces:
            replaced.rename(output)
        raise
    fsio.fsync_folder(output.parent)
    if replaces:
        shutil.rmtree(replaced)


def _remove_leftover(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # it must not hide why there is something to take away
    else:
        path.unlink(missing_ok=True)


# -- the bytes


def _write(
    request: ExportRequest, path: Path, items: Sequence[ExportTensor], recipe: Recipe | None, progress: Progress
) -> tuple[str, ...]:
    """Write the file or the folder ``path``; returns the names of the files in the folder."""
    total, done_bytes = sum(i.nbytes for i in items), 0

    def read_tensor(item: ExportTensor) -> Iterator[memoryview]:
        nonlocal done_bytes
        raw = assemble_tensor(request.folder, item.record).reshape(-1, item.record.itemsize)
        yield from dtypes.convert(raw, item.record.dtype, item.dtype, item.name)
        done_bytes += item.nbytes
        progress(done_bytes, total)

    if request.format == "torch":
        from clustertrain.checkpoint.offline.torch_file import write_torch  # torch takes seconds to import

        write_torch(path, items, read_tensor)
        return ()
    path.mkdir()
    groups = list(_split_by_size(items, request.shard_bytes))
    files = [SINGLE_FILE]
    if len(groups) > 1:
        files = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    for file, group in zip(files, groups, strict=True):
        write_safetensors(path / file, group, read_tensor)
    if len(groups) > 1:
        weight_map = {i.name: file for file, shard in zip(files, groups, strict=True) for i in shard}
        _write_json(path / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        files.append(INDEX_FILE)
    if recipe is not None:
        _write_json(path / CONFIG_FILE, huggingface.llama_config(recipe.model, recipe.data.seq_len, items[0].dtype))
        files.append(CONFIG_FILE)
    fsio.fsync_folder(path)
    return tuple(files)


def _split_by_size(items: Iterable[ExportTensor], max_bytes: int) -> Iterator[list[ExportTensor]]:
    """Items in their order, in groups of at most ``max_bytes`` bytes, or of one item."""
    group: list[ExportTensor] = []
    size = 0
    for item in items:
        if group and size + item.nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += item.nbytes
    yield group


def _write_json(path: Path, document: dict[str, Any]) -> None:
    with path.open("x") as f:
        f.write(json.dumps(document, indent=2) + "\n")
        f.flush()
        os.fsync(f.fileno())
