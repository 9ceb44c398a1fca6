"""Export of a checkpoint's model for other programs: safetensors, or one file for ``torch.load``.

Memory holds one tensor at a time. Everything is written under a temporary name next to the output and renamed once it
is complete and on the disk: an export exists completely or not at all.
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

from clustertrain import extras, fsio, reading
from clustertrain.checkpoint.format import adapter_files, dtypes
from clustertrain.checkpoint.format.adapter_files import BASE_HASH
from clustertrain.checkpoint.format.manifest import Manifest, TensorRecord, check_sizes, read_manifest
from clustertrain.checkpoint.format.model_tensors import find_model_tensors
from clustertrain.checkpoint.format.safetensors_files import INDEX_FILE, SINGLE_FILE
from clustertrain.checkpoint.format.storage import Folder
from clustertrain.checkpoint.offline import companions
from clustertrain.checkpoint.offline.adapter import SavedAdapter, find_adapter
from clustertrain.checkpoint.offline.inspect import Progress, assemble_tensor, no_progress
from clustertrain.checkpoint.offline.safetensors import ExportTensor, check_safetensors, write_safetensors
from clustertrain.config.huggingface import families, tensor_names
from clustertrain.config.huggingface.families import CONFIG_FILE
from clustertrain.config.parsing.documents import build
from clustertrain.config.recipe import Recipe
from clustertrain.errors import CheckpointError, ClusterTrainError, NotFound, UsageError

ExportFormat = Literal["safetensors", "torch"]
Naming = Literal["own", "huggingface"]

_FIX_FULL = "make room, or choose another place with --output"
_FIX_BY_ERRNO = {
    errno.ENOSPC: _FIX_FULL,
    errno.EDQUOT: _FIX_FULL,
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a place that you may write to with --output"),
}
_EXPORT_FILE_NAMES = re.compile(
    r"(adapter_)?config\.json|adapter_model\.safetensors|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|"
    + "|".join(map(re.escape, companions.NAMES))
)


@dataclass(frozen=True)
class ExportRequest:
    """Options of an export."""

    folder: Folder
    """The checkpoint."""
    output: Path
    """The file for torch, the folder for safetensors."""
    format: ExportFormat = "safetensors"
    dtype: str | None = None
    """The dtype to convert floating-point tensors to. None: each tensor keeps its own."""
    shard_bytes: int = 5_000_000_000
    """Largest size of a safetensors file; a larger tensor gets a file of its own."""
    names: Naming | None = None
    """Tensor names. None: Hugging Face's for safetensors of a model that it supports, otherwise the module's own."""
    force: bool = False
    """Replace an existing output."""
    merge: bool = False
    """Add the adapter to the weights of its base, and write the whole model. Otherwise, safetensors of a model with an
    adapter are those of the adapter alone, as PEFT reads it."""


@dataclass(frozen=True)
class ExportResult:
    """A finished export."""

    step: int
    path: Path
    """The file or folder that was written."""
    format: ExportFormat
    names: Naming
    files: tuple[str, ...]
    """Names of the files in ``path``; empty if ``path`` is a file."""
    tensors: int
    """Number of tensors."""
    bytes: int
    """Size of the tensors."""


def export_checkpoint(request: ExportRequest, progress: Progress = no_progress) -> ExportResult:
    """Write the model's tensors according to ``request``.

    Raises:
        UsageError: the output already exists, or the options contradict it.
        NotFound: the parent folder of the output does not exist.
        DamagedCheckpoint: bytes of the checkpoint have changed since they were written.
        StorageError: the checkpoint cannot be read at the moment.
        CheckpointError: the disk is full, a folder is not writable, …; the checkpoint contains no model, or values
            that the format or ``dtype`` cannot hold. Nothing is left behind.
    """
    manifest = read_manifest(request.folder)
    check_sizes(request.folder, manifest)
    tensors = _find_tensors(request, manifest)
    adapter = find_adapter(request.folder, manifest, tensors)
    if request.merge and adapter is None:
        raise UsageError(f"--merge: {request.folder} has no adapter", fix="leave out --merge")
    content = _Content(request, manifest, tensors if adapter is None else adapter.tensors, adapter)
    names: Naming = "own" if content.recipe is None else "huggingface"
    items = [_make_item(n, t, request.dtype) for n, t in content.named_tensors]
    if request.format == "safetensors":
        check_safetensors(items)
    output = Path(os.path.realpath(request.output.expanduser()))
    _check_output(request, output)
    size = sum(i.nbytes for i in items)
    temporary = output.with_name(f".{output.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        _check_free_space(output.parent, size)
        files = _write(request, temporary, items, content, progress)
        _publish(temporary, output)
    except OSError as e:
        raise CheckpointError(
            f"{output}: cannot be written: {e.strerror or e}; nothing was left behind",
            fix=_FIX_BY_ERRNO.get(e.errno or 0),
        ) from e
    finally:
        _remove_leftover(temporary)
    return ExportResult(manifest.step, output, request.format, names, files, len(items), size)


# -- tensors and their names


NamedTensors = list[tuple[str, TensorRecord]]  # in the order of writing


class _Content:
    """What an export contains."""

    def __init__(
        self,
        request: ExportRequest,
        manifest: Manifest,
        tensors: Mapping[str, TensorRecord],
        adapter: SavedAdapter | None,
    ) -> None:
        self.adapter = adapter
        self._folder = request.folder
        self._merges = request.merge
        self.is_adapter_alone = adapter is not None and not request.merge and request.format == "safetensors"
        base = adapter.base_tensors if adapter is not None and (request.merge or self.is_adapter_alone) else tensors
        self.recipe, self.named_tensors = _name_tensors(request, manifest, base)
        """The recipe of the model, with Hugging Face's names; the tensors with their names."""
        self._own_names = {t.name: name for name, t in base.items()}
        self._layer_names = {
            self._own_names[t.name].removesuffix(".weight"): name.removesuffix(".weight")
            for name, t in self.named_tensors
        }
        if self.is_adapter_alone and adapter is not None:
            self.named_tensors = adapter.name_for_peft(self._layer_names)

    def is_merged(self, tensor: TensorRecord) -> bool:
        """Return whether the tensor's values change."""
        layer, _, own = self._own_names.get(tensor.name, "").rpartition(".")
        return self._merges and self.adapter is not None and own == "weight" and layer in self.adapter.layers

    def read(self, tensor: TensorRecord) -> dtypes.Raw:
        """Return the bytes of a tensor, (elements, itemsize)."""
        if self.adapter is not None:
            return self.adapter.read(tensor)
        return assemble_tensor(self._folder, tensor).reshape(-1, tensor.itemsize)

    def merge(self, tensor: TensorRecord, raw: dtypes.Raw) -> dtypes.Raw:
        """Return the merged values of the bytes of a tensor, in fp32."""
        assert self.adapter is not None
        return self.adapter.merge(self._own_names[tensor.name], raw)

    def peft_config(self) -> dict[str, Any]:
        assert self.adapter is not None
        return self.adapter.peft_config(self._layer_names, "CAUSAL_LM" if self.recipe is not None else None)


