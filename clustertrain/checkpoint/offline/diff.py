"""Comparison of two checkpoints, whichever layouts and numbers of ranks saved them. Works without torch."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from clustertrain.checkpoint.format import dtypes, json_tags
from clustertrain.checkpoint.format.manifest import Manifest, TensorKind, TensorRecord, check_sizes, read_manifest
from clustertrain.checkpoint.format.storage import Folder
from clustertrain.checkpoint.offline.inspect import Progress, assemble_tensor, no_progress, tensor_bytes

# The fields of the index that hold state. The others say how it was saved, which may differ between equal checkpoints.
_STATE_FIELDS = frozenset({"step", "values", "tensors"})
_RANK_TENSOR = re.compile(r"rank-\d+/")


class TensorForm(msgspec.Struct, frozen=True, kw_only=True):
    """The dtype and the shape of a tensor."""

    dtype: str
    """Type of its elements, such as ``float32``."""
    shape: tuple[int, ...]
    """Length of each dimension of the whole tensor."""


class FormDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose dtype or shape differs between A and B."""

    name: str
    """Name of the tensor in the whole model or state."""
    kind: TensorKind
    """``model``, ``optimizer`` or ``other``: what it belongs to."""
    a: TensorForm
    """Its form in A."""
    b: TensorForm
    """Its form in B."""


class TensorDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose bytes differ."""

    name: str
    """Name of the tensor in the whole model or state."""
    kind: TensorKind
    """``model``, ``optimizer`` or ``other``: what it belongs to."""
    elements: int
    """Number of elements of the tensor."""
    differing: int
    """Number of elements that differ."""
    not_finite: int = 0
    """Number of differing elements that are NaN or Inf in A or B."""
    max_abs: float | None = None
    """Largest absolute difference of elements that are finite in A and B. Null if no such element differs, or if the
    dtype cannot be decoded."""
    relative: float | None = None
    """``max_abs`` divided by the largest magnitude in either tensor, over elements that are finite in both; null where
    ``max_abs`` is."""


class ValueDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A value, other than a tensor, that differs or exists on one side only."""

    name: str
    """Path of the value, with a slash between keys. A key that is not text is as Python writes it."""
    only: Literal["a", "b"] | None = None
    """The side that has the value, ``a`` or ``b``; null if both have it."""
    a: Any = None
    """The value in A; null if A lacks it. A number that JSON lacks, such as NaN, is text."""
    b: Any = None
    """The value in B; null if B lacks it. A number that JSON lacks, such as NaN, is text."""


