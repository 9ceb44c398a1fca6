"""Read a checkpoint into live objects, whatever layout and world size saved it. Each rank reads the shards it needs."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint.core import json_tree
from clustertrain.checkpoint.core import state_dict as objects
from clustertrain.checkpoint.core.control_group import Ranks
from clustertrain.checkpoint.format.checksums import BLOCK_BYTES, aligned
from clustertrain.checkpoint.format.manifest import Damaged, Kind, Manifest, ShardRecord, TensorRecord
from clustertrain.checkpoint.format.shard_io import overlap, read_into, span, strides_of
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.load import shared_read
from clustertrain.checkpoint.save.node_local import Near
from clustertrain.errors import CheckpointError

log = logging.getLogger(__name__)

Finish = Callable[[], None]
# Reads under way at once. They wait for the disk more than for each other: reading and hashing leave Python's lock.
_THREADS = 4
_FAR_THREADS = 16  # a store answers each request late, and many at a time
_PIECE_BYTES = 8 * BLOCK_BYTES  # of a large shard, for one thread


class Reader:
    """One committed checkpoint."""

    def __init__(
        self, folder: Folder, manifest: Manifest, ranks: Ranks | None = None, near: Near | None = None
    ) -> None:
        """``near`` is asked for bytes before ``folder`` is. Without ``ranks`` this process reads by itself."""
        self._folder = folder
        self._near = near
        self._manifest = manifest
        self._ranks = ranks or Ranks()
        self._tensors = {t.name: t for t in manifest.tensors}
        self._chunks = shared_read.Chunks(manifest) if self._ranks.world_size > 1 else None
        self._wanted: dict[int, shared_read.Wanted] = {}
        far = isinstance(folder, RemoteFolder)
        self._pool = ThreadPoolExecutor(_FAR_THREADS if far else min(_THREADS, os.cpu_count() or 1), "restore")
        self._reading: list[Future[None]] = []

    def load(self, state: dict[str, Any]) -> Finish:
        """Begin to fill the modules of ``state`` in place, and to read the rest beside it; :meth:`complete` comes next,
        and the returned call then puts all that in force.

        In parts, because the ranks must agree that every byte was good before any object takes the new state. A module
        that was half filled is filled again from the next checkpoint, or the run ends.

        Raises:
            Damaged: bytes missing or altered.
            CheckpointError: the checkpoint is of other objects than ``state``.
        """
        lacking = sorted(state.keys() - self._manifest.values.keys())
        # What a run may come to have later, and can do without what was.
        anew = {key: begin for key in lacking if callable(begin := getattr(state[key], "begin_anew", None))}
        if missing := [key for key in lacking if key not in anew]:
            raise CheckpointError(
                f"{self._folder}: holds no state {', '.join(missing)}",
                fix="give session.steps the same state as the run that saved it",
            )
        names = objects.parameter_names(state)
        todo: list[Finish] = []
        for key, value in state.items():
            if key in anew:
                todo.append(functools.partial(self._begin_anew, key, anew[key]))
            elif isinstance(value, nn.Module):
                todo.append(self._load_module(key, value))
            elif isinstance(value, torch.optim.Optimizer):
                todo.append(self._load_optimizer(key, value, names, objects.parameters_of_whole(state)))
            else:
                todo.append(self._load_other(key, value, state))
        return lambda: _call_all(todo)

    def _begin_anew(self, key: str, begin: Callable[[], None]) -> None:
        begin()
        if self._ranks.rank == 0:
            log.warning("%s: holds no state %s, which begins anew", self._folder, key)

    def complete(self) -> None:
        """Collective, once :meth:`load` has gone well on all ranks. Where it raises on one, the others return.

        Raises:
            Damaged: bytes missing or altered.
        """
        rest, shared = set(self._wanted), set[int]()
        if self._chunks is not None:
            try:
                which = self._manifest.made_in
                found = shared_read.read(self._ranks, which, self._chunks, self._wanted, self._fetch, self._pool)
                if found is None:
                    return
                rest = found
            except shared_read.CannotShare as e:
                log.warning("the ranks of a node cannot see each other's memory, so each reads for itself: %s", e)
                shared = rest
        for c in rest:
            self._begin(functools.partial(self._take_alone, self._wanted[c], alone=c not in shared))
        self._all_read()

    def close(self) -> None:
        """What is still being read is not waited for, but for what has begun."""
        self._pool.shutdown(cancel_futures=True)

    def _fetch(self, chunk: shared_read.Chunk, memory: memoryview) -> None:
        self._read_into(memory, chunk.shard, chunk.low, alone=True)

    def _take_alone(self, wanted: shared_read.Wanted, *, alone: bool) -> None:
        memory = _scratch(wanted.chunk.nbytes).numpy().data
        self._read_into(memory, wanted.chunk.shard, wanted.chunk.low, alone=alone)
        for take in wanted.takes:
            take(memory)

    def _all_read(self) -> None:
        """Wait for all that is being read. Raises the first failure."""
        reading, self._reading = self._reading, []
        for piece in reading:
            piece.result()

    def rank_state(self, rank: int) -> Any:
        """What this rank number saved for itself."""
        return json_tree.decode(self._manifest.values["ranks"][str(rank)], self._whole)

    # -- tensors

    def _record(self, name: str) -> TensorRecord:
        if name not in self._tensors:
            raise CheckpointError(f"{self._folder}: holds no tensor {name}", fix="was the model changed?")
        return self._tensors[name]

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> TensorRecord:
        record = self._record(name)
        if record.shape != shape:
            raise CheckpointError(
                f"{self._folder}: {name} has shape {record.shape} there and {shape} here", fix="was the model changed?"
            )
        return record

    def _whole(self, name: str) -> torch.Tensor:
        """All of a tensor, there when this returns."""
        record = self._record(name)
        tensor = torch.empty(record.shape, dtype=objects.dtype_of(record.dtype))
        others, self._reading = self._reading, []
        self._fill(objects.block(name, "other", tensor), now=True)
        self._all_read()
        self._reading = others
        return tensor

    def _fill(self, block: objects.Block, *, now: bool = False) -> None:
        """Begin to fill ``block.local``; :meth:`complete` sees the end of it, or with ``now`` :meth:`_all_read`."""
        record = self._check_shape(block.name, block.shape)
        filled = 0
        for n, shard in enumerate(record.shards):
            common = overlap(shard.start, shard.shape, block.start, block.local.shape)
            if common is None:
                continue
            there, here = common
            filled += block.local[here].numel()
            # Of copies the other ranks need all, of what lies apart what is between, of half a block the other half.
            low, high, dense = span(there, shard.shape)
            low, high = low * record.itemsize, high * record.itemsize
            alone = self._chunks is None or (block.only and dense and aligned(low, high, shard.nbytes) == (low, high))
            if alone or now or not shared_read.fits(record, shard):
                self._read_part(block.local.detach(), record, shard, there, here, alone=alone)
            else:
                self._share_part(block.local.detach(), record, n, there, here)
        if filled != block.local.numel():
            raise Damaged(f"{self._folder}: {block.name} is not there as a whole")

    def _share_part(
        self, local: torch.Tensor, record: TensorRecord, n: int, there: tuple[slice, ...], here: tuple[slice, ...]
    ) -> None:
        """Take the part ``there`` of shard number ``n`` from what this node's ranks read together."""
        assert self._chunks is not None
        shape, dtype = record.shards[n].shape, objects.dtype_of(record.dtype)
        ahead = here[0].start - there[0].start
        for chunk, first, stop in self._chunks.of(record, n, there[0].start, there[0].stop):
            into = local[(slice(first + ahead, stop + ahead), *here[1:])]
            begins = span((slice(first, stop), *there[1:]), shape)[0] - chunk.low // record.itemsize
            take = functools.partial(_take, into, dtype, strides_of(shape), begins)
            self._wanted.setdefault(chunk.number, shared_read.Wanted(chunk)).takes.append(take)

    def _read_part(
        self,
        local: torch.Tensor,
        record: TensorRecord,
        shard: ShardRecord,
        there: tuple[slice, ...],
        here: tuple[slice, ...],
        *,
        alone: bool,
    ) -> None:
        """Begin to read the part ``there`` of a shard into the part ``here`` of a tensor: where both are in one piece,
        straight into its memory."""
        size = record.itemsize
        low, _, dense = span(there, shard.shape)
        first, last, straight = span(here, tuple(local.shape))
        plain = local.device.type == "cpu" and local.is_contiguous() and local.dtype == objects.dtype_of(record.dtype)
        if dense and straight and plain:
            memory = local.reshape(-1)[first:last].view(torch.uint8).numpy().data
            for at in range(0, len(memory), _PIECE_BYTES):
                piece = memory[at : at + _PIECE_BYTES]
                self._begin(functools.partial(self._read_into, piece, shard, low * size + at, alone=alone))
            return
        if not local.dim():
            self._begin(functools.partial(self._read_apart, local, record, shard, there, alone=alone))
            return
        rows = max(1, _PIECE_BYTES // (strides_of(shard.shape)[0] * size))
        for row in range(0, there[0].stop - there[0].start, rows):
            from_there = slice(there[0].start + row, min(there[0].start + row + rows, there[0].stop))
            to_here = slice(here[0].start + row, min(here[0].start + row + rows, here[0].stop))
            into, part = local[(to_here, *here[1:])], (from_there, *there[1:])
            self._begin(functools.partial(self._read_apart, into, record, shard, part, alone=alone))

    def _read_apart(
        self,
        into: torch.Tensor,
        record: TensorRecord,
        shard: ShardRecord,
        there: tuple[slice, ...],
        *,
        alone: bool,
    ) -> None:
        """Read all from the first to the last byte of ``there``, and copy from that."""
        low, high, _ = span(there, shard.shape)
        data = _scratch((high - low) * record.itemsize)
        self._read_into(data.numpy().data, shard, low * record.itemsize, alone=alone)
        flat = data.view(objects.dtype_of(record.dtype))
        into.copy_(flat.as_strided(tuple(into.shape), strides_of(shard.shape)))

    def _read_into(self, into: memoryview, shard: ShardRecord, low: int, *, alone: bool = False) -> None:
        if self._near is None or not self._near.read_into(into, shard, low, alone=alone):
            read_into(into, self._folder, shard, low, alone=alone)

    def _begin(self, read: Callable[[], None]) -> None:
        self._reading.append(self._pool.submit(read))

    # -- objects

    def _load_module(self, key: str, module: nn.Module) -> Finish:
        elsewhere = {f"{key}/{name}" for name in objects.names_of_whole(module)}
        held: set[str] = set()
        todo: list[Finish] = []
        # Part by part and not from module_state(): two stages of a rank may each have a copy of what is tied.
        for part in objects.parts(module):
            content = {objects.clean(k): v for k, v in part.state_dict(keep_vars=True).items()}
            tensors: dict[str, torch.Tensor] = {}
            json_tree.encode(content, key, tensors)
            for name, tensor in tensors.items():
                self._fill(objects.block(name, "model", tensor))
            held |= tensors.keys()
            plain = {
                k: v
                for k, v in self._manifest.values[key].items()
                if not isinstance(content.get(k), torch.Tensor) and (k in content or f"{key}/{k}" not in elsewhere)
            }
            if plain:
                todo.append(functools.partial(_load_extra, part, json_tree.decode(plain, self._whole)))
        extra = sorted(json_tree.tensor_names(self._manifest.values[key]) - held - elsewhere)
        if extra:
            raise CheckpointError(f"{self._folder}: holds {extra[0]}, which the model lacks", fix="was it changed?")
        return lambda: _call_all(todo)

    def _load_optimizer(
        self, key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], of_whole: frozenset[str]
    ) -> Finish:
        saved = self._manifest.values[key]
        current = objects.optimizer_state(optimizer, names, key)["groups"]
        found = self._match_groups(key, saved["groups"], [g["params"] for g in current], of_whole)
        self._check_kind(key, optimizer.param_groups, found)
        options = [self._options(g, s) for g, s in zip(optimizer.param_groups, found, strict=True)]
        loads: list[Finish] = []
        for kept in objects.keepers(optimizer):
            # Those inside another one get its options at the next step.
            own = options if kept.optimizer is optimizer else [dict(g) for g in kept.optimizer.param_groups]
            state: dict[int, Any] = {}
            groups, first = [], 0
            for group, option in zip(kept.optimizer.param_groups, own, strict=True):
                for i, p in enumerate(group["params"], start=first):
                    slot = saved["state"].get(names[id(kept.of(p))])
                    if slot:
                        state[i] = json_tree.decode(slot, functools.partial(self._like, p), self._whole)
                groups.append({**option, "params": list(range(first, first + len(group["params"])))})
                first += len(group["params"])
            content = {"state": state, "param_groups": groups}
            loads.append(functools.partial(kept.optimizer.load_state_dict, content))

        def finish() -> None:
            _call_all(loads)
            for group, option in zip(optimizer.param_groups, options, strict=True):
                group.update(option)

        return finish

    def _check_kind(self, key: str, groups: list[dict[str, Any]], saved: Sequence[Mapping[str, Any] | None]) -> None:
        """Raises CheckpointError: the state would be another optimizer's."""
        for group, there in zip(groups, saved, strict=True):
            here = group.get(objects.OPTIMIZER)
            if here and there and there.get(objects.OPTIMIZER, here) != here:
                raise CheckpointError(
                    f"{self._folder}: the optimizer {key!r} is {here}, and the one saved {there[objects.OPTIMIZER]}",
                    fix="keep optim.name for a run, or begin a new one",
                )

    def _options(self, group: dict[str, Any], saved: dict[str, Any] | None) -> dict[str, Any]:
        """The options of ``saved``; those of ``group`` itself where there is none."""
        options = {k: v for k, v in (saved or group).items() if k != "params"}
        if saved is None:
            return options
        options = dict(json_tree.decode(options, self._whole))
        for k, v in group.items():
            if isinstance(v, torch.Tensor) and v.dim() == 0 and k in options:
                options[k] = torch.full_like(v, options[k])  # a learning rate that is kept in a tensor stays one
        return options

    def _match_groups(
        self, key: str, saved: list[dict[str, Any]], current: list[list[str]], of_whole: frozenset[str]
    ) -> list[dict[str, Any] | None]:
        """For each group of names the saved group that its parameters were in; None for one without parameters."""
        group_of = {name: i for i, g in enumerate(saved) for name in g["params"]}
        matches = [{group_of.get(name) for name in names} for names in current]
        missing = group_of.keys() - {n for names in current for n in names} - of_whole
        if missing or any(len(m) > 1 or None in m for m in matches):
            raise CheckpointError(
                f"{self._folder}: the optimizer {key!r} has other parameters or groups than the one saved",
                fix="make it over the same parameters, in groups of the same members",
            )
        return [saved[m.pop() or 0] if m else None for m in matches]

    def _like(self, p: torch.Tensor, name: str, kind: Kind = "optimizer") -> torch.Tensor:
        """The saved ``name`` that belongs to ``p``, laid out as ``p`` is where it has its shape."""
        record = self._record(name)
        dtype = objects.dtype_of(record.dtype)
        if record.shape == tuple(p.shape):
            tensor = torch.empty_like(p, dtype=dtype, requires_grad=False)  # a DTensor where p is one
        else:
            tensor = torch.empty(record.shape, dtype=dtype)
        self._fill(objects.block(name, kind, tensor))
        return tensor

    def _load_other(self, key: str, value: Any, state: dict[str, Any]) -> Finish:
        if isinstance(value, torch.Tensor):
            like = functools.partial(self._like, value, kind="other")
            for name in json_tree.tensor_names(self._manifest.values[key]):
                self._check_shape(name, tuple(value.shape))
            content = json_tree.decode(self._manifest.values[key], like, self._whole)
            return lambda: _copy(value, content)  # in place: the script may hold the same tensor elsewhere
        content = json_tree.decode(self._manifest.values[key], self._whole)
        if objects.is_stateful(value):
            return lambda: value.load_state_dict(content)
        return lambda: state.__setitem__(key, content)


def _take(into: torch.Tensor, dtype: torch.dtype, strides: list[int], begins: int, memory: memoryview) -> None:
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    into.copy_(flat.as_strided(tuple(into.shape), strides, begins))


_own = threading.local()


def _scratch(size: int) -> torch.Tensor:
    """Memory of this thread's, until its next call: to get it anew each time takes longer than to read into it."""
    kept: torch.Tensor | None = getattr(_own, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = _own.scratch = torch.empty(size, dtype=torch.uint8)
    return kept[:size]


def _call_all(todo: list[Finish]) -> None:
    for call in todo:
        call()


def _copy(into: torch.Tensor, content: torch.Tensor) -> None:
    into.detach().copy_(content)


def _load_extra(module: nn.Module, plain: dict[str, Any]) -> None:
    """Extra state is all that a module's state_dict holds besides tensors."""
    for name, value in plain.items():
        path, _, _ = name.rpartition("_extra_state")
        module.get_submodule(path.rstrip(".")).set_extra_state(value)
