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

from clustertrain.checkpoint.core import json_tree, state_dict
from clustertrain.checkpoint.core.ranks import Ranks
from clustertrain.checkpoint.core.state_dict import LoadableState
from clustertrain.checkpoint.format.checksums import BLOCK_BYTES, align_to_blocks
from clustertrain.checkpoint.format.manifest import DamagedCheckpoint, Manifest, ShardRecord, TensorKind, TensorRecord
from clustertrain.checkpoint.format.shard_io import contiguous_strides, linear_span, overlap, read_into
from clustertrain.checkpoint.format.storage import Folder, RemoteFolder
from clustertrain.checkpoint.load import shared_read
from clustertrain.checkpoint.save.node_local import LocalTierReader
from clustertrain.errors import CheckpointError

log = logging.getLogger(__name__)

_CHANGED_MODEL_FIX = "use the model that saved the checkpoint, or start a new run"
Finalizer = Callable[[], None]
# Concurrent reads. They wait mainly for the disk: reading and hashing release the GIL.
_LOCAL_THREADS = 4
_REMOTE_THREADS = 16  # a store has high latency, and answers many requests at a time
_KERNEL_OPTIONS = ("foreach", "fused", "capturable")  # of torch.optim
_MAX_READ_BYTES = 8 * BLOCK_BYTES  # a larger shard is split between threads