class CheckpointDiff(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison."""

    equal: bool
    """All tensors and values are the same in A and B."""
    tensors: int
    """Number of tensors that both have with the same dtype and shape."""
    only_a: tuple[str, ...]
    """Names of tensors that only A has."""
    only_b: tuple[str, ...]
    """Names of tensors that only B has."""
    forms: tuple[FormDiff, ...]
    """Tensors whose dtype or shape differs."""
    bytes: tuple[TensorDiff, ...]
    """Tensors whose bytes differ: model tensors first; within a kind, the largest difference first."""
    values: tuple[ValueDiff, ...]
    """Values other than tensors that differ, such as the step or a state of the data."""
    saved: tuple[ValueDiff, ...]
    """Differences in how the two were saved (layout, number of ranks, engine, …). They do not affect ``equal``."""
    ranks_compared: bool
    """The state of each rank (its random number generators) was compared, which takes that the same number of ranks
    saved both."""


def compare_checkpoints(a: Folder, b: Folder, progress: Progress = no_progress) -> CheckpointDiff:
    """Compare the checkpoints in the folders ``a`` and ``b``.

    Reads every byte of both, and holds one tensor of each in memory.

    Raises:
        DamagedCheckpoint: bytes have changed since they were written; the message names the file.
        StorageError: a file cannot be read at the moment.
    """
    folders = a, b
    manifests = [read_manifest(f) for f in folders]
    for folder, manifest in zip(folders, manifests, strict=True):
        check_sizes(folder, manifest)
    same_world = manifests[0].world_size == manifests[1].world_size
    in_a, in_b = ({t.name: t for t in m.tensors if same_world or not _RANK_TENSOR.match(t.name)} for m in manifests)
    both = sorted(in_a.keys() & in_b.keys())
    forms = tuple(_diff_form(in_a[n], in_b[n]) for n in both if _tensor_form(in_a[n]) != _tensor_form(in_b[n]))
    same_form = [n for n in both if _tensor_form(in_a[n]) == _tensor_form(in_b[n])]
    total, done_bytes = sum(tensor_bytes(in_a[n]) for n in same_form), 0
    tensor_diffs = []
    for name in same_form:
        difference = _diff_tensor(in_a[name], assemble_tensor(a, in_a[name]), assemble_tensor(b, in_b[name]))
        if difference is not None:
            tensor_diffs.append(difference)
        done_bytes += tensor_bytes(in_a[name])
        progress(done_bytes, total)
    values = tuple(_diff_values(*(_flatten_state(m, with_ranks=same_world) for m in manifests)))
    only_a, only_b = tuple(sorted(in_a.keys() - in_b.keys())), tuple(sorted(in_b.keys() - in_a.keys()))
    return CheckpointDiff(
        equal=not (only_a or only_b or forms or tensor_diffs or values),
        tensors=len(same_form),
        only_a=only_a,
        only_b=only_b,
        forms=forms,
        bytes=tuple(sorted(tensor_diffs, key=_severity_key)),
        values=values,
        saved=tuple(_diff_values(*map(_flatten_save_info, manifests))),
        ranks_compared=same_world,
    )


def _tensor_form(tensor: TensorRecord) -> TensorForm:
    return TensorForm(dtype=tensor.dtype, shape=tensor.shape)


def _diff_form(a: TensorRecord, b: TensorRecord) -> FormDiff:
    return FormDiff(name=a.name, kind=a.kind, a=_tensor_form(a), b=_tensor_form(b))


def _severity_key(d: TensorDiff) -> tuple[int, int, float, str]:
    """Return the sort key: the model first; within a kind NaN and Inf, then undecodable dtypes, then the difference."""
    kinds = ("model", "optimizer", "other")
    return kinds.index(d.kind), -d.not_finite, -(np.inf if d.max_abs is None else d.max_abs), d.name


# -- tensors


def _diff_tensor(tensor: TensorRecord, a: NDArray[np.uint8], b: NDArray[np.uint8]) -> TensorDiff | None:
    """Return the difference of two tensors (…, itemsize) of the same form, or None if they are equal."""
    a, b = a.reshape(-1, tensor.itemsize), b.reshape(-1, tensor.itemsize)
    starts = range(0, len(a), dtypes.BLOCK_ELEMENTS)
    blocks = [(a[i : i + dtypes.BLOCK_ELEMENTS], b[i : i + dtypes.BLOCK_ELEMENTS]) for i in starts]
    if all(np.array_equal(x, y) for x, y in blocks):
        return None
    differing, not_finite, largest, magnitude = 0, 0, None, 0.0
    for x, y in blocks:
        differs = (x != y).any(axis=1)
        differing += int(differs.sum())
        numbers_x, numbers_y = dtypes.decode(x, tensor.dtype), dtypes.decode(y, tensor.dtype)
        if numbers_x is None or numbers_y is None:
            continue
        p, q = _to_double(numbers_x), _to_double(numbers_y)
        finite = np.isfinite(p) & np.isfinite(q)
        not_finite += int((differs & ~finite).sum())
        magnitude = max(magnitude, *(float(np.abs(n[finite]).max(initial=0.0)) for n in (p, q)))
        comparable = differs & finite
        if comparable.any():
            with np.errstate(over="ignore"):
                largest = max(largest or 0.0, float(np.abs(p[comparable] - q[comparable]).max()))
    return TensorDiff(
        name=tensor.name,
        kind=tensor.kind,
        elements=len(a),
        differing=differing,
        not_finite=not_finite,
        max_abs=largest,
        relative=None if largest is None else largest / magnitude if largest else 0.0,
    )


def _to_double(numbers: NDArray[Any]) -> NDArray[Any]:
    """Convert to double precision, in which differences of narrower types neither overflow nor round to zero."""
    with np.errstate(invalid="ignore"):  # a signaling NaN becomes a quiet one
        return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


# -- values


def _flatten_state(manifest: Manifest, *, with_ranks: bool) -> dict[str, Any]:
    values = manifest.values if with_ranks else {k: v for k, v in manifest.values.items() if k != "ranks"}
    return {"step": manifest.step, **dict(_iter_leaves(values, ""))}


def _flatten_save_info(manifest: Manifest) -> dict[str, Any]:
    fields = msgspec.structs.asdict(manifest)
    save_info = {k: v for k, v in fields.items() if k not in _STATE_FIELDS and k not in ("files", "made_in")}
    return dict(_iter_leaves(msgspec.to_builtins(save_info), ""))  # splits nested structs, such as the metric


def _iter_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each value that is not a tensor. A list of plain values counts as one value.

    The tags of types that JSON lacks are part of the path, so that a list and a tuple are not the same.
    """
    if isinstance(value, dict) and json_tags.TENSOR in value:
        return
    inner: dict[str, Any] = {}
    if _is_map(value):
        # By key: the order of a dictionary is not state, as for one whose keys are text.
        inner = {f"{json_tags.MAP}/{_format_key(key)}": child for key, child in value[json_tags.MAP]}
        inner = inner or {json_tags.MAP: {}}
    elif isinstance(value, dict) and not _is_number(value):
        inner = {key: child for key, child in value.items() if key != json_tags.ARRAY}  # a tensor, compared as one
    elif isinstance(value, list) and any(isinstance(v, (dict, list)) and not _is_number(v) for v in value):
        inner = {str(i): v for i, v in enumerate(value)}
    if not inner:
        yield name, value
    for key, child in inner.items():
        yield from _iter_leaves(child, f"{name}/{key}" if name else key)


def _is_map(value: Any) -> bool:
    """Return whether a value is a dictionary with keys that JSON lacks, as a list of pairs."""
    pairs = value.get(json_tags.MAP) if isinstance(value, dict) else None
    return isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)


