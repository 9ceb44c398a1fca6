"""Differences between the tensors of files and those that a model expects, in one line for all layers."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from clustertrain.checkpoint.format.manifest import TensorRecord

_FLOATS = ("float32", "bfloat16", "float16", "float64")  # not from dtypes, which imports NumPy
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name


def list_differences(
    tensors: Mapping[str, TensorRecord],
    expected: Mapping[str, tuple[int, ...]],
    *,
    not_expected: str = "is not in the model",
    integers: Collection[str] = (),
    ignored: Collection[str] = (),
) -> list[str]:
    """Return a line for each way in which ``tensors`` differ from ``expected``, shapes by name. All are listed.

    Tensors that differ alike and whose names differ only in the numbers of layers share a line.

    Args:
        not_expected: what to say of a tensor that is not expected.
        integers: names of tensors that need not be floating-point.
        ignored: names of tensors that may be there.
    """
    unexpected = [name for name in tensors if name not in expected and name not in ignored]
    lines = []
    for names in _group(name for name in expected if name not in tensors):
        close = difflib.get_close_matches(names[0], unexpected, n=1, cutoff=0.8)
        lines.append(f"{_format_names(names, 'is missing')}" + (f"; the nearest name is {close[0]}" if close else ""))
    present = [name for name in expected if name in tensors]
    differing: dict[str, list[str]] = {}
    for name in present:
        tensor, shape = tensors[name], expected[name]
        if tensor.shape != shape:
            differing.setdefault(f"has shape {list(tensor.shape)}, not {list(shape)}", []).append(name)
        elif tensor.dtype not in _FLOATS and name not in integers:
            differing.setdefault(f"has dtype {tensor.dtype}, which is not {', '.join(_FLOATS)}", []).append(name)
    differing[not_expected] = unexpected
    lines += [_format_names(group, text) for text, names in differing.items() for group in _group(names)]
    return lines


def _group(names: Iterable[str]) -> list[list[str]]:
    """Return the names in groups that differ only in their numbers, in the order of the first of each."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("#", name), []).append(name)
    return list(groups.values())


def _format_names(names: Sequence[str], text: str) -> str:
    """Return a sentence on all names of a group: ``layers.{0-3}.q.weight is missing (4 tensors)``."""
    if len(names) == 1:
        return f"{names[0]} {text}"
    slots = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    ranges = iter([_format_ranges(sorted(set(numbers))) for numbers in slots])
    return f"{_NUMBER.sub(lambda _: next(ranges), names[0])} {text} ({len(names)} tensors)"


def _format_ranges(numbers: Sequence[int]) -> str:
    """Return a number as it is, and several as ``{0-2,5}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return "{" + ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) + "}"