def _find_tensors(request: ExportRequest, manifest: Manifest) -> dict[str, TensorRecord]:
    """Return the tensors of the model; raise CheckpointError if there are none."""
    tensors = find_model_tensors(manifest)
    if not tensors:
        raise CheckpointError(
            f"{request.folder}: contains no model",
            fix="put the module itself into the state, not its state_dict",
        )
    return tensors


def _name_tensors(
    request: ExportRequest, manifest: Manifest, tensors: Mapping[str, TensorRecord]
) -> tuple[Recipe | None, NamedTensors]:
    """Return the tensors with their names, and with Hugging Face's names also the recipe of the model."""
    if request.names == "huggingface" or (request.names is None and request.format == "safetensors"):
        try:
            return _name_as_huggingface(request, manifest, tensors)
        except ClusterTrainError:
            if request.names is not None:
                raise
    return None, sorted(tensors.items(), key=lambda pair: _natural_sort_key(pair[0]))


def _name_as_huggingface(
    request: ExportRequest, manifest: Manifest, tensors: Mapping[str, TensorRecord]
) -> tuple[Recipe, NamedTensors]:
    document = manifest.about.get("recipe")
    recipe = build(document, Recipe, f"{request.folder}: recipe") if document else None
    if recipe is None or not recipe.model.is_decoder:
        raise UsageError(
            f"--names huggingface: {request.folder} is not a checkpoint of the built-in decoder",
            fix="choose a run of the built-in trainer with model.kind decoder, or pass --names own",
        )
    families.find_family(recipe.model)
    hf_tensors = tensor_names.list_tensors(recipe.model)
    actual_shapes = {n: t.shape for n, t in tensors.items()}
    expected_shapes = {n: shape for n, (_, shape) in hf_tensors.items()}
    if actual_shapes != expected_shapes:
        name = min(
            n for n in actual_shapes.keys() | expected_shapes.keys() if actual_shapes.get(n) != expected_shapes.get(n)
        )
        raise UsageError(
            f"--names huggingface: {request.folder} is not a checkpoint of the built-in decoder: {name} has shape "
            f"{actual_shapes.get(name, 'none')}, but {expected_shapes.get(name, 'none')} in the recipe",
            fix="pass --names own",
        )
    return recipe, [(hf_name, tensors[name]) for name, (hf_name, _) in hf_tensors.items()]