def _format_key(key: Any) -> str:
    """Return the key of a map, which may be any plain value, as Python writes it."""
    if _is_number(key):
        return str(_readable(key))
    if isinstance(key, dict) and isinstance(items := key.get(json_tags.TUPLE), list):
        return f"({', '.join(map(_format_key, items))}{',' if len(items) == 1 else ''})"
    if isinstance(key, dict) and isinstance(text := key.get(json_tags.BYTES), str):
        with contextlib.suppress(ValueError):  # not base64: damaged
            return repr(base64.b64decode(text))
    return repr(key)


def _remove_tags(path: str) -> str:
    return "/".join(part for part in path.split("/") if part not in json_tags.ALL)


def _is_number(value: Any) -> bool:
    """Return whether a value is the tag of a number that JSON lacks, such as NaN."""
    return isinstance(value, dict) and len(value) == 1 and not value.keys().isdisjoint((json_tags.FLOAT, json_tags.INT))


def _readable(value: Any) -> Any:
    """Return a value with text in place of the tags of numbers."""
    if isinstance(value, list):
        return [_readable(v) for v in value]
    return next(iter(value.values())) if _is_number(value) else value


def _diff_values(a: dict[str, Any], b: dict[str, Any]) -> Iterator[ValueDiff]:
    for path in sorted(a.keys() | b.keys()):
        name = _remove_tags(path)
        if path not in b:
            yield ValueDiff(name=name, only="a", a=_readable(a[path]))
        elif path not in a:
            yield ValueDiff(name=name, only="b", b=_readable(b[path]))
        # Compare the text, because Python considers 1, 1.0 and True equal.
        elif repr(a[path]) != repr(b[path]):
            in_a, in_b = _readable(a[path]), _readable(b[path])
            if repr(in_a) == repr(in_b):  # a number and its text
                in_a, in_b = a[path], b[path]
            yield ValueDiff(name=name, a=in_a, b=in_b)