class CheckpointReader:
    """Reader of one committed checkpoint."""

    def __init__(
        self, folder: Folder, manifest: Manifest, ranks: Ranks | None = None, local_tier: LocalTierReader | None = None
    ) -> None:
        """
        Args:
            ranks: the ranks that load the checkpoint together; None: this process alone.
            local_tier: tried before ``folder``.
        """
        self._folder = folder
        self._local_tier = local_tier
        self._manifest = manifest
        self._ranks = ranks or Ranks()
        self._tensors = {t.name: t for t in manifest.tensors}
        self._chunks = shared_read.ChunkTable(manifest) if self._ranks.world_size > 1 else None
        self._chunk_requests: dict[int, shared_read.ChunkRequest] = {}
        is_remote = isinstance(folder, RemoteFolder)
        self._pool = ThreadPoolExecutor(
            _REMOTE_THREADS if is_remote else min(_LOCAL_THREADS, os.cpu_count() or 1), "restore"
        )
        self._pending_reads: list[Future[None]] = []

    def load(self, state: LoadableState) -> Finalizer:
        """Start reading: modules in ``state`` are filled in place, everything else is read into temporary objects.

        Call :meth:`complete` next, then the returned function, which loads the temporary objects into ``state``. In
        between, the ranks agree that all bytes were valid. If they were not, a partly filled module is filled again
        from the next checkpoint, or the run ends.

        Raises:
            DamagedCheckpoint: bytes are missing or altered.
            CheckpointError: the checkpoint was saved from different objects than those in ``state``.
        """
        absent = sorted(state.keys() - self._manifest.values.keys())
        # Objects that a run may gain later, and that can start without saved state.
        fresh = {key: init for key in absent if callable(init := getattr(state[key], "init_fresh_state", None))}
        if missing := [key for key in absent if key not in fresh]:
            raise CheckpointError(
                f"{self._folder}: contains no state {', '.join(missing)}",
                fix="pass the same state to session.steps as the run that saved it",
            )
        names = state_dict.fqns_by_param_id(state)
        finalizers: list[Finalizer] = []
        for key, value in state.items():
            if key in fresh:
                finalizers.append(functools.partial(self._start_fresh, key, fresh[key]))
            elif isinstance(value, nn.Module):
                finalizers.append(self._load_module(key, value))
            elif isinstance(value, torch.optim.Optimizer):
                finalizers.append(self._load_optimizer(key, value, names, state_dict.all_stage_param_fqns(state)))
            else:
                finalizers.append(self._load_value(key, value, state))
        return lambda: _run_all(finalizers)

    def _start_fresh(self, key: str, start_fresh: Callable[[], None]) -> None:
        start_fresh()
        if self._ranks.rank == 0:
            log.warning("%s: contains no state %s, which starts fresh", self._folder, key)

    def complete(self) -> None:
        """Wait for all reads. Collective, after :meth:`load` succeeded on all ranks.

        If it raises on one rank, the others return.

        Raises:
            DamagedCheckpoint: bytes are missing or altered.
        """
        unshared, unshareable = set(self._chunk_requests), set[int]()
        if self._chunks is not None:
            try:
                checkpoint_id = self._manifest.made_in
                remaining = shared_read.read_shared(
                    self._ranks, checkpoint_id, self._chunks, self._chunk_requests, self._fetch, self._pool
                )
                if remaining is None:
                    return
                unshared = remaining
            except shared_read.SharedReadUnavailable as e:
                log.warning("the ranks of a node cannot map each other's memory, so each rank reads on its own: %s", e)
                unshareable = unshared
        for number in unshared:
            self._submit_read(
                functools.partial(self._read_unshared, self._chunk_requests[number], alone=number not in unshareable)
            )
        self._wait_for_reads()

    def close(self) -> None:
        """Cancel the reads that have not started, and wait for the others."""
        self._pool.shutdown(cancel_futures=True)

    def _fetch(self, chunk: shared_read.Chunk, buffer: memoryview) -> None:
        self._read_into(buffer, chunk.shard, chunk.low, alone=True)

    def _read_unshared(self, request: shared_read.ChunkRequest, *, alone: bool) -> None:
        buffer = _scratch_buffer(request.chunk.nbytes).numpy().data
        self._read_into(buffer, request.chunk.shard, request.chunk.low, alone=alone)
        for consumer in request.consumers:
            consumer(buffer)

    def _wait_for_reads(self) -> None:
        """Wait for the pending reads, and raise the first failure."""
        pending, self._pending_reads = self._pending_reads, []
        for future in pending:
            future.result()

    def rank_state(self, rank: int) -> Any:
        """Return the rank state that ``rank`` saved."""
        return json_tree.decode(self._manifest.values["ranks"][str(rank)], self._read_full_tensor)

    # -- tensors

    def _record(self, name: str) -> TensorRecord:
        if name not in self._tensors:
            raise CheckpointError(f"{self._folder}: contains no tensor {name}", fix=_CHANGED_MODEL_FIX)
        return self._tensors[name]

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> TensorRecord:
        record = self._record(name)
        if record.shape != shape:
            raise CheckpointError(
                f"{self._folder}: {name} has shape {record.shape}, but {shape} in this run", fix=_CHANGED_MODEL_FIX
            )
        return record

    def _read_full_tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor, wait for it and return it."""
        record = self._record(name)
        tensor = torch.empty(record.shape, dtype=state_dict.parse_dtype(record.dtype))
        earlier_reads, self._pending_reads = self._pending_reads, []
        self._fill_shard(state_dict.to_local_shard(name, "other", tensor), immediate=True)
        self._wait_for_reads()
        self._pending_reads = earlier_reads
        return tensor

    def _fill_shard(self, shard_to_fill: state_dict.LocalShard, *, immediate: bool = False) -> None:
        """Start to fill ``shard_to_fill.local_tensor``.

        :meth:`complete` waits for it; with ``immediate``, :meth:`_wait_for_reads` is sufficient.
        """
        record = self._check_shape(shard_to_fill.name, shard_to_fill.shape)
        filled = 0
        for n, shard in enumerate(record.shards):
            intersection = overlap(shard.start, shard.shape, shard_to_fill.start, shard_to_fill.local_tensor.shape)
            if intersection is None:
                continue
            src, dst = intersection
            filled += shard_to_fill.local_tensor[dst].numel()
            # Other ranks need the same bytes of a copy, the gaps in a strided part, or the rest of a partial block.
            low, high, dense = linear_span(src, shard.shape)
            low, high = low * record.itemsize, high * record.itemsize
            is_sole_reader = self._chunks is None or (
                shard_to_fill.is_only_copy and dense and align_to_blocks(low, high, shard.nbytes) == (low, high)
            )
            if is_sole_reader or immediate or not shared_read.is_shareable(record, shard):
                self._read_slice(shard_to_fill.local_tensor.detach(), record, shard, src, dst, alone=is_sole_reader)
            else:
                self._request_shared(shard_to_fill.local_tensor.detach(), record, n, src, dst)
        if filled != shard_to_fill.local_tensor.numel():
            raise DamagedCheckpoint(f"{self._folder}: {shard_to_fill.name} is incomplete")

    def _request_shared(
        self, local: torch.Tensor, record: TensorRecord, n: int, src: tuple[slice, ...], dst: tuple[slice, ...]
    ) -> None:
        """Request the part ``src`` of shard number ``n`` from the reads that this node's ranks share."""
        assert self._chunks is not None
        shape, dtype = record.shards[n].shape, state_dict.parse_dtype(record.dtype)
        row_shift = dst[0].start - src[0].start
        for chunk, first, stop in self._chunks.iter_chunks(record, n, src[0].start, src[0].stop):
            target = local[(slice(first + row_shift, stop + row_shift), *dst[1:])]
            src_offset = linear_span((slice(first, stop), *src[1:]), shape)[0] - chunk.low // record.itemsize
            consumer = functools.partial(_copy_strided, target, dtype, contiguous_strides(shape), src_offset)
            self._chunk_requests.setdefault(chunk.number, shared_read.ChunkRequest(chunk)).consumers.append(consumer)

    def _read_slice(
        self,
        local: torch.Tensor,
        record: TensorRecord,
        shard: ShardRecord,
        src: tuple[slice, ...],
        dst: tuple[slice, ...],
        *,
        alone: bool,
    ) -> None:
        """Start to read the part ``src`` of a shard into the part ``dst`` of a tensor.

        If both are contiguous, read directly into the tensor's memory.
        """
        size = record.itemsize
        low, _, dense = linear_span(src, shard.shape)
        first, last, dst_dense = linear_span(dst, tuple(local.shape))
        is_plain = (
            local.device.type == "cpu" and local.is_contiguous() and local.dtype == state_dict.parse_dtype(record.dtype)
        )
        if dense and dst_dense and is_plain:
            memory = local.reshape(-1)[first:last].view(torch.uint8).numpy().data
            for pos in range(0, len(memory), _MAX_READ_BYTES):
                chunk = memory[pos : pos + _MAX_READ_BYTES]
                self._submit_read(functools.partial(self._read_into, chunk, shard, low * size + pos, alone=alone))
            return
        if not local.dim():
            self._submit_read(functools.partial(self._read_strided, local, record, shard, src, alone=alone))
            return
        rows = max(1, _MAX_READ_BYTES // (contiguous_strides(shard.shape)[0] * size))
        for row in range(0, src[0].stop - src[0].start, rows):
            src_rows = slice(src[0].start + row, min(src[0].start + row + rows, src[0].stop))
            dst_rows = slice(dst[0].start + row, min(dst[0].start + row + rows, dst[0].stop))
            target, src_slice = local[(dst_rows, *dst[1:])], (src_rows, *src[1:])
            self._submit_read(functools.partial(self._read_strided, target, record, shard, src_slice, alone=alone))

    def _read_strided(
        self,
        target: torch.Tensor,
        record: TensorRecord,
        shard: ShardRecord,
        src: tuple[slice, ...],
        *,
        alone: bool,
    ) -> None:
        """Read all bytes from the first to the last one of ``src``, and copy the part from them."""
        low, high, _ = linear_span(src, shard.shape)
        data = _scratch_buffer((high - low) * record.itemsize)
        self._read_into(data.numpy().data, shard, low * record.itemsize, alone=alone)
        flat = data.view(state_dict.parse_dtype(record.dtype))
        target.copy_(flat.as_strided(tuple(target.shape), contiguous_strides(shard.shape)))

    def _read_into(self, buffer: memoryview, shard: ShardRecord, low: int, *, alone: bool = False) -> None:
        if self._local_tier is None or not self._local_tier.read_into(buffer, shard, low, alone=alone):
            read_into(buffer, self._folder, shard, low, alone=alone)

    def _submit_read(self, read: Callable[[], None]) -> None:
        self._pending_reads.append(self._pool.submit(read))

    # -- objects

    def _load_module(self, key: str, module: nn.Module) -> Finalizer:
        other_stage_names = {f"{key}/{name}" for name in state_dict.all_stage_fqns(module)}
        loaded_names: set[str] = set()
        finalizers: list[Finalizer] = []
        # Part by part, not from module_state_dict(): two stages of a rank may each have a copy of a tied tensor.
        for model_part in state_dict.model_parts(module):
            content = {state_dict.clean_fqn(k): v for k, v in model_part.state_dict(keep_vars=True).items()}
            tensors: dict[str, torch.Tensor] = {}
            json_tree.encode(content, key, tensors)
            for name, tensor in tensors.items():
                self._fill_shard(state_dict.to_local_shard(name, "model", tensor))
            loaded_names |= tensors.keys()
            extra_state = {
                k: v
                for k, v in self._manifest.values[key].items()
                if not isinstance(content.get(k), torch.Tensor)
                and (k in content or f"{key}/{k}" not in other_stage_names)
            }
            if extra_state:
                finalizers.append(
                    functools.partial(
                        _set_extra_state, model_part, json_tree.decode(extra_state, self._read_full_tensor)
                    )
                )
        unexpected = sorted(json_tree.tensor_names(self._manifest.values[key]) - loaded_names - other_stage_names)
        if unexpected:
            raise CheckpointError(
                f"{self._folder}: contains {unexpected[0]}, which the model does not have", fix=_CHANGED_MODEL_FIX
            )
        return lambda: _run_all(finalizers)

    def _load_optimizer(
        self, key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], global_fqns: frozenset[str]
    ) -> Finalizer:
        saved = self._manifest.values[key]
        current = state_dict.optimizer_state_dict(optimizer, names, key)["groups"]
        matched = self._match_groups(key, saved["groups"], [g["params"] for g in current], global_fqns)
        self._check_optimizer_name(key, optimizer.param_groups, matched)
        options = [self._group_options(g, s) for g, s in zip(optimizer.param_groups, matched, strict=True)]
        loads: list[Finalizer] = []
        for inner in state_dict.inner_optimizers(optimizer):
            # An inner optimizer gets the options of the outer one at the next step.
            inner_options = options if inner.optimizer is optimizer else [dict(g) for g in inner.optimizer.param_groups]
            state: dict[int, Any] = {}
            groups, first = [], 0
            for group, option in zip(inner.optimizer.param_groups, inner_options, strict=True):
                for i, p in enumerate(group["params"], start=first):
                    slot = saved["state"].get(names[id(inner.model_param(p))])
                    if slot:
                        state[i] = json_tree.decode(slot, functools.partial(self._read_like, p), self._read_full_tensor)
                groups.append({**option, "params": list(range(first, first + len(group["params"])))})
                first += len(group["params"])
            content = {"state": state, "param_groups": groups}
            loads.append(functools.partial(inner.optimizer.load_state_dict, content))

        def finish() -> None:
            _run_all(loads)
            for group, option in zip(optimizer.param_groups, options, strict=True):
                group.update(option)

        return finish

    def _check_optimizer_name(
        self, key: str, groups: list[dict[str, Any]], saved: Sequence[Mapping[str, Any] | None]
    ) -> None:
        """Raise CheckpointError if a different optimizer saved the state."""
        for group, saved_group in zip(groups, saved, strict=True):
            current_name = group.get(state_dict.OPTIMIZER_KEY)
            if current_name and saved_group and saved_group.get(state_dict.OPTIMIZER_KEY, current_name) != current_name:
                raise CheckpointError(
                    f"{self._folder}: the optimizer {key!r} is {current_name}, but the state of"
                    f" {saved_group[state_dict.OPTIMIZER_KEY]} was saved",
                    fix="keep optim.name, or start a new run",
                )

    def _group_options(self, group: dict[str, Any], saved: dict[str, Any] | None) -> dict[str, Any]:
        """Return the options of ``saved``, with the kernels of ``group``; all of ``group`` if there are none."""
        options = {k: v for k, v in (saved or group).items() if k != "params"}
        if saved is None:
            return options
        options = dict(json_tree.decode(options, self._read_full_tensor))
        # How this run computes, which depends on its device and layout.
        options |= {k: group[k] for k in _KERNEL_OPTIONS if k in group}
        for k, v in group.items():
            if isinstance(v, torch.Tensor) and v.dim() == 0 and k in options:
                options[k] = torch.full_like(v, options[k])  # a learning rate in a tensor stays in one
        return options

    def _match_groups(
        self, key: str, saved: list[dict[str, Any]], current: list[list[str]], global_fqns: frozenset[str]
    ) -> list[dict[str, Any] | None]:
        """Return, for each group of names, the saved group of its parameters; None for a group without parameters."""
        group_of = {name: i for i, g in enumerate(saved) for name in g["params"]}
        matches = [{group_of.get(name) for name in names} for names in current]
        missing = group_of.keys() - {n for names in current for n in names} - global_fqns
        if missing or any(len(m) > 1 or None in m for m in matches):
            raise CheckpointError(
                f"{self._folder}: the optimizer {key!r} has different parameters or groups than the saved one",
                fix="create it with the same parameters in the same groups",
            )
        return [saved[m.pop() or 0] if m else None for m in matches]

    def _read_like(self, p: torch.Tensor, name: str, kind: TensorKind = "optimizer") -> torch.Tensor:
        """Return the saved tensor ``name`` of parameter ``p``, in the layout of ``p`` if it has the same shape."""
        record = self._record(name)
        dtype = state_dict.parse_dtype(record.dtype)
        if record.shape == tuple(p.shape):
            tensor = torch.empty_like(p, dtype=dtype, requires_grad=False)  # a DTensor if p is one
        else:
            tensor = torch.empty(record.shape, dtype=dtype)
        self._fill_shard(state_dict.to_local_shard(name, kind, tensor))
        return tensor

    def _load_value(self, key: str, value: Any, state: LoadableState) -> Finalizer:
        if isinstance(value, torch.Tensor):
            like = functools.partial(self._read_like, value, kind="other")
            for name in json_tree.tensor_names(self._manifest.values[key]):
                self._check_shape(name, tuple(value.shape))
            content = json_tree.decode(self._manifest.values[key], like, self._read_full_tensor)
            return lambda: _copy_in_place(value, content)  # the script may have other references to this tensor
        content = json_tree.decode(self._manifest.values[key], self._read_full_tensor)
        if state_dict.is_stateful(value):
            return lambda: value.load_state_dict(content)
        return lambda: state.__setitem__(key, content)


def _copy_strided(
    target: torch.Tensor, dtype: torch.dtype, strides: list[int], storage_offset: int, memory: memoryview
) -> None:
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    target.copy_(flat.as_strided(tuple(target.shape), strides, storage_offset))


_thread_local = threading.local()


def _scratch_buffer(size: int) -> torch.Tensor:
    """Return this thread's buffer, valid until its next call. Allocating one takes longer than reading into it."""
    buffer: torch.Tensor | None = getattr(_thread_local, "scratch", None)
    if buffer is None or buffer.numel() < size:
        buffer = _thread_local.scratch = torch.empty(size, dtype=torch.uint8)
    return buffer[:size]


def _run_all(finalizers: list[Finalizer]) -> None:
    for call in finalizers:
        call()


def _copy_in_place(target: torch.Tensor, content: torch.Tensor) -> None:
    target.detach().copy_(content)


def _set_extra_state(module: nn.Module, extra_state: dict[str, Any]) -> None:
    """Set the extra state of submodules: everything in a state_dict besides tensors."""
    for name, value in extra_state.items():
        path, _, _ = name.rpartition("_extra_state")
        module.get_submodule(path.rstrip(".")).set_extra_state(value)