def _natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(reading.is_unsigned_int(p), int(p) if reading.is_unsigned_int(p) else 0, p) for p in name.split(".")]


def _make_item(name: str, tensor: TensorRecord, dtype: str | None) -> ExportTensor:
    if dtype is None or not dtypes.is_float(tensor.dtype):
        return ExportTensor(name=name, dtype=tensor.dtype, itemsize=tensor.itemsize, record=tensor)
    return ExportTensor(name=name, dtype=dtype, itemsize=dtypes.ITEMSIZE[dtype], record=tensor)


# -- output


def _check_output(request: ExportRequest, output: Path) -> None:
    if not output.parent.is_dir():
        raise NotFound(f"--output {request.output}: the folder {output.parent} does not exist", fix="create it first")
    as_file = request.format == "torch"
    if as_file and output.is_dir():
        raise UsageError(
            f"--output {request.output}: is a folder, but --format torch writes one file", fix="name a file"
        )
    if not output.exists() or (not as_file and output.is_dir() and not any(output.iterdir())):
        return
    if not request.force:
        raise UsageError(
            f"--output {request.output}: already exists", fix="choose another name, or replace it with --force"
        )
    if as_file:
        return
    if not output.is_dir():
        raise UsageError(
            f"--output {request.output}: is a file, but --format safetensors writes a folder", fix="name a folder"
        )
    foreign_names = sorted(p.name for p in output.iterdir() if not _EXPORT_FILE_NAMES.fullmatch(p.name))
    if foreign_names:
        raise UsageError(
            f"--output {request.output}: contains {foreign_names[0]}, which is not part of an export",
            fix="--force replaces only an earlier export: choose another folder, or move that file away",
        )


def _check_free_space(folder: Path, size: int) -> None:
    """Report a disk that is too small at once instead of after an hour."""
    fs_stats = os.statvfs(folder)
    free = fs_stats.f_bavail * fs_stats.f_frsize
    if size > free:
        raise CheckpointError(f"{folder}: {size:,} bytes are needed, {free:,} are free", fix=_FIX_FULL)


def _publish(temporary: Path, output: Path) -> None:
    """Rename ``temporary`` to ``output``. The old output stays until then, and is put back if the rename fails."""
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
        shutil.rmtree(path, ignore_errors=True)  # an error here must not hide the one that left the folder behind
    else:
        path.unlink(missing_ok=True)


# -- writing


def _write(
    request: ExportRequest, path: Path, items: Sequence[ExportTensor], content: _Content, progress: Progress
) -> tuple[str, ...]:
    """Write the file or folder ``path``, and return the names of the files in the folder."""
    total, done_bytes = sum(i.nbytes for i in items), 0

    def read_tensor(item: ExportTensor) -> Iterator[memoryview]:
        nonlocal done_bytes
        raw, dtype = content.read(item.record), item.record.dtype
        if content.is_merged(item.record):
            raw, dtype = content.merge(item.record, raw), "float32"
        yield from dtypes.convert(raw, dtype, item.dtype, item.name)
        done_bytes += item.nbytes
        progress(done_bytes, total)

    if request.format == "torch":
        extras.require("torch", "checkpoint export to a torch file")
        from clustertrain.checkpoint.offline.torch_file import write_torch  # torch takes seconds to import

        write_torch(path, items, read_tensor)
        return ()
    path.mkdir()
    adapter, recipe = content.adapter, content.recipe
    if adapter is not None and content.is_adapter_alone:
        metadata = {BASE_HASH: adapter.base_sha256} if adapter.base_sha256 else {}
        write_safetensors(path / adapter_files.WEIGHTS_FILE, items, read_tensor, metadata)
        _write_json(path / adapter_files.CONFIG_FILE, content.peft_config())
        fsio.fsync_folder(path)
        return (adapter_files.WEIGHTS_FILE, adapter_files.CONFIG_FILE)
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
        # transformers converts all tensors to this dtype.
        widest = max(items, key=lambda item: item.itemsize if dtypes.is_float(item.dtype) else 0).dtype
        config = families.build_config(recipe.model, recipe.data.seq_len, widest)
        _write_json(path / CONFIG_FILE, {**config, **companions.read_token_ids(recipe)})
        files += [CONFIG_FILE, *companions.copy_files(recipe, path)]
    fsio.fsync_folder(path)
    return tuple(files)


def _split_by_size(items: Iterable[ExportTensor], max_bytes: int) -> Iterator[list[ExportTensor]]:
    """Split the items, in their order, into groups of at most ``max_bytes`` bytes or of one item."""
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
