"""Read a checkpoint into live objects, whatever layout and world size saved it. Each rank reads the shards it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clustertrain.checkpoint import state as objects
from clustertrain.checkpoint import tree
from clustertrain.checkpoint.blocks import overlap, read_shard
from clustertrain.checkpoint.manifest import Damaged, Manifest, TensorRecord
from clustertrain.errors import CheckpointError

Finish = Callable[[], None]


class Reader:
    """One committed checkpoint."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._tensors = {t.name: t for t in manifest.tensors}

    def load(self, state: dict[str, Any]) -> Finish:
        """Fill the modules of ``state`` in place and read the rest beside it; the returned call puts that in force.

        In two parts, because the ranks must agree that every byte was good before any object takes the new state. A
        module that was half filled is filled again from the next checkpoint, or the run ends.

        Raises:
            Damaged: bytes missing or altered.
            CheckpointError: the checkpoint is of other objects than ``state``.
        """
        missing = sorted(state.keys() - self._manifest.values.keys())
        if missing:
            raise CheckpointError(
                f"{self._folder}: holds no state {', '.join(missing)}",
                fix="give session.steps the same state as the run that saved it",
            )
        names = objects.parameter_names(state)
        todo: list[Finish] = []
        for key, value in state.items():
            if isinstance(value, nn.Module):
                todo.append(self._load_module(key, value))
            elif isinstance(value, torch.optim.Optimizer):
                todo.append(self._load_optimizer(key, value, names))
            else:
                todo.append(self._load_other(key, value, state))

        def finish() -> None:
            for call in todo:
                call()

        return finish

    def rank_state(self, rank: int) -> Any:
        """What this rank number saved for itself."""
        return tree.decode(self._manifest.values["ranks"][str(rank)], self._whole)

    # -- tensors

    def _record(self, name: str) -> TensorRecord:
        if name not in self._tensors:
            raise CheckpointError(f"{self._folder}: holds no tensor {name}", fix="was the model changed?")
        return self._tensors[name]

    def _whole(self, name: str) -> torch.Tensor:
        record = self._record(name)
        tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        self._fill(objects.block(name, "other", tensor))
        return tensor

    def _fill(self, block: objects.Block) -> None:
        record = self._record(block.name)
        if record.shape != block.shape:
            raise CheckpointError(
                f"{self._folder}: {block.name} has shape {record.shape} there and {block.shape} here",
                fix="was the model changed?",
            )
        dtype = getattr(torch, record.dtype)
        filled = 0
        for shard in record.shards:
            common = overlap(shard.start, shard.shape, block.start, block.local.shape)
            if common is None:
                continue
            data = torch.frombuffer(read_shard(self._folder, shard), dtype=dtype).reshape(shard.shape)
            part = data[common[0]]
            block.local[common[1]].copy_(part)
            filled += part.numel()
        if filled != block.local.numel():
            raise Damaged(f"{self._folder}: {block.name} is not there as a whole")

    # -- objects

    def _load_module(self, key: str, module: nn.Module) -> Finish:
        content = objects.module_state(module)
        tensors: dict[str, torch.Tensor] = {}
        tree.encode(content, key, tensors)
        extra = sorted(tree.tensor_names(self._manifest.values[key]) - tensors.keys())
        if extra:
            raise CheckpointError(f"{self._folder}: holds {extra[0]}, which the model lacks", fix="was it changed?")
        for name, tensor in tensors.items():
            self._fill(objects.block(name, "model", tensor))
        plain = {k: v for k, v in self._manifest.values[key].items() if not isinstance(content.get(k), torch.Tensor)}
        if not plain:
            return lambda: None
        decoded = tree.decode(plain, self._whole)
        return lambda: _load_extra(objects.unwrap(module), decoded)

    def _load_optimizer(self, key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Finish:
        saved = self._manifest.values[key]
        current = objects.optimizer_state(optimizer, names, key)
        if [g["params"] for g in saved["groups"]] != [g["params"] for g in current["groups"]]:
            raise CheckpointError(
                f"{self._folder}: the optimizer {key!r} has other parameters or groups than the one saved",
                fix="make it over the same parameters in the same order",
            )
        params = [p for g in optimizer.param_groups for p in g["params"]]
        state: dict[int, Any] = {}
        for i, p in enumerate(params):

            def like_parameter(name: str, p: torch.Tensor = p) -> torch.Tensor:
                record = self._record(name)
                dtype = getattr(torch, record.dtype)
                if record.shape == tuple(p.shape):
                    tensor = torch.zeros_like(p, dtype=dtype, requires_grad=False)  # a DTensor where p is one
                else:
                    tensor = torch.zeros(record.shape, dtype=dtype)
                self._fill(objects.block(name, "optimizer", tensor))
                return tensor

            slot = saved["state"].get(names[id(p)])
            if slot:
                state[i] = tree.decode(slot, like_parameter)
        groups, first = [], 0
        for g in saved["groups"]:
            hyper = tree.decode({k: v for k, v in g.items() if k != "params"}, self._whole)
            groups.append({**hyper, "params": list(range(first, first + len(g["params"])))})
            first += len(g["params"])
        return lambda: optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _load_other(self, key: str, value: Any, state: dict[str, Any]) -> Finish:
        content = tree.decode(self._manifest.values[key], self._whole)
        if objects.is_stateful(value):
            return lambda: value.load_state_dict(content)
        if isinstance(value, torch.Tensor):
            return lambda: _copy(value, content)  # in place: the script may hold the same tensor elsewhere
        return lambda: state.__setitem__(key, content)


def _copy(into: torch.Tensor, content: torch.Tensor) -> None:
    into.detach().copy_(content)


def _load_extra(module: nn.Module, plain: dict[str, Any]) -> None:
    """Extra state is all that a module's state_dict holds besides tensors."""
    for name, value in plain.items():
        path, _, _ = name.rpartition("_extra_state")
        module.get_submodule(path.rstrip(".")).set_extra_state(value)
