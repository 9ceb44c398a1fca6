"""Whether a checkpoint is complete: by the structure and size of its files, and by those of older checkpoints.

No file is loaded or unpickled.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import zipfile
from collections.abc import Iterable

_TORCH_FILES = (".pt", ".pth", ".ckpt", ".bin")
_STATE_FILES = (*_TORCH_FILES, ".pkl", ".safetensors", ".distcp")
_OLDER_COUNT = 3  # older checkpoints that a newer one is compared with

# What the frameworks write last, and what only they write before that.
_ATTACH_MARKER, _TRAINER_STATE = "COMPLETE.json", "trainer_state.json"
_TRAINER = re.compile(r"training_args\.bin|rng_state(_\d+)?\.pth")
_RANK_STATE = re.compile(r"(random_states|rng_state)_(\d+)\.(pkl|pth)")  # of Accelerate, of the Trainer
_NUMBERS = r"(_\d+|-\d+-of-\d+)?"
_WEIGHTS = re.compile(
    rf"(adapter_|pytorch_)?model{_NUMBERS}\.(safetensors|bin)|pytorch_model(_fsdp)?{_NUMBERS}(\.bin)?"
)
_ACCELERATE = re.compile(r"(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|optimizer_\d+|scaler\.pt")
_SHARD = re.compile(rb"__\d+_\d+\.distcp")
# What reading a broken file raises.
_FAULTS = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError, struct.error,
           zipfile.BadZipFile)  # fmt: skip


def find_problem(path: str, ranks: int = 1) -> str:
    """Return why the checkpoint in ``path``, a file or a folder, is not complete; empty if it is.

    Args:
        ranks: number of ranks that have saved it.
    """
    try:
        if not os.path.isdir(path):
            return _find_problem_inside(path)
        return (
            _find_framework_problem(path, set(os.listdir(path)), ranks)
            or _find_problem_inside(path)
            or _find_missing_kind(path, ranks)
        )
    except _FAULTS as e:
        return f"{type(e).__name__}: {e}"


def _find_framework_problem(folder: str, names: set[str], ranks: int) -> str:
    """Return which file is missing that the framework writes last; empty if none is, or for an unknown framework."""
    if _ATTACH_MARKER in names:
        return ""
    if _TRAINER_STATE not in names and any(map(_TRAINER.fullmatch, names)):
        return f"it has no {_TRAINER_STATE}, which the Trainer writes last"
    numbers: dict[str, set[int]] = {}
    for match in filter(None, map(_RANK_STATE.fullmatch, names)):
        numbers.setdefault(f"{match[1]}_{{}}.{match[3]}", set()).add(int(match[2]))
    for name, found in numbers.items():
        missing = set(range(max(ranks, max(found) + 1))) - found
        if missing:
            return f"it has no {name.format(min(missing))}: each rank writes one"
    if numbers or _TRAINER_STATE in names or not any(map(_WEIGHTS.fullmatch, names)):
        return ""
    if any(_is_of_the_program(folder, name) for name in names):
        return ""
    if re.fullmatch(r"checkpoint-\d+", os.path.basename(folder)):
        return f"it has neither {_TRAINER_STATE} nor random_states_0.pkl, which the Trainer and Accelerate write last"
    return "" if "config.json" in names else "it has no random_states_0.pkl, which Accelerate writes last"


def _is_of_the_program(folder: str, name: str) -> bool:
    """Return whether ``name`` is state that neither the Trainer nor Accelerate writes."""
    if _WEIGHTS.fullmatch(name) or _ACCELERATE.fullmatch(name):
        return False
    return name.endswith(_STATE_FILES) or os.path.isdir(os.path.join(folder, name))


def _find_missing_kind(folder: str, ranks: int) -> str:
    """Return a kind of file that ``folder`` lacks and an older checkpoint has; empty without one.

    The oldest complete one of the few before it counts: those after that may lack the same.
    """
    parent, name = os.path.split(os.path.abspath(folder))
    names = os.listdir(folder)
    present = set(map(_get_kind, names))
    for older in [] if _ATTACH_MARKER in names else _list_older(parent, name):
        files = _list_if_complete(older, ranks)
        if files:
            lacked = [f for f in sorted(files) if f.endswith(_STATE_FILES) and _get_kind(f) not in present]
            return f"it has no {lacked[0]}, and {os.path.basename(older)} has one" if lacked else ""
    return ""


def _list_if_complete(folder: str, ranks: int) -> set[str]:
    """Return the names in ``folder``; none if it is not complete by itself, or is being removed."""
    try:
        names = set(os.listdir(folder))
    except OSError:
        return set()
    is_complete = not _find_framework_problem(folder, names, ranks) and not _find_problem_inside(folder)
    return names if is_complete else set()


def _list_older(parent: str, name: str) -> list[str]:
    """Return the few folders in ``parent`` before ``name``, which differ in its numbers; the oldest first."""

    def split(text: str) -> tuple[list[str], list[int]]:
        return re.split(r"\d+", text), [int(number) for number in re.findall(r"\d+", text)]

    words, numbers = split(name)
    older = []
    for other in os.listdir(parent):
        if (parts := split(other))[0] == words and parts[1] < numbers and os.path.isdir(os.path.join(parent, other)):
            older.append((parts[1], os.path.join(parent, other)))
    return [path for _, path in sorted(older)[-_OLDER_COUNT:]]


def _get_kind(name: str) -> str:
    """Return ``name`` without the numbers of ranks and shards: the same for any number of ranks."""
    return re.sub(r"[-_]*\d+(-of-\d+)?", "", name)


def _find_problem_inside(path: str) -> str:
    """Return which file in ``path`` is missing or broken; empty if none is."""
    try:
        if not os.path.isdir(path):
            return _find_file_problem(path) if os.path.exists(path) else "it does not exist"
        names = set(os.listdir(path))
        if "checkpoint-is-incomplete.txt" in names:
            return "its save was interrupted (checkpoint-is-incomplete.txt)"
        if not names:
            return "it is empty"
        for name in sorted(names):
            inside = os.path.join(path, name)
            problem = _find_problem_inside(inside)
            if not problem and name.endswith(".index.json"):
                problem = _find_missing_shard(inside, names)
            if problem:
                return f"{name}: {problem}"
        return _find_distributed_problem(path, names)
    except _FAULTS as e:
        return f"{type(e).__name__}: {e}"


def _find_distributed_problem(folder: str, names: set[str]) -> str:
    """Return what a folder of ``torch.distributed.checkpoint`` lacks; empty for another folder."""
    shards = {name for name in names if name.endswith(".distcp")}
    if ".metadata" not in names:
        return "it has no .metadata, which torch.distributed.checkpoint writes last" if shards else ""
    with (
        open(os.path.join(folder, ".metadata"), "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
    ):
        named = {name.decode() for name in _SHARD.findall(data)}
    return _say_missing(named - names) or ("" if shards else "it has no .distcp file")


def _say_missing(missing: Iterable[str]) -> str:
    first, *more = [*sorted(missing), ""]
    return f"{len(more)} of its files are missing, such as {first}" if more else ""


def _find_missing_shard(index: str, names: set[str]) -> str:
    with open(index, encoding="utf-8") as file:
        return _say_missing(set(json.load(file)["weight_map"].values()) - names)


def _find_file_problem(path: str) -> str:
    if path.endswith(".safetensors"):
        return _find_safetensors_problem(path)
    if path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            json.load(file)
        return ""
    name = os.path.basename(path)
    if name == ".metadata":
        return "" if _is_pickle(path) else "it ends too early"
    if name.endswith(_STATE_FILES) and not os.path.getsize(path):
        return "it is empty"
    # torch.save writes a zip archive, whose directory of entries comes last; before torch 1.6 it wrote a pickle.
    if name.endswith(_TORCH_FILES) and _is_pickle(path):
        return ""
    is_zip = name.endswith(_TORCH_FILES) or _begins_as_zip(path)
    return "" if not is_zip or _is_whole_zip(path) else "it ends too early"


def _begins_as_zip(path: str) -> bool:
    """Return whether torch.save, or numpy.savez, has begun the file, under a name of any kind."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _is_whole_zip(path: str) -> bool:
    """Return whether the directory of the archive is there, and all of its entries lie before it."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(
            e.header_offset >= 0 and e.header_offset + 30 + e.compress_size <= archive.start_dir
            for e in archive.infolist()
        )


def _find_safetensors_problem(path: str) -> str:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            return "it ends within its header"
        header = json.loads(file.read(header_bytes))
    end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
    return "" if size >= 8 + header_bytes + end else f"it has {size} of {8 + header_bytes + end} bytes"


def _is_pickle(path: str) -> bool:
    """Return whether the file is a pickle with its last byte."""
    with open(path, "rb") as file:
        begin = file.read(2)
        if os.path.getsize(path) < 3 or begin[:1] != b"\x80":
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"."
